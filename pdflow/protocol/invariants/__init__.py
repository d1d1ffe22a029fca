"""The safety invariants, judged from outside by an observer of every event and effect."""
