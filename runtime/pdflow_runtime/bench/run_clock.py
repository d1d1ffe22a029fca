"""The run's own clock: instants in ns since it began."""

from __future__ import annotations

import trio

from pdflow.protocol.values import Instant
from pdflow_runtime.clock import deadline_of, now_ns


class RunClock:
    """A clock that reads 0 until `begin`."""

    def __init__(self) -> None:
        self._began: int | None = None

    def begin(self) -> None:
        self._began = now_ns()

    def now(self) -> Instant:
        return 0 if self._began is None else now_ns() - self._began

    def deadline(self, at: Instant) -> float:
        """Return this instant as trio counts it, in seconds."""
        return deadline_of((self._began or 0) + at)

    async def sleep_until(self, at: Instant) -> None:
        """Sleep until that instant; always a checkpoint."""
        await trio.sleep_until(self.deadline(at))
