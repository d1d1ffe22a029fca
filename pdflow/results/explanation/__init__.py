"""What the latency of a run's requests is made of: the stages of one request, or of the slowest ones."""
