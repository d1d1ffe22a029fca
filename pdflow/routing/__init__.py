"""The router's decisions: which engines serve a request, in which order its legs start, and what a failure leads to."""
