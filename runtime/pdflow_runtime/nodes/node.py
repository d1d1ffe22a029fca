"""The base of all nodes: a core of endpoints, owned by one task.

All events go into one queue, and are handled in its order; an effect is executed at once and never waits. Events that
result from executing an effect go through the queue too, so that the core is not entered while an effect of its last
turn is still to be executed. Deadlines are checked when all events that came before have been handled (C11).

There are two ways into the queue. `put` is for what must not be refused: the engine's outcomes, the ends of operations,
messages between endpoints; how many of those there can be is bounded by what was begun here. `offer` is for peers'
frames: a peer that has sent more than are handled waits, and so does its stream, no other. The engine's task calls
`settle` and `feed`, which handle the queue at once: what an engine does and what the protocol knows of it must not
drift apart, as they would if a request's end waited in the queue while the engine gives it blocks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any, Final

import trio

from pdflow.protocol.effects import Note
from pdflow.protocol.events import TimeReached
from pdflow.protocol.values import NEVER, Address, Instant
from pdflow.serving.core import Core, Endpoint, Port
from pdflow_runtime.clock import deadline_of, now_ns
from pdflow_runtime.observe.event_log import EventLog

log = logging.getLogger(__name__)

TIME_REACHED: Final = TimeReached()
MOST_FRAMES: Final = 256
"""The most frames of peers that wait to be handled; one turn takes them all."""


Observer = Callable[[Address, Any, tuple[Any, ...], Instant], None]


class LiveNode:
    """A task that owns a core for as long as `run` runs. Subclasses map effects to functions in `do`. Args: `core`: the
    rules of its role, if it has any."""

    def __init__(self, name: str, core: Core | None = None) -> None:
        self.name: Final = name
        self.core: Final = core or Core()
        self.ports: Final = self.core.ports
        self.role: Final = self.core.role
        self.do: Final[dict[type, Callable[[Port, Any], None]]] = {Note: self.note}
        self.perform: Final = self.core.perform
        self.core.do = self.do
        self.event_log: Final = EventLog(name)
        self.observe = self.event_log.turn
        self.notes: Counter[str] = Counter()
        self.core.arm = self._arm
        self._queue: Final[deque[tuple[Port, Any]]] = deque()
        """Events that have arrived and wait for their turn."""
        self._timers: Final[list[tuple[Instant, int, int, Port]]] = []
        """Deadlines of endpoints, a heap: (when, the endpoint's place, a number of its own, the endpoint)."""
        self._armed = 0
        self._bell = trio.Event()
        self._frames = trio.Semaphore(MOST_FRAMES)
        self._offered = 0
        self._admission_due = False

    def add(self, address: Address, endpoint: Endpoint, incarnation: int) -> Port:
        port = Port(address, endpoint, incarnation)
        self.core.add(port)
        return port

    @property
    def observe(self) -> Observer | None:
        """A function that is called with every event into an endpoint and its effects."""
        return self._observe

    @observe.setter
    def observe(self, observe: Observer | None) -> None:
        self._observe = observe
        if observe is None:
            self.core.observe = None
        else:
            self.core.observe = lambda port, event, effects, now: observe(port.address, event, effects, now)

    def put(self, port: Port, event: Any) -> None:
        """Queue an event of this process. An event that results from executing an effect belongs to the same turn."""
        (self.core.queue if self.core.busy else self._queue).append((port, event))
        self._bell.set()

    def feed(self, port: Port, event: Any) -> None:
        """Handle an outcome of the engine at once, behind all queued events, none of which may contradict it."""
        self._queue.append((port, event))
        self._drain(now_ns())
        self._bell.set()  # a deadline may be nearer now than the one that is slept to

    def settle(self) -> None:
        """Handle what is queued, before something is done that depends on it."""
        self._drain(now_ns())

    async def offer(self, port: Port, event: Any) -> None:
        """Queue a peer's frame; wait while MOST_FRAMES are queued already."""
        await self._frames.acquire()
        self._offered += 1
        self.put(port, event)

    def admit_soon(self) -> None:
        """Have waiting requests admitted once all queued events are handled: one of these may end the request that
        would be next."""
        self._admission_due = True
        self._bell.set()

    def admissions(self, now: Instant) -> Iterable[tuple[Port, Any]]:
        """Return events for endpoints whose requests have room now, where a node admits any."""
        return ()

    async def run(self) -> None:
        while True:
            # A scope for each turn would take as long as the turn: one lasts until the first deadline that it was set
            # to, which may be over by then.
            with trio.CancelScope() as until_deadline:
                while True:
                    self.turn(now_ns())
                    self._bell = trio.Event()
                    at = self.wake_at()
                    if at is not None and deadline_of(at) < until_deadline.deadline:
                        until_deadline.deadline = deadline_of(at)
                    await self._bell.wait()

    def wake_at(self) -> Instant | None:
        """Return the next deadline of all endpoints."""
        timers = self._timers
        while timers and timers[0][3].armed != timers[0][0]:
            heappop(timers)
        return timers[0][0] if timers else None

    def _arm(self, port: Port, at: Instant, _: Instant) -> None:
        self._armed += 1
        port.armed = at
        heappush(self._timers, (at, port.order, self._armed, port))

    def turn(self, now: Instant) -> None:
        """Handle all queued events, then admissions, then the deadlines that are due, each with all that follows."""
        self._drain(now)
        self._admit_waiting(now)
        for _ in range(self._offered):
            self._frames.release()
        self._offered = 0
        while (at := self.wake_at()) is not None and at <= now:
            port = heappop(self._timers)[3]
            port.armed = NEVER
            self._queue.append((port, TIME_REACHED))
            self._drain(now)
            self._admit_waiting(now)

    def _admit_waiting(self, now: Instant) -> None:
        while self._admission_due:
            self._admission_due = False
            self._queue.extend(self.admissions(now))
            self._drain(now)

    def _drain(self, now: Instant) -> None:
        queue, core = self._queue, self.core
        assert not core.busy, "an effect must not feed its core: it calls put"
        while queue:
            port, event = queue.popleft()
            core.feed(port, event, now)

    def note(self, port: Port, effect: Note) -> None:
        """Count every note, and log the first of each kind: a peer may cause as many as it likes."""
        self.notes[effect.name] += 1
        if self.notes[effect.name] == 1:
            log.info("%s: note: %s (further ones are only counted, in pdflow_notes)", port.address, effect.name)
