"""The network between nodes: messages, one-sided operations, links and paths."""
