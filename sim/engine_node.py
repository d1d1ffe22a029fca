"""What both kinds of engine nodes share: the engine's one timer, its polls, and the memory that stands idle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdflow.engine.engine import Engine
from pdflow.protocol.values import Instant
from sim.clock import AFTER_ENGINES, ENGINE, POLL
from sim.node import FAR, Node, Port

if TYPE_CHECKING:
    from sim.world import World


class EngineNode(Node):
    """A node with a batch scheduler. `index` orders engines that act at one instant."""

    def __init__(self, world: World, index: int, name: str, engine: Engine, block_bytes: int) -> None:
        super().__init__(world)
        self.name = name
        self.engine = engine
        self.block_bytes = block_bytes
        self.priority = ENGINE + index
        self.poll_priority = POLL + index
        self.unasked: list[tuple[Port, Any]] = []
        """What has come at the instant of a boundary, until the engine has gone through it."""
        self.timer: int = FAR
        """The one timer that counts: its instant, or, of one that rings last of all at its instant, the complement."""
        self.peak_blocks = 0
        if world.poll_ns:
            # Deadlines too are judged in the engine's step, behind everything that had come before (C11).
            self.receive = self.hear

    def came(self, outcome: object) -> None:
        """One outcome of the engine."""
        raise NotImplementedError

    def rearm(self) -> None:
        """After every call of the engine: keep one timer at its next boundary. A stale one finds nothing due."""
        at = self.engine.wake_ns
        if at is None:
            return
        env = self.env
        now = env.now
        # A stale timer of this very instant, armed before it came, must not start the engine before all else is heard;
        # one that has yet to ring must.
        timer = at if at > now else ~now
        if timer == self.timer or at == self.timer:
            return
        self.timer = timer
        if at > now:
            env.call(at - now, self.wake, timer, self.priority)
        else:
            env.last(self.wake, timer, self.priority)

    def wake(self, timer: int) -> None:
        if timer != self.timer:
            return
        self.timer = FAR
        engine = self.engine
        outcomes = engine.advance(self.env.now)
        for outcome in outcomes:
            self.came(outcome)
        self.rearm()

    def measure_pool(self) -> None:
        """At every admission, when the pool is at its fullest."""
        pool = self.engine.pool
        used = pool.num_blocks - pool.free
        if used > self.peak_blocks:
            self.peak_blocks = used

    def newest_generation(self) -> int:
        return self.engine.pool.newest_generation

    def hear(self, port: Port, event: Any) -> None:
        """Something has come for an endpoint that polls: once per engine step, at the first boundary strictly after
        now; an engine without work spins with a millisecond's sleep (PROTOCOL 1.1).

        A boundary that is due now is not gone through yet, and with many steps planned at once not even noticed: what
        comes at it asks again when it has been, and lets nothing overtake it.
        """
        now = self.env.now
        boundary = self.engine.next_boundary(now)
        if self.unasked or boundary == now:
            if not self.unasked:
                self.env.call(0, self.ask_again, None, AFTER_ENGINES)
            self.unasked.append((port, event))
        else:
            self.wait_for_poll(port, event, boundary)

    def ask_again(self, _: None) -> None:
        arrived, self.unasked = self.unasked, []
        for port, event in arrived:
            self.wait_for_poll(port, event, self.engine.next_boundary(self.env.now))

    def wait_for_poll(self, port: Port, event: Any, boundary: Instant | None) -> None:
        now = self.env.now
        poll_ns = self.world.poll_ns
        at = -(-now // poll_ns) * poll_ns if boundary is None else boundary
        if at > now:
            self.env.call(at - now, self.polled, (port, event), self.poll_priority)
        else:
            self.polled((port, event))

    def polled(self, about: tuple[Port, Any]) -> None:
        self.feed(*about)

    def strand(self, blocks: int, since: Instant) -> None:
        """Blocks that no engine computed on from `since` until now: waiting for a transfer, in one, or after one."""
        self.world.totals.stranded_byte_ns += blocks * self.block_bytes * (self.env.now - since)
