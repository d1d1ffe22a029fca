"""The run's own clock: instants in ns since it began."""

from __future__ import annotations

import trio

from pdflow.protocol.values import Instant
from pdflow_runtime.clock import deadline_of, now_ns


class RunClock:
    """It stands at 0 until `begin`."""

    def __init__(self) -> None:
        self._began: int | None = None

    def begin(self) -> None:
        self._began = now_ns()

    def now(self) -> Instant:
        return 0 if self._began is None else now_ns() - self._began

    def deadline(self, at: Instant) -> float:
        """The same instant as trio counts it."""
        return deadline_of((self._began or 0) + at)

    async def sleep_until(self, at: Instant) -> None:
        """At least a checkpoint."""
        await trio.sleep_until(self.deadline(at))
