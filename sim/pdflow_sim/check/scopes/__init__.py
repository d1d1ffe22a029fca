"""Scopes: the worlds that are explored, and the goals that each must reach for its result to count."""
