"""The common part of all engine nodes: the engine's one timer, its polls, and the accounting of memory that stands
idle.

A node is one incarnation of an engine's processes. It can be paused, and it can die; a restarted engine is a new node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdflow.engine.hosted import HostedEngine
from pdflow.engine.sequence import Sequence
from pdflow.memory.caching import CachingPool
from pdflow.methods.wire_profile import Side
from pdflow.protocol.values import Address, EngineId, Instant, RequestId
from pdflow.serving.core import Core, Endpoint, Port
from pdflow.serving.effects import HoldEngine, ResumeEngine
from pdflow_sim.clock import AFTER_ENGINES, ENGINE, POLL
from pdflow_sim.nodes.node import FAR, TIME_REACHED, SimPort
from pdflow_sim.nodes.peer_node import PeerNode
from pdflow_sim.nodes.ports import EngineComponents


class SimEngineNode(PeerNode):
    """A node with a batch scheduler. Args: `side`: which side its ranks are on."""

    def __init__(self, components: EngineComponents, side: Side, core: Core | None = None) -> None:
        super().__init__(components.ports, side, core)
        self.name = components.name
        self.engine = components.engine
        self.lanes = components.engine.limits.replicas
        self.block_bytes = components.block_bytes
        self.shipping = components.ports.shipping
        self.prompts = components.ports.prompts
        self.poll_ns = components.ports.poll_ns
        self.ranks: list[SimPort] = []
        """The endpoints of its ranks: all but the scheduler's."""
        self.priority = ENGINE + components.index
        self.poll_priority = POLL + components.index
        self.unasked: list[tuple[SimPort, Any]] = []
        """Events that came at the instant of a boundary, until the engine has gone through it."""
        self.timer: int = FAR
        """The one timer that counts: its instant, or, of one that rings last of all at its instant, the complement."""
        self.shelved: int = FAR
        """A timer that an earlier one has replaced, and that rings all the same: it may count again."""
        self.held = False
        """True while the engine waits for something that is not computed here."""
        self.peak_blocks = 0
        self.ingress: Callable[[Any], None] | None = None
        """Takes what the router sends, while the engine itself cannot."""
        self.busy_before_ps = 0
        """Time in steps of former incarnations, in ps."""
        self.steps_before = 0
        """Steps that former incarnations of this engine have logged, if it decodes."""
        self.prefix_cache_before = (0, 0)
        """The counts of former incarnations' prefix caches."""
        if self.poll_ns:
            # Deadlines too are judged in the engine's step, behind everything that had come before (C11).
            self.receive = self.on_frame

    def add(self, address: Address, endpoint: Endpoint, incarnation: int, side: Side | None = None) -> SimPort:
        port = super().add(address, endpoint, incarnation, side)
        if address != self.name:
            self.ranks.append(port)
        return port

    def on_engine_output(self, outcome: object) -> None:
        """Handle one outcome of the engine."""
        raise NotImplementedError

    def rearm(self) -> None:
        """Keep one timer at the engine's next boundary; called after every call of the engine. A stale timer finds
        nothing due.
        """
        at = self.engine.wake_ns
        if at is None or self.held:
            return
        clock = self.clock
        now = clock.now
        # A stale timer of this very instant, armed before it came, must not start the engine before all else is heard;
        # one that has yet to ring must.
        timer = at if at > now else ~now
        before = self.timer
        if timer == before or at == before:
            return
        self.timer = timer
        if at > now:
            if at == self.shelved:
                return
            if at < before < FAR:
                self.shelved = before
            clock.call(at - now, self.wake, timer, self.priority)
        else:
            clock.call_last(self.wake, timer, self.priority)

    def wake(self, timer: int) -> None:
        if timer != self.timer:
            return
        self.timer = FAR
        engine = self.engine
        outcomes = engine.advance(self.clock.now)
        for outcome in outcomes:
            self.on_engine_output(outcome)
        self.rearm()
        if self.on_turn is not None:
            self.on_turn(self)

    def unfulfilled(self) -> str:
        at, now = self.engine.wake_ns, self.clock.now
        if at is None or self.held or self.paused_until > now or self.timer == (at if at > now else ~now):
            return super().unfulfilled()
        if self.timer == at == now:
            # Its timer was set before this instant, and rings within it.
            return super().unfulfilled()
        timer = "it has no timer" if self.timer == FAR else f"its timer is at {self.timer}"
        return f"the engine of {self.name} is due at {at}, but {timer}"

    @property
    def engines(self) -> tuple[EngineId, ...]:
        """The ids under which its peers know it."""
        return (self.name,)

    def assert_empty(self) -> None:
        """Assert, at quiescence, that nothing is left of what this kind of node keeps beside its blocks."""

    def left_over(self) -> str:
        """Describe, in words, what the node still holds when it has no work: blocks, or a transfer; "" if nothing."""
        pool = self.engine.pool
        if pool.free != pool.num_blocks:
            return f"{self.name} has lost {pool.num_blocks - pool.free} KV blocks"
        return self.open_transfers()

    # Standing still, and dying.

    def hold(self) -> None:
        """Stop the engine here until `resume_steps`. To be called as a step begins."""
        engine = self.engine
        assert isinstance(engine, HostedEngine)
        if self.held:
            return
        self.held = True
        self.timer = FAR
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(self.name, "its engine waits")
        for outcome in engine.freeze(self.clock.now):
            self.on_engine_output(outcome)

    def resume_steps(self) -> None:
        """Let the engine go on after `hold`."""
        engine = self.engine
        assert isinstance(engine, HostedEngine)
        self.held = False
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(self.name, "its engine continues")
        engine.thaw(self.clock.now)
        self.rearm()

    def hold_engine(self, port: Port, effect: HoldEngine) -> None:
        self.hold()

    def resume_engine(self, port: Port, effect: ResumeEngine) -> None:
        self.resume_steps()

    def pause(self, until: Instant) -> None:
        """Stop the node until then: events only queue and nothing is sent; only the running step goes on."""
        self.core.busy = True
        self.timer = FAR
        self.paused_until = max(self.paused_until, until)
        self.stretch(self.paused_until)

    def stretch(self, until: Instant) -> None:
        engine = self.engine
        if isinstance(engine, HostedEngine):
            for outcome in engine.stretch(self.clock.now, until):
                self.on_engine_output(outcome)
        if engine.wake_ns is not None and engine.wake_ns > self.clock.now:
            self.rearm()

    def resume(self) -> None:
        """Go on after a pause: handle what has come since, and only then deadlines that have passed (C11)."""
        self.core.busy = False
        waiting = list(self.core.queue)
        self.core.queue.clear()
        late = [item for item in waiting if item[1] is TIME_REACHED]
        for port, event in [item for item in waiting if item[1] is not TIME_REACHED] + late:
            self.feed(port, event)
        self.rearm()
        if self.on_turn is not None:
            self.on_turn(self)

    def die(self) -> None:
        """End every process of the engine, with its memory. What still comes for it is ignored."""
        self.busy_before_ps += self.engine.busy_ps(self.clock.now)
        self.alive = False
        self.core.busy = True
        self.timer = FAR
        self.receive = self.ignore

    def ignore(self, port: SimPort, event: Any) -> None:
        pass

    def busy_ps(self, now: Instant) -> int:
        """Return the time in steps up to `now` in ps, that of former incarnations included."""
        return self.busy_before_ps + (self.engine.busy_ps(now) if self.alive else 0)

    def decoded(self, request_id: RequestId, seq: Sequence, at_ns: Instant) -> None:
        """Keep the sequence of a request whose last token is generated, until its answer reaches the router."""
        before = self.steps_before
        if before:
            seq.token_runs = [(first + before, last + before) for first, last in seq.token_runs]
        self.router.decoded[request_id] = (seq, at_ns, self.name)

    def prompt_tokens(self, request: int) -> int:
        """Return the length of a prompt, with the beginning of an answer that is resumed."""
        return self.metrics.records.input_tokens[request] + self.prompts.given.get(request, 0)

    def tokens_left(self, request: int) -> int:
        """Return how many tokens of an answer are still to be generated when its attempt begins."""
        return self.metrics.records.output_tokens[request] - self.prompts.given.get(request, 0)

    def prefix_of(self, request: int) -> tuple[int, ...]:
        """Return the names of the prefix blocks that a prompt begins with, as this engine's pool counts them."""
        pool, prefix = self.engine.pool, self.prompts.prefixes.get(request)
        if prefix is None or not isinstance(pool, CachingPool):
            return ()
        # A name stands for all before it, so the last one of several speaks for them.
        each = pool.span * self.engine.limits.block_size // self.prompts.block_tokens
        return prefix if each == 1 else prefix[each - 1 :: each]

    def prefix_cache(self) -> tuple[int, int]:
        """Return how many tokens of prompts were looked up and how many were found, in former incarnations too."""
        queries, hits = self.prefix_cache_before
        return queries + self.engine.prefix_cache_queries, hits + self.engine.prefix_cache_hits

    def measure_pool(self, just_freed: int = 0) -> None:
        """Update the peak of blocks in use: at every admission, or at every end, when the pool is at its fullest."""
        pool = self.engine.pool
        used = min(pool.num_blocks, pool.num_blocks - pool.free + just_freed)
        if used > self.peak_blocks:
            self.peak_blocks = used

    def newest_generation(self) -> int:
        return self.engine.pool.newest_generation

    def left_of_step(self) -> int:
        """Return the ns until the running step ends; 0 if none runs."""
        boundary = self.engine.next_boundary(self.clock.now)
        return 0 if boundary is None else boundary - self.clock.now

    def on_frame(self, port: SimPort, event: Any) -> None:
        """Hold an event for an endpoint that polls until the next poll: once per engine step, at the first boundary
        strictly after now; an engine without work spins with a millisecond's sleep (spec 6.3).

        A boundary that is due now is not gone through yet, and with many steps planned at once not even noticed: an
        event that comes at it asks again when the engine has gone through it, and no other event overtakes it.
        """
        now = self.clock.now
        boundary = self.engine.next_boundary(now)
        if self.unasked or boundary == now:
            if not self.unasked:
                self.clock.call(0, self.ask_again, None, AFTER_ENGINES)
            self.unasked.append((port, event))
        else:
            self.wait_for_poll(port, event, boundary)

    def ask_again(self, _: None) -> None:
        arrived, self.unasked = self.unasked, []
        for port, event in arrived:
            self.wait_for_poll(port, event, self.engine.next_boundary(self.clock.now))

    def wait_for_poll(self, port: SimPort, event: Any, boundary: Instant | None) -> None:
        now = self.clock.now
        poll_ns = self.poll_ns
        at = -(-now // poll_ns) * poll_ns if boundary is None else boundary
        if at > now:
            self.clock.call(at - now, self.polled, (port, event), self.poll_priority)
        else:
            self.polled((port, event))

    def polled(self, arg: tuple[SimPort, Any]) -> None:
        self.feed(*arg)

    def account_stranded(self, blocks: int, since: Instant) -> None:
        """Count blocks that no engine computed on since `since`: waiting for a transfer, in one, or after one."""
        self.metrics.totals.stranded_byte_ns += blocks * self.block_bytes * (self.clock.now - since)
