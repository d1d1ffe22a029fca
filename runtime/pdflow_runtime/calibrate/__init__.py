"""`pdflow calibrate` of a running cluster: what its steps, its links and its messages take, as a scenario says it."""
