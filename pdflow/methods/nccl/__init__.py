"""NCCL groups of two ranks: how many there are, which end is which rank, and what they take of GPU memory."""
