"""The fit of a workload model to a trace."""
