"""A clock that runs wrong: fast, slow, or ahead. Monotonic all the same, as a node's clock must be."""

from __future__ import annotations

from pdflow.protocol.values import Instant
from pdflow_sim.clock import Clock

NOMINAL_SPEED = 1_000_000


class SkewedClock:
    """Shows `speed` times the world's time since it was last set; in whole millionths, so that it is exact."""

    __slots__ = ("_clock", "_local", "_since", "_speed")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: Instant = 0
        self._local: Instant = 0
        self._speed = NOMINAL_SPEED

    @property
    def now(self) -> Instant:
        return self._local + (self._clock.now - self._since) * self._speed // NOMINAL_SPEED

    def set(self, speed: float, ahead_ns: int) -> None:
        """Run at this speed from now on, after a jump ahead."""
        self._local = self.now + ahead_ns
        self._since = self._clock.now
        self._speed = max(1, round(speed * NOMINAL_SPEED))

    def real(self, duration_ns: int) -> int:
        """Return how long the world takes until this clock has moved on by that much."""
        return -(-duration_ns * NOMINAL_SPEED // self._speed)
