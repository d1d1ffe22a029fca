"""`pdflow bench`: sends a workload to a server that answers OpenAI's API, and says how long it took.

From outside: whoever answers, by whatever means, is seen through its HTTP answers alone.
"""
