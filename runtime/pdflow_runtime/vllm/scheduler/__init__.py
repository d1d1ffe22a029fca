"""The half of the connector in EngineCore."""
