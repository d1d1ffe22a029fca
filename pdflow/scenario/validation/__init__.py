"""What the parts of a scenario must be to each other."""
