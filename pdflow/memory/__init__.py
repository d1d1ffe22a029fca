"""Allocators as plain data structures for every world: the paged block pool with generations and quarantine."""
