"""Moves of transports that answer endpoints' requests: handshakes, fences, flushes, lease words. And of connections to
an engine that has died, which each peer finds broken, and to one that has closed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pdflow.protocol.effects import ReadWord
from pdflow.protocol.events import FenceEnded, FlushEnded, HandshakeEnded, PeerLost, SourceReady, WordRead
from pdflow.protocol.ids import engine_of, rank_of
from pdflow.protocol.invariants.former import acts_on
from pdflow.protocol.values import Address, Xid
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.moves.onesided import Operations, after_discarding, other_end
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.cluster import FIRST_INCARNATION, SECOND
from pdflow_sim.check.state.shadow_state import DISCARDED, ENDED_OK, ERROR_REPORTED, IN_FLIGHT, Broken, RequestStage
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
            "lost": self.lost,
            "closed": self.closed,
            "fence": self.fenced,
            "flush": self.flushed,
            "word": self.word_read,
            "stop": operations.stop,
        }
        """The act of a task that ends well, by its kind."""
        d_ranks = self.cluster.d_ranks if self.cluster.seconds else ()
        first = space.claim((0,) * len(d_ranks), self._by_value) if d_ranks else 0
        self.replaced = {rank: slot for slot, rank in enumerate(d_ranks, first)}
        """With two engines of P's id, by D rank: the slot that tells which of them another has replaced."""

    def acts(self) -> Acts:
        return {
            "task": self.end,
            "unreachable": self.unreachable,
            "refused": self.refused,
            "falsely refused": self.falsely_refused,
            "second": self.second,
            "flush fails": self.flush_fails,
            "flush refused": self.flush_refused,
        }

    def moves(self, state: State) -> Iterator[Move]:
        for i, (kind, node, target) in enumerate(self.space.tasks_of(state)):
            if kind == "handshake":
                yield from self.handshake_moves(state, i, node, target)
            elif kind != "flush":
                yield ("task", i)
            else:
                yield from self.flush_moves(state, i, node, target)

    def flush_moves(self, state: State, i: int, node: int, target: int) -> Iterator[Move]:
        """Yield the ways in which a flush may end: well only if the peer has everything whose handle ended well."""
        if self.operations.discarded(state, node, target):
            yield ("flush refused", i)
            return
        if self.operations.flushed(state, node, target):
            yield ("task", i)
        if self.space.left(state)[FaultKind.ERR]:
            yield ("flush fails", i)

    def handshake_moves(self, state: State, i: int, node: int, target: int) -> Iterator[Move]:
        """Yield the ways in which a handshake may end. D opens the connections, so that only D is refused."""
        cluster, left = self.cluster, self.space.left(state)
        peer = cluster.nodes[target]
        if self.space.shadow_of(state).is_gone(cluster.number[engine_of(peer)], rank_of(peer)):
            yield ("refused", i)
        else:
            yield ("task", i)
            if cluster.seconds and SECOND + cluster.nodes[target] in cluster.seconds:
                yield ("second", i)
            if left[FaultKind.REFUSED] and cluster.nodes[node] in cluster.d_ranks:
                yield ("falsely refused", i)
        if left[FaultKind.UNREACHABLE]:
            yield ("unreachable", i)

    def end(self, draft: Draft, move: Move) -> None:
        kind, node, target = self.space.take_task(draft, move[1])
        self.ends[kind](draft, node, target)

    def connected(self, draft: Draft, node: int, peer: int) -> None:
        name, to = self.cluster.nodes[node], self.cluster.nodes[peer]
        incarnation = self.space.incarnation(self.space.shadow_of(draft), to)
        if name in self.replaced:
            self.answered(draft, name, to, incarnation)
        else:
            self.turns.event(draft, name, HandshakeEnded(to, True, incarnation))

    def second(self, draft: Draft, move: Move) -> None:
        """Let the second engine of P's id answer a handshake of D."""
        _, node, peer = self.space.take_task(draft, move[1])
        self.answered(draft, self.cluster.nodes[node], self.cluster.nodes[peer], FIRST_INCARNATION["P"] + 1)

    def answered(self, draft: Draft, name: Address, to: Address, incarnation: int) -> None:
        """Let one of two engines of one id answer. One that the other has replaced must never count again (S8)."""
        slot, bit = self.replaced[name], 1 << incarnation - FIRST_INCARNATION["P"]
        known = self.space.body(draft, name).peers.incarnations.get(engine_of(to), incarnation)
        if known != incarnation:
            draft[slot] |= 3 & ~bit
            self.space.checker.goal("of two engines of one id, one replaces the other")
        self.turns.event(draft, name, HandshakeEnded(to, True, incarnation))
        if draft[slot] & bit:
            self.space.checker.goal("of two engines of one id, both have answered")
            if acts_on(self.space.body(draft, name), to, incarnation):
                raise Broken("S8", f"{name} acts on frames of an incarnation of {to} that another has replaced")

    def _by_value(self, state: State) -> dict[str, Any]:
        return {"replaced": [state[slot] for slot in self.replaced.values()]}

    def lost(self, draft: Draft, node: int, peer: int) -> None:
        self.turns.event(draft, self.cluster.nodes[node], PeerLost(self.cluster.nodes[peer]))

    def closed(self, draft: Draft, node: int, peer: int) -> None:
        """Let a rank find that its peer has closed the connection: what it has sent since then is lost."""
        link = self.cluster.link_of.get((self.cluster.nodes[node], self.cluster.nodes[peer]))
        if link is not None:  # A rank that outlives its engine has none: its frames reach nobody.
            draft[self.space.first_link + link] = 0
        self.lost(draft, node, peer)

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
                    flags = after_discarding(flags & ~ENDED_OK)
                if node == name:
                    flags = 0 if flags & ERROR_REPORTED else flags & ~DISCARDED
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

    def falsely_refused(self, draft: Draft, move: Move) -> None:
        """Refuse a handshake, though the peer lives."""
        self.space.spend(draft, FaultKind.REFUSED)
        target = self.space.tasks_of(draft)[move[1]][2]
        self.space.note_refusal(draft, self.cluster.number[engine_of(self.cluster.nodes[target])])
        self.refused(draft, move)

    def refused(self, draft: Draft, move: Move) -> None:
        """Refuse a handshake of D's. No request may go on waiting for what it had registered over a connection that is
        lost (L1)."""
        space, cluster = self.space, self.cluster
        _, node, target = space.take_task(draft, move[1])
        name, peer = cluster.nodes[node], cluster.nodes[target]
        connected = peer in space.body(draft, name).peers.connected
        self.turns.event(draft, name, HandshakeEnded(peer, False, 0, True))
        if connected or space.scope.lagging or not space.scope.dialect.control_frames:
            return
        shadow, ends = space.shadow_of(draft), (engine_of(peer), engine_of(name))
        pair = cluster.bit.get((rank_of(peer), rank_of(name)), 0)
        for i, stage in enumerate(shadow.stages):
            if stage == RequestStage.ADMITTED and cluster.ends_of(i) == ends and pair & ~shadow.landed[i]:
                raise Broken("L1", f"{cluster.requests[i]} waits for {peer}, which has refused {name}")

    def flush_fails(self, draft: Draft, move: Move) -> None:
        """Let a flush fail: posted operations may have landed, or not."""
        self.space.spend(draft, FaultKind.ERR)
        self.flush_refused(draft, move)

    def flush_refused(self, draft: Draft, move: Move) -> None:
        """Let a flush fail because the peer has discarded some of what was posted."""
        _, node, peer = self.space.take_task(draft, move[1])
        self.turns.event(draft, self.cluster.nodes[node], FlushEnded(self.cluster.nodes[peer], False))
