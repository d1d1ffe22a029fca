"""Observation of a run while it goes on: recordings, the live table, the text trace, liveness."""
