"""`pdflow calibrate` of a running cluster: measures its steps, its links and its messages, and writes the results as a
scenario."""
