"""Membership of engines: heartbeats, and engines that are started and stopped."""
