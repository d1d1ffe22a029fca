"""Small deterministic engines behind the real cores."""
