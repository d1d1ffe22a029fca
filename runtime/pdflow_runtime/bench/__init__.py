"""`pdflow bench`: sends a workload to a server that answers OpenAI's API, and reports how long it took.

The server is observed from outside, through its HTTP answers alone, whatever implements it.
"""
