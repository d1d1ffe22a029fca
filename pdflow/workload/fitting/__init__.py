"""A workload model from a trace."""
