"""One engine's turn: its endpoints fed in order, and between them the rules of its role.

A driver hands `handle` one event: of the engine that computes, of a peer, of a client, of its clock. The core gives it
to the endpoint or the rule that it concerns, then everything that follows from it inside this engine, and returns the
effects that are left for the driver, in the order in which they are to be executed. What one endpoint tells another
waits behind what was there before it, so no endpoint is entered twice at once. What an effect leads to at once (an
engine that rejects a sequence as it is submitted) the driver hands in as an event of its own, behind the effects.

The order of a turn is part of the contract:

- Whatever had arrived before an outcome of the engine is handed in before that outcome.
- A deadline is handed in (`TimeReached`) when all that had arrived before it was handled (C11).

Not decided here: what the events mean. That is each role's own (`decode.py`), and each endpoint's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeAlias, cast

from pdflow.protocol.effects import Tell
from pdflow.protocol.values import Address, Instant


class Endpoint(Protocol):
    """What a core and its driver ask of an endpoint. Each endpoint types its own events and effects."""

    timed: bool
    """Whether it has `deadlines` at all."""

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]: ...
    def wake_at(self) -> Instant | None: ...


class Port:
    """One endpoint of an engine, with its address and its process's incarnation."""

    __slots__ = ("address", "endpoint", "heap", "incarnation")

    def __init__(self, address: Address, endpoint: Endpoint | None, incarnation: int) -> None:
        self.address = address
        self.endpoint = endpoint
        """None: the rules of the engine's role, where its requests are no protocol's business."""
        self.incarnation = incarnation
        timed = endpoint is not None and endpoint.timed
        self.heap: list[tuple[Instant, int, Any]] = cast(Any, endpoint).deadlines.heap if timed else []
        """The endpoint's own heap of deadlines, whose head is `wake_at`, without the call."""


Observer: TypeAlias = Callable[[Port, Any, tuple[Any, ...], Instant], None]
"""Shown every event into an endpoint with the effects of it, and when."""
Due: TypeAlias = tuple[Port, Any]
"""An effect that the driver is to execute, and the endpoint that wants it."""


class Core:
    """The endpoints of one engine. A role's core adds rules: events and effects that it takes for itself."""

    def __init__(self) -> None:
        self.ports: dict[Address, Port] = {}
        self.touched: list[Port] = []
        """Endpoints that have been handed something since the driver last emptied this: whose deadlines may be nearer."""
        self.observe: Observer | None = None
        self.rules: dict[type, Callable[[Any], None]] = {}
        """What this engine's role decides: of events, and of endpoints' effects."""
        self.queue: deque[tuple[Port, Any]] = deque()
        self.out: list[Due] = []

    def add(self, port: Port) -> None:
        self.ports[port.address] = port

    def handle(self, port: Port, event: Any, now: Instant) -> list[Due]:
        """One event, and all that follows from it inside this engine. `port` is the endpoint that it is for; an event
        of this engine's role may name any."""
        queue, rules, ports, touched, observe = self.queue, self.rules, self.ports, self.touched, self.observe
        out: list[Due] = []
        self.out = out
        queue.append((port, event))
        while queue:
            port, event = queue.popleft()
            rule = rules.get(type(event))
            if rule is not None:
                rule(event)
                continue
            endpoint = port.endpoint
            assert endpoint is not None, f"{port.address} has no rule for {type(event).__name__}"
            effects = endpoint.handle(event, now)
            touched.append(port)
            if observe is not None:
                observe(port, event, effects, now)
            for effect in effects:
                kind = type(effect)
                if kind is Tell:
                    told = ports.get(effect.to)
                    if told is None:
                        # Of another process: the driver carries it there.
                        out.append((port, effect))
                    else:
                        queue.append((told, effect.event))
                    continue
                rule = rules.get(kind)
                if rule is None:
                    out.append((port, effect))
                else:
                    rule(effect)
        return out

    def fingerprint(self) -> Hashable:
        """Two cores that answer every future event alike have the same one."""
        return tuple([cast(Any, port.endpoint).fingerprint() for port in self.ports.values() if port.endpoint])

    def assert_empty(self, whose: str) -> None:
        """At rest: nothing is kept of any request."""
