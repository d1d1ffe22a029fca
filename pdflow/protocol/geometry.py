"""The interface to the KV layout: which P rank writes which D rank, and how many bytes. Implemented by `layout`."""

from __future__ import annotations

from typing import Protocol

from pdflow.protocol.ids import Shards


class Geometry(Protocol):
    """Pure functions of two engines' shards; implementations cache."""

    def targets(self, p_rank: int, p: Shards, d: Shards) -> tuple[int, ...]:
        """The D ranks that P rank `p_rank` writes, ascending. ValueError if the layouts cannot be paired."""
        ...

    def sources(self, d_rank: int, p: Shards, d: Shards) -> tuple[int, ...]:
        """The P ranks that write D rank `d_rank`, ascending."""
        ...

    def pairs(self, p: Shards, d: Shards) -> tuple[tuple[int, int], ...]:
        """Every (p_rank, d_rank) that moves bytes, in one fixed order."""
        ...

    def nbytes(self, p_rank: int, d_rank: int, p: Shards, d: Shards, num_tokens: int) -> int:
        """Bytes of `num_tokens` tokens' KV that this pair moves."""
        ...
