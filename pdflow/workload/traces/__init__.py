"""Recorded workloads: their formats, read and described."""
