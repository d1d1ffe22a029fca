"""The turn of an engine: one event fed to its endpoints and to the rules of its role, and all that follows from it.

A driver feeds one event: of the engine that computes, of a peer, of a client, of its clock. The core hands it to the
endpoint or the rule that it concerns, then everything that follows from it inside this engine, and has the driver
execute the effects, in order. An event from one endpoint to another waits behind what was there before it, and so does
what executing an effect leads to at once (an engine that rejects a sequence as it is enqueued): nothing is entered
while an effect of its last turn is still to be executed.

The order of a turn is part of the contract:

- Whatever had arrived before an outcome of the engine is fed before that outcome.
- A deadline is fed (`TimeReached`) when all that had arrived before it was handled (C11), and those of one instant in
  the order of their endpoints.

The meaning of the events is not decided here: it is each role's own (`decode.py`), and each endpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Protocol, TypeAlias, cast

from pdflow.protocol.effects import SendLocal
from pdflow.protocol.values import NEVER, Address, Instant


class Endpoint(Protocol):
    """The interface of an endpoint towards its core and its driver. Each endpoint types its own events and effects."""

    timed: bool
    """Whether it has `deadlines` at all."""

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]: ...
    def wake_at(self) -> Instant | None: ...
    def unfinished(self) -> Mapping[Any, object]: ...


class Port:
    """One endpoint of an engine, with its address and its process's incarnation. A port without an endpoint stands for
    the rules of the engine's role."""

    __slots__ = ("address", "armed", "endpoint", "heap", "incarnation", "order")

    def __init__(self, address: Address, endpoint: Endpoint | None, incarnation: int) -> None:
        self.address = address
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.order = 0
        """The place of the endpoint in its engine: deadlines of one instant are fed in this order."""
        self.armed: Instant = NEVER
        """When the driver's timer for it is due, if it keeps one."""
        timed = endpoint is not None and endpoint.timed
        self.heap: list[tuple[Instant, int, Any]] = cast(Any, endpoint).deadlines.heap if timed else []
        """The endpoint's own heap of deadlines, whose head is `wake_at`, without the call."""


SEND_LOCAL: Final = SendLocal
"""Compiled, what is final is at hand, and a class that is not compiled is looked up by name each time."""

Execute: TypeAlias = Callable[[Any, Any], None]
"""Does what an effect says: (the port that wants it, the effect)."""
Observer: TypeAlias = Callable[[Any, Any, tuple[Any, ...], Instant], None]
"""Shown every event into an endpoint: (its port, the event, the effects, when)."""


class Core:
    """The endpoints of one engine. A role's core adds rules: for its events, and for endpoints' effects."""

    def __init__(self) -> None:
        self.ports: dict[Address, Port] = {}
        self.role = Port("", None, 0)
        """Where events of the role go."""
        self.rules: dict[type, Callable[[Any], None]] = {}
        """The role's handler of each type of its events."""
        self.pending_effects: list[Any] = []
        """Effects of the rule that is being followed."""
        self.queue: list[tuple[Any, Any]] = []
        """Events of this turn, those that have been handled first: (the port, the event)."""
        self.handled = 0
        """How many events at the head of the queue have been handled."""
        self.busy = False
        """A turn is running: events that are fed wait in the queue."""
        self.now: Instant = 0
        """When the event that is handled was fed."""
        self.do: dict[type, Execute] = {}
        """The handler of each type of endpoints' effects: the driver's, or the role's where the role takes it over."""
        self.perform: dict[type, Execute] = {}
        """The driver's handler of each type of the role's own effects."""
        self.arm: Callable[[Any, Instant, Instant], None] | None = None
        """Called with a port, its next deadline and now, when that is earlier than at the last call."""
        self.observe: Observer | None = None

    def add(self, port: Port) -> None:
        port.order = len(self.ports)
        self.ports[port.address] = port

    def send_local(self, port: Port, event: Any) -> None:
        """Queue an event for this turn, behind those that are queued."""
        self.queue.append((port, event))

    def send_local_first(self, port: Port, event: Any) -> None:
        """Queue an event for this turn, before everything else."""
        self.queue.insert(self.handled, (port, event))

    def feed(self, port: Port, event: Any, now: Instant) -> None:
        """Handle one event and all that follows from it. During a turn the event is only queued."""
        queue = self.queue
        if self.busy:
            queue.append((port, event))
            return
        self.busy = True
        self.now = now
        do, ports, pending_effects, arm, observe = self.do, self.ports, self.pending_effects, self.arm, self.observe
        while True:
            endpoint = port.endpoint
            if endpoint is None:
                self.rules[type(event)](event)
            else:
                effects = endpoint.handle(event, now)
                if observe is not None:
                    observe(port, event, effects, now)
                for effect in effects:
                    kind = type(effect)
                    target = ports.get(effect.to) if kind is SEND_LOCAL else None
                    if target is not None:
                        queue.append((target, effect.event))
                    else:
                        do[kind](port, effect)
                        if pending_effects:
                            self.execute()
                heap = port.heap
                if heap and heap[0][0] < port.armed and arm is not None:
                    arm(port, heap[0][0], now)
            if pending_effects:
                self.execute()
            handled = self.handled
            if handled == len(queue):
                break
            self.handled = handled + 1
            port, event = queue[handled]
        queue.clear()
        self.handled = 0
        self.busy = False

    def execute(self) -> None:
        """Have the driver execute the effects of a rule. The events that this leads to wait in the queue."""
        perform, role = self.perform, self.role
        for effect in self.pending_effects:
            perform[type(effect)](role, effect)
        self.pending_effects.clear()

    def fingerprint(self) -> Hashable:
        """Return a value that two cores share if they answer every future event alike."""
        return tuple([cast(Any, port.endpoint).fingerprint() for port in self.ports.values()])

    def assert_empty(self, whose: str) -> None:
        """Assert, at rest, that no state of any request is kept (L8): each role adds its own."""
        kept = (self.queue, self.pending_effects, self.handled, self.busy)
        assert not any(kept), f"{whose} is still in a turn: {kept}"
