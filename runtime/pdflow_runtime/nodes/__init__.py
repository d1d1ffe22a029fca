"""An engine of a live cluster: its core, its ranks, its streams and its HTTP API."""
