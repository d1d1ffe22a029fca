"""The layout's answers to the protocol, tabulated per pair of parallelisms: which rank writes to which, and how much.

`TransferGeometry` implements `pdflow.protocol.geometry.Geometry`. The rule is that of `ranks`, and `pairing` checks the
block sizes. A table is made at the first question about two parallelisms, and a question is then a lookup.

The figures may come from a peer's frame, so questions are bounded: neither the time for one table nor their number
grows without limit (invariant S9).
"""

from __future__ import annotations

from typing import Protocol

from pdflow.layout.pairing import split_size
from pdflow.layout.ranks import Initiator, Rule, by_consumer, by_producer, writers
from pdflow.layout.shapes import KvShape, LayoutError
from pdflow.protocol.values import Value

MAX_RANKS = 256
"""The most ranks of an engine, TP x PP. Real ones have up to 64 (larger deployments add data parallelism, which is
engines); the worst table at this limit has 16,384 pairs and takes some 50 ms."""


class Sharding(Protocol):
    """The parallelism and the block size by which an engine shards its KV cache."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def block_size(self) -> int: ...


class _Table(Value, frozen=True, gc=False):
    targets: dict[int, tuple[int, ...]]
    sources: dict[int, tuple[int, ...]]
    pairs: tuple[tuple[int, int], ...]
    bytes_per_token: dict[tuple[int, int], int]
    window_bytes_per_token: dict[tuple[int, int], int]
    """Of these bytes, those in layers of which a window is moved; empty if there are none."""
    state_bytes: int
    """Bytes that each pair moves in addition to those of tokens."""


class TransferGeometry:
    """Which ranks exchange KV, for one model, one initiator and one rule. Pure: its caches never change an answer.

    Every method raises LayoutError (a ValueError) if the two parallelisms or block sizes cannot be paired.
    """

    __slots__ = ("_initiator", "_last", "_rule", "_shape", "_tables")

    def __init__(self, shape: KvShape, *, initiator: Initiator = "push", rule: Rule = "exactly-once") -> None:
        self._shape = shape
        self._initiator: Initiator = initiator
        self._rule: Rule = rule
        self._tables: dict[tuple[int, int, int], _Table] = {}
        self._last: tuple[Sharding | None, Sharding | None, _Table] = (None, None, _Table({}, {}, (), {}, {}, 0))
        """The latest answer: engines of one pool share their value, and one pair of pools asks nearly every time."""

    def targets(self, p_rank: int, p: Sharding, d: Sharding) -> tuple[int, ...]:
        """Return the D ranks that P rank `p_rank` sends to, ascending; none for an idle replica."""
        last = self._last
        table = last[2] if last[0] is p and last[1] is d else self._table(p, d)
        return table.targets.get(p_rank, ())

    def sources(self, d_rank: int, p: Sharding, d: Sharding) -> tuple[int, ...]:
        """Return the P ranks that D rank `d_rank` gets its KV from, ascending."""
        last = self._last
        table = last[2] if last[0] is p and last[1] is d else self._table(p, d)
        return table.sources.get(d_rank, ())

    def pairs(self, p: Sharding, d: Sharding) -> tuple[tuple[int, int], ...]:
        """Return every (p_rank, d_rank) that moves bytes, by P rank, then D rank."""
        last = self._last
        table = last[2] if last[0] is p and last[1] is d else self._table(p, d)
        return table.pairs

    def nbytes(self, p_rank: int, d_rank: int, p: Sharding, d: Sharding, num_tokens: int) -> int:
        """Return the bytes of `num_tokens` tokens that this pair moves; LayoutError if the two exchange nothing."""
        last = self._last
        table = last[2] if last[0] is p and last[1] is d else self._table(p, d)
        per_token = table.bytes_per_token.get((p_rank, d_rank))
        if per_token is None:
            raise LayoutError(f"prefill rank {p_rank} and decode rank {d_rank} exchange nothing")
        if table.window_bytes_per_token and num_tokens > self._shape.window_tokens:
            before = num_tokens - self._shape.window_tokens
            return num_tokens * per_token - before * table.window_bytes_per_token[p_rank, d_rank] + table.state_bytes
        return num_tokens * per_token + table.state_bytes

    def _table(self, p: Sharding, d: Sharding) -> _Table:
        if p.block_size != d.block_size:
            split_size(p.block_size, d.block_size)
        if d.pp != 1:
            raise LayoutError(f"decode with {d.pp} pipeline stages: only the prefill side may have more than one")
        key = (p.tp, p.pp, d.tp)
        table = self._tables.get(key)
        if table is None:
            self._tables[key] = table = self._tabulate(p, d)
        self._last = (p, d, table)
        return table

    def _tabulate(self, p: Sharding, d: Sharding) -> _Table:
        for side, ranks in (("prefill", p.tp * p.pp), ("decode", d.tp)):
            if ranks > MAX_RANKS:
                raise LayoutError(f"{side} with {ranks} ranks: at most {MAX_RANKS} are supported")
        found = writers(self._shape, p.tp, p.pp, d.tp, initiator=self._initiator, rule=self._rule)
        producers = by_producer(found)
        window, layers = self._shape.window_layers, self._shape.num_layers
        return _Table(
            targets={rank: tuple(pair.d_rank for pair in own) for rank, own in producers.items()},
            sources={rank: tuple(pair.p_rank for pair in own) for rank, own in by_consumer(found).items()},
            pairs=tuple((pair.p_rank, pair.d_rank) for own in producers.values() for pair in own),
            bytes_per_token={(pair.p_rank, pair.d_rank): pair.bytes_per_token for pair in found},
            # Of a pipeline stage, the share of all layers: kinds alternate.
            window_bytes_per_token={
                (pair.p_rank, pair.d_rank): pair.bytes_per_token * window // layers for pair in found if window
            },
            state_bytes=self._shape.state_bytes // len(found),
        )
