"""NCCL groups of two ranks: which there are, who is which rank, and what they take."""
