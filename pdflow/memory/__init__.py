"""Allocators as plain data structures, the same in every world: the paged block pool with generations and quarantine."""
