"""A core of `pdflow/serving` between an endpoint and a driver that are the test's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdflow.protocol.values import Instant
from pdflow.serving.core import Core, Port


class Scheduler:
    """An endpoint that wants what a test says next, and keeps what it is told."""

    timed = False

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.next: list[Any] = []

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        self.events.append(event)
        effects, self.next = tuple(self.next), []
        return effects

    def wake_at(self) -> None:
        return None


class Bench:
    """Args: effects of endpoints and of the role that the driver is to do; all are kept, none is done."""

    def __init__(self, core: Core, of_endpoints: Iterable[type], of_the_role: Iterable[type]) -> None:
        self.core = core
        self.done: list[Any] = []
        for kind in of_endpoints:
            core.do[kind] = self.do
        for kind in of_the_role:
            core.perform[kind] = self.do
        self.scheduler, self.port = self.end("e")

    def end(self, name: str) -> tuple[Scheduler, Port]:
        """Another endpoint of the engine."""
        scheduler = Scheduler()
        port = Port(name, scheduler, 1)
        self.core.add(port)
        return scheduler, port

    def do(self, port: Port, effect: Any) -> None:
        self.done.append(effect)

    def role(self, *events: Any) -> list[Any]:
        """What the driver is to do, once this has happened."""
        self.done.clear()
        for event in events:
            self.core.feed(self.core.role, event, 0)
        return self.done

    def protocol(self, *effects: Any, port: Port | None = None) -> list[Any]:
        """The same, once the protocol has wanted this."""
        self.done.clear()
        port = port or self.port
        scheduler: Any = port.endpoint
        scheduler.next = list(effects)
        self.core.feed(port, "something", 0)
        scheduler.events.remove("something")
        return self.done

    def take_events(self) -> list[Any]:
        """What the protocol has been told since the last time."""
        events, self.scheduler.events = self.scheduler.events, []
        return events
