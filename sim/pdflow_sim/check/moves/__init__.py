"""What may happen in a state, and what it leads to."""
