"""What lies between nodes: messages, one-sided operations, links and paths."""
