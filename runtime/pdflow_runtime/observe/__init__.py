"""What a live cluster records of itself, and how it is shown."""
