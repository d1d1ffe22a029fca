"""Which engines there are: heartbeats, and engines that are started and stopped."""
