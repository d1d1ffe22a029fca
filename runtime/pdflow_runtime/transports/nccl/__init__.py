"""The NCCL transport: groups of two ranks, and a stand-in for machines without a GPU."""
