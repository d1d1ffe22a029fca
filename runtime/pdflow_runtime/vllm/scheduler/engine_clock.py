"""The clock of a scheduler's endpoint inside vLLM: it counts the time in which the engine ran.

EngineCore calls the connector when it has something to do. While it is parked, stopped or busy with one long step, no
message from a worker reaches the scheduler's endpoint, so a peer's silence in that time says nothing of the peer. Of
the time between two readings at most MOST_GAP_NS count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdflow.protocol.values import Instant, S
from pdflow_runtime.clock import stopwatch_ns

MOST_GAP_NS: Final = 1 * S
"""As long as between two SYNCs: a longer gap holds no answer that could have been missed."""


class EngineClock:
    """Monotonic, from 0 on. Args: `read`: the time of this process, in nanoseconds."""

    def __init__(self, read: Callable[[], Instant] = stopwatch_ns) -> None:
        self._read: Final = read
        self._latest = read()
        self._counted: Instant = 0

    def now(self) -> Instant:
        """Return the time in which the engine has run, in nanoseconds."""
        latest = self._read()
        self._counted += min(latest - self._latest, MOST_GAP_NS)
        self._latest = latest
        return self._counted
