"""Attention over the paged KV cache: one way for any device, two for GPUs."""
