"""The router of a live cluster."""
