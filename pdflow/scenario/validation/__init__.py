"""The rules between the parts of a scenario."""
