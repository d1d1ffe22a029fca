"""The hidden states that a store is given beside KV: those that a prompt's last layer has left, of `bytes_per_token`.

Every rank of D needs them all, and gets them from one rank of P's last stage, together with its KV: there are no more
and no fewer pairs. Source: PR #12957, whose D decodes only if it has both.
"""

from __future__ import annotations

from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import Shards


class HiddenStates:
    """A geometry with hidden states. Satisfies `pdflow.protocol.geometry.Geometry`."""

    def __init__(self, kv: Geometry, bytes_per_token: int) -> None:
        self.kv = kv
        self.bytes_per_token = bytes_per_token
        self.carriers: dict[tuple[Shards, Shards], frozenset[tuple[int, int]]] = {}
        """The pairs that bring them."""

    def targets(self, p_rank: int, p: Shards, d: Shards) -> tuple[int, ...]:
        return self.kv.targets(p_rank, p, d)

    def sources(self, d_rank: int, p: Shards, d: Shards) -> tuple[int, ...]:
        return self.kv.sources(d_rank, p, d)

    def pairs(self, p: Shards, d: Shards) -> tuple[tuple[int, int], ...]:
        return self.kv.pairs(p, d)

    def nbytes(self, p_rank: int, d_rank: int, p: Shards, d: Shards, num_tokens: int) -> int:
        carriers = self.carriers.get((p, d))
        if carriers is None:
            last_stage = p.tp * (p.pp - 1)
            firsts = {to: by for by, to in sorted(self.pairs(p, d), reverse=True) if by >= last_stage}
            carriers = self.carriers[p, d] = frozenset((by, to) for to, by in firsts.items())
        hidden = self.bytes_per_token * num_tokens if (p_rank, d_rank) in carriers else 0
        return self.kv.nbytes(p_rank, d_rank, p, d, num_tokens) + hidden
