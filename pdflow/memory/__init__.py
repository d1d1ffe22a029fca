"""Allocators as plain data structures for every world: paged block pools with generations and quarantine, one of them
with a memory for prefixes; and in bytes, a ring, a buddy pool, and buffers with a threshold."""
