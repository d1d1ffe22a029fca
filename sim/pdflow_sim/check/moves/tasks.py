"""Moves of transports that answer endpoints' requests: handshakes, fences, flushes, lease words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdflow.protocol.effects import ReadWord
from pdflow.protocol.events import FenceEnded, FlushEnded, HandshakeEnded, SourceReady, WordRead
from pdflow.protocol.ids import engine_of, rank_of
from pdflow.protocol.values import Address, Xid
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.moves.onesided import Operations, other_end, pending_error
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.shadow_state import ENDED_OK, ERROR_REPORTED, IN_FLIGHT, RequestStage
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

BEFORE_REGISTRATION = (RequestStage.UNREGISTERED, RequestStage.KNOWN, RequestStage.ENQUEUED, RequestStage.GIVEN)
"""Stages of a request of which P has no registration."""


class Tasks:
    """The moves by which a transport answers its tasks."""

    def __init__(self, space: StateSpace, turns: TurnRunner, operations: Operations) -> None:
        self.space = space
        self.turns = turns
        self.cluster = space.cluster
        self.operations = operations
        self.ends: dict[str, Callable[[Draft, int, int], None]] = {
            "handshake": self.connected,
            "fence": self.fenced,
            "flush": self.flushed,
            "word": self.word_read,
            "stop": operations.stop,
        }
        """The act of a task that ends well, by its kind."""

    def acts(self) -> Acts:
        return {"task": self.end, "unreachable": self.unreachable, "flush fails": self.flush_fails}

    def moves(self, state: State) -> Iterator[Move]:
        left = self.space.left(state)
        for i, (kind, node, target) in enumerate(self.space.tasks_of(state)):
            if kind != "flush" or self.operations.flushed(state, node, target):
                yield ("task", i)
            if kind == "handshake" and left[FaultKind.UNREACHABLE]:
                yield ("unreachable", i)
            if kind == "flush" and left[FaultKind.ERR]:
                yield ("flush fails", i)

    def end(self, draft: Draft, move: Move) -> None:
        kind, node, target = self.space.take_task(draft, move[1])
        self.ends[kind](draft, node, target)

    def connected(self, draft: Draft, node: int, peer: int) -> None:
        name, to = self.cluster.nodes[node], self.cluster.nodes[peer]
        incarnation = self.space.incarnation(self.space.shadow_of(draft), to)
        self.turns.event(draft, name, HandshakeEnded(to, True, incarnation))

    def flushed(self, draft: Draft, node: int, peer: int) -> None:
        self.turns.event(draft, self.cluster.nodes[node], FlushEnded(self.cluster.nodes[peer], True))

    def word_read(self, draft: Draft, node: int, op: int) -> None:
        effect = self.space.operations(op)[2]
        self.turns.event(draft, self.cluster.nodes[node], WordRead(effect.op, self.word_value(draft, effect)))

    def word_value(self, draft: State | Draft, effect: ReadWord) -> int:
        """Return the value of P's lease word. P bumps it when it lets the prompt go, at the latest when it releases
        it."""
        checker = self.space.checker
        xid = self.cluster.xids[self.cluster.product_of[checker.request_of(effect)]]
        cells = self.space.body(draft, effect.source).cells.values()
        held = any(cell.source is not None and cell.xid == xid for cell in cells)
        held = held or self._source_is_coming(draft, effect.source, xid)
        return checker.word_values[effect.source, effect.index] + (0 if held else 1)

    def _source_is_coming(self, draft: State | Draft, rank: Address, xid: Xid) -> bool:
        """True if the frame is still under way by which P's rank gets the prompt that it is to let go of."""
        space, link = self.space, self.cluster.link_of.get((engine_of(rank), rank))
        if link is None:
            return False
        frames = [space.frames.values[frame] for frame in space.chans.values[draft[space.first_link + link]]]
        return any(isinstance(frame, SourceReady) and frame.xid == xid for frame in frames)

    def fenced(self, draft: Draft, node: int, peer: int) -> None:
        self.fence(draft, self.cluster.nodes[node], self.cluster.nodes[peer])

    def fence(self, draft: Draft, name: Address, peer: Address) -> None:
        """Fence a link from either end: no operation between the two lands any more; its handles end with errors."""
        space, cluster = self.space, self.cluster
        ops = []
        for op, flags in space.ops_of(draft):
            node, _, effect = space.operations(op)
            outlived = cluster.orphans.get(node) == peer and other_end(effect) == name
            if {node, other_end(effect)} == {name, peer} or outlived:
                if flags & IN_FLIGHT:
                    # One that was done before it had landed, and is cut off now, has not been done.
                    flags &= ~ENDED_OK
                    flags = flags & ~IN_FLIGHT | pending_error(flags)
                if flags & ERROR_REPORTED and node == name:
                    flags = 0
            ops.append((op, flags))
        space.put_ops(draft, ops)
        if name in cluster.d_ranks:
            shadow = space.shadow_of(draft)
            ends = engine_of(peer), engine_of(name)
            pair = cluster.bit.get((rank_of(peer), rank_of(name)), 0)
            for i, stage in enumerate(shadow.stages):
                if stage not in BEFORE_REGISTRATION and cluster.ends_of(i) == ends:
                    space.put_shadow(draft, "barred", i, shadow.barred[i] | pair)
        self.turns.event(draft, name, FenceEnded(peer))

    def unreachable(self, draft: Draft, move: Move) -> None:
        """Let a handshake fail."""
        self.space.spend(draft, FaultKind.UNREACHABLE)
        _, node, peer = self.space.take_task(draft, move[1])
        self.turns.event(draft, self.cluster.nodes[node], HandshakeEnded(self.cluster.nodes[peer], False, 0))

    def flush_fails(self, draft: Draft, move: Move) -> None:
        """Let a flush fail: posted operations may have landed, or not."""
        self.space.spend(draft, FaultKind.ERR)
        _, node, peer = self.space.take_task(draft, move[1])
        self.turns.event(draft, self.cluster.nodes[node], FlushEnded(self.cluster.nodes[peer], False))
