"""NCCL groups of two ranks, as P2P NCCL makes them (PR #18242): how many there are, and what they take of each GPU.

Each rank of a P engine shares a group with the rank of its number in each D engine that it has sent to. Groups are made
at the first use and used again. As published they are never closed, so sooner or later each P rank has one for each D
engine and the other way round; a scenario may say how many a rank keeps (`nccl.table`). They are made when vLLM has
measured its memory, and so take theirs from what `gpu_memory_utilization` leaves. What making one takes is the first
contact of two engines (`handshake_s`): all ranks make theirs at once.
"""

from __future__ import annotations

from typing import Final

BYTES_PER_CHANNEL: Final = 6_000_000
BYTES_WITHOUT_CHANNELS: Final = 4_000_000
"""The line through the two figures of PR #18242: about 100 MB at NCCL_MAX_NCHANNELS = 16, and 52 MB at 8."""


def group_bytes(channels: int) -> int:
    """Return the bytes that one group takes of the memory of each of its two GPUs."""
    return BYTES_WITHOUT_CHANNELS + BYTES_PER_CHANNEL * channels


def pair_groups(p_engines: int, d_engines: int, tp: int) -> int:
    """Return the number of groups between P and D: as many for each pair of engines as they have ranks."""
    return p_engines * d_engines * tp


def all_groups(p_engines: int, d_engines: int, tp: int) -> int:
    """Return the number of all groups, with those within engines, which vLLM has anyway: one in each engine that has
    more than one rank."""
    return pair_groups(p_engines, d_engines, tp) + (p_engines + d_engines if tp > 1 else 0)


def bytes_per_gpu(peers: int, channels: int) -> int:
    """Return the bytes that the groups with `peers` engines of the other side take of one GPU."""
    return peers * group_bytes(channels)


def most_peers(room_bytes: int, channels: int) -> int:
    """Return with how many engines of the other side a GPU can share groups that has `room_bytes` left for them."""
    return max(0, room_bytes) // group_bytes(channels)
