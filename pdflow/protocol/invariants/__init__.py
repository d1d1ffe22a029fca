"""The safety invariants, checked from outside by an observer of every event and effect."""
