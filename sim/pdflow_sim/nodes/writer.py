"""vLLM's push writer: the thread of a P engine that alone reads notifications (spec 6.3).

It is woken by every engine step, and polls by itself, every millisecond, only while a finished prompt waits for its
registration. Whichever comes first, it then reads everything that has come, in order.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.values import Instant, Xid
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import SimPort


class Writer:
    """The inbox of one P node, and the thread that reads it. `every_ns` is the thread's own poll."""

    __slots__ = ("every_ns", "inbox", "node", "ticks_at", "unmatched")

    def __init__(self, node: SimEngineNode, every_ns: int) -> None:
        self.node = node
        self.every_ns = every_ns
        self.inbox: list[tuple[SimPort, Any]] = []
        self.unmatched: set[Xid] = set()
        """Finished prompts without a registration."""
        self.ticks_at: Instant = -1

    def on_notification(self, port: SimPort, event: Any) -> None:
        """Keep a notification that has come; the engine's next step will wake the thread at the latest."""
        self.inbox.append((port, event))
        self.look_ahead()

    def finished(self, xid: Xid) -> None:
        """Note that a prompt is computed: from now on the thread polls."""
        self.unmatched.add(xid)
        self.look_ahead()

    def look_ahead(self) -> None:
        clock = self.node.clock
        now = clock.now
        if not self.unmatched or not self.inbox or self.ticks_at >= now:
            return
        self.ticks_at = -(-now // self.every_ns) * self.every_ns
        clock.call(self.ticks_at - now, self.tick, None, self.node.poll_priority)

    def tick(self, _: None) -> None:
        self.ticks_at = -1
        self.read()

    def woken(self, event: Any) -> None:
        """Read the inbox at an engine step, unless an earlier poll has read this notification already."""
        if any(waiting is event for _, waiting in self.inbox):
            self.read()

    def read(self) -> None:
        """Hand over everything that has come."""
        inbox, self.inbox = self.inbox, []
        for port, event in inbox:
            self.node.feed(port, event)
