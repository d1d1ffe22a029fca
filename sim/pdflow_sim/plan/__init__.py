"""`pdflow plan`: from a scenario's traffic and a service level to a cluster, with reasons."""
