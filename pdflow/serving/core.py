"""One engine's turn: its endpoints fed in order, and between them the rules of its role.

A driver feeds one event: of the engine that computes, of a peer, of a client, of its clock. The core hands it to the
endpoint or the rule that it concerns, then everything that follows from it inside this engine, and has the driver
execute the effects, in order. What one endpoint tells another waits behind what was there before it, and so does what
executing an effect leads to at once (an engine that rejects a sequence as it is enqueued): nothing is entered while an
effect of its last turn is still to be executed.

The order of a turn is part of the contract:

- Whatever had arrived before an outcome of the engine is fed before that outcome.
- A deadline is fed (`TimeReached`) when all that had arrived before it was handled (C11), and those of one instant in
  the order of their endpoints.

Not decided here: what the events mean. That is each role's own (`decode.py`), and each endpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Protocol, TypeAlias, cast

from pdflow.protocol.effects import SendLocal
from pdflow.protocol.values import NEVER, Address, Instant


class Endpoint(Protocol):
    """What a core and its driver ask of an endpoint. Each endpoint types its own events and effects."""

    timed: bool
    """Whether it has `deadlines` at all."""

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]: ...
    def wake_at(self) -> Instant | None: ...
    def unfinished(self) -> Mapping[Any, object]: ...


class Port:
    """One endpoint of an engine, with its address and its process's incarnation. Without an endpoint: the rules of the
    engine's role."""

    __slots__ = ("address", "armed", "endpoint", "heap", "incarnation", "order")

    def __init__(self, address: Address, endpoint: Endpoint | None, incarnation: int) -> None:
        self.address = address
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.order = 0
        """Its place among those of its engine: deadlines of one instant are fed in this order."""
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
        """What the role does with its events."""
        self.pending_effects: list[Any] = []
        """Effects of the rule that is being followed."""
        self.queue: list[tuple[Any, Any]] = []
        """What this turn has handled, and behind it what is to be handled: (its port, the event)."""
        self.handled = 0
        """How much of the queue has been handled."""
        self.busy = False
        """What is fed waits in the queue."""
        self.now: Instant = 0
        """When the event that is handled was fed."""
        self.do: dict[type, Execute] = {}
        """What is done with endpoints' effects: by the driver, but for those that the role takes for itself."""
        self.perform: dict[type, Execute] = {}
        """What the driver does with the role's own effects."""
        self.arm: Callable[[Any, Instant, Instant], None] | None = None
        """Called with a port, its next deadline and now, when that is earlier than it was last told."""
        self.observe: Observer | None = None

    def add(self, port: Port) -> None:
        port.order = len(self.ports)
        self.ports[port.address] = port

    def send_local(self, port: Port, event: Any) -> None:
        """To be handled in this turn, behind what is there."""
        self.queue.append((port, event))

    def send_local_first(self, port: Port, event: Any) -> None:
        """To be handled in this turn, before anything else."""
        self.queue.insert(self.handled, (port, event))

    def feed(self, port: Port, event: Any, now: Instant) -> None:
        """One event, and all that follows from it."""
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
        """Have the driver do what a rule wants. What comes of it waits in the queue."""
        perform, role = self.perform, self.role
        for effect in self.pending_effects:
            perform[type(effect)](role, effect)
        self.pending_effects.clear()

    def fingerprint(self) -> Hashable:
        """Two cores that answer every future event alike have the same one."""
        return tuple([cast(Any, port.endpoint).fingerprint() for port in self.ports.values()])

    def assert_empty(self, whose: str) -> None:
        """At rest: nothing is kept of any request."""
