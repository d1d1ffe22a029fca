"""Callbacks on simpy's queue, and the order of what happens at one instant.

simpy orders equal times by priority, then by the order of scheduling. Messages and ends of flows come first, then
deadlines (every input that had arrived is handled before a deadline is judged), then the engines, by index: an engine's
own wake-ups differ between the exact mode and the fast one, and must not decide ties between anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from simpy.core import Environment
from simpy.events import Event

INPUT = 1
DEADLINE = 2
ENGINE = 8

Callback: TypeAlias = Callable[[Any], None]


class Clock(Environment):
    """simpy's queue with a clock of whole nanoseconds."""

    if TYPE_CHECKING:

        @property
        def now(self) -> int: ...

    else:
        now = property(attrgetter("_now"))  # asked 45 times per request: without a frame of Python's


class Call(Event):
    """Calls `callback(call)` after `delay` ns; what it is about stands in `call.about`. Never waited for."""

    __slots__ = ("about",)

    def __init__(self, env: Clock, delay: int, callback: Callback, about: Any, priority: int = INPUT) -> None:
        self.env = env
        self.callbacks = [callback]
        self.about = about
        self._ok = True
        env.schedule(self, priority, delay)  # type: ignore[arg-type]  # simpy orders by any int
