"""The peers of one rank: connected, being connected or unreachable, and the valid incarnation of each engine.

Handshakes run in the driver, several in parallel, so that one dead peer's five seconds delay nobody else (R30). A
failure is remembered for 1 s, doubling up to 60 s (C9); its jitter is a function of the peer's name, because the core
has no randomness. An incarnation is replaced only by a handshake reply that echoed our nonce, and a replaced one is
retired for good (spec 1.3).
"""

from __future__ import annotations

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.ids import engine_of
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import Address, EngineId, Instant, in_order


class Peers:
    """The connections of one rank, and the incarnations of the engines behind them."""

    __slots__ = (
        "connected",
        "connecting",
        "dialect",
        "duplicates",
        "failures",
        "incarnations",
        "retired",
        "retry_at",
    )

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.connected: set[Address] = set()
        self.connecting: set[Address] = set()
        self.failures: dict[Address, int] = {}
        self.retry_at: dict[Address, Instant] = {}
        self.incarnations: dict[EngineId, int] = {}
        self.retired: dict[EngineId, frozenset[int]] = {}
        self.duplicates: set[EngineId] = set()
        """Engines of which two incarnations answered: both are refused (DUPLICATE_ENGINE_ID)."""

    def may_try(self, peer: Address, now: Instant) -> bool:
        return self.retry_at.get(peer, 0) <= now and engine_of(peer) not in self.duplicates

    def current(self, peer: Address, incarnation: int) -> bool:
        """Whether a frame of this incarnation of the peer's engine is valid. The first incarnation seen is accepted."""
        if not self.dialect.checks_incarnation:
            return True
        engine = engine_of(peer)
        return self.incarnations.setdefault(engine, incarnation) == incarnation and engine not in self.duplicates

    def answered(self, peer: Address, incarnation: int) -> int | None:
        """Record that a handshake succeeded. Returns the incarnation that it retires, if any."""
        engine = engine_of(peer)
        self.connecting.discard(peer)
        self.failures.pop(peer, None)
        self.retry_at.pop(peer, None)
        if not self.dialect.checks_incarnation:
            self.connected.add(peer)
            return None
        before = self.incarnations.get(engine)
        if incarnation in self.retired.get(engine, frozenset()):
            self.duplicates.add(engine)
            self.connected = {p for p in self.connected if engine_of(p) != engine}
            return before
        self.connected.add(peer)
        self.incarnations[engine] = incarnation
        if before is None or before == incarnation:
            return None
        self.retired[engine] = self.retired.get(engine, frozenset()) | {before}
        self.connected = {p for p in self.connected if engine_of(p) != engine or p == peer}
        return before

    def unreached(self, peer: Address, now: Instant, timers: Timers) -> None:
        """Record that a handshake failed: the peer is left alone for a while."""
        self.connecting.discard(peer)
        self.connected.discard(peer)
        if not self.dialect.remembers_failures:
            return
        failures = self.failures.get(peer, 0)
        self.failures[peer] = failures + 1
        backoff = min(timers.backoff_first_ns << min(failures, 16), timers.backoff_last_ns)
        jitter = sum(peer.encode()) * 7919 % 256
        self.retry_at[peer] = now + backoff - backoff * jitter // 1024

    def lost(self, peer: Address) -> None:
        self.connected.discard(peer)

    def fork(self) -> Peers:
        other = Peers(self.dialect)
        other.connected = self.connected.copy()
        other.connecting = self.connecting.copy()
        other.failures = self.failures.copy()
        other.retry_at = self.retry_at.copy()
        other.incarnations = self.incarnations.copy()
        other.retired = self.retired.copy()
        other.duplicates = self.duplicates.copy()
        return other

    def fingerprint(self) -> tuple[object, ...]:
        retired = self.retired
        return (
            in_order(self.connected),
            in_order(self.connecting),
            in_order(self.retry_at.items()),
            in_order(self.failures.items()),
            in_order(self.incarnations.items()),
            in_order([(e, tuple(sorted(r))) for e, r in retired.items()]) if retired else (),
            in_order(self.duplicates),
        )
