"""What an endpoint has asked of its transport, and is answered: handshakes, fences, flushes, lease words."""

from __future__ import annotations

from pdflow.protocol.effects import ReadWord
from pdflow.protocol.events import FenceEnded, FlushEnded, HandshakeEnded, SourceReady, WordRead
from pdflow.protocol.ids import engine_of, rank_of
from pdflow.protocol.values import Address, Xid
from sim.check.changes import Changes
from sim.check.ghost import ENDED_OK, FLYING, TOLD, Stage
from sim.check.onesided import cut, other_end
from sim.check.scope import Fault
from sim.check.world import Draft, State

BEFORE_GRANT = (Stage.UNBORN, Stage.KNOWN, Stage.ENQUEUED, Stage.GIVEN)
"""P has no grant of such a request."""


class Tasks(Changes):
    """The moves of a transport that is asked for something."""

    def task_done(self, draft: Draft, i: int) -> None:
        kind, node, about = self.take_task(draft, i)
        nodes = self.cluster.nodes
        name = nodes[node]
        if kind == "handshake":
            life = self.life(self.ghost_of(draft), nodes[about])
            self.event(draft, name, HandshakeEnded(nodes[about], True, life))
        elif kind == "fence":
            self.fence(draft, name, nodes[about])
        elif kind == "flush":
            self.event(draft, name, FlushEnded(nodes[about], True))
        else:
            effect = self.operations(about)[2]
            self.event(draft, name, WordRead(effect.op, self.word(draft, effect)))

    def word(self, draft: Draft, effect: ReadWord) -> int:
        """P bumps its word when it lets go; which it has done by the time its product is released, at the latest."""
        xid = self.cluster.xids[self.cluster.product_of[self.judge.request_of(effect)]]
        cells = self.body(draft, effect.source).cells.values()
        held = any(cell.source is not None and cell.xid == xid for cell in cells)
        held = held or self._source_is_coming(draft, effect.source, xid)
        return self.judge.words[effect.source, effect.index] + (0 if held else 1)

    def _source_is_coming(self, draft: Draft, rank: Address, xid: Xid) -> bool:
        """Whether P's rank has yet to hear that it has something to let go of."""
        link = self.cluster.link_of.get((engine_of(rank), rank))
        if link is None:
            return False
        frames = [self.frames.values[frame] for frame in self.chans.values[draft[self.first_link + link]]]
        return any(isinstance(frame, SourceReady) and frame.xid == xid for frame in frames)

    def fence(self, draft: Draft, name: Address, peer: Address) -> None:
        """Either end's fence: nothing of that link lands any more; its handles end badly."""
        ops = []
        for op, flags in self.ops_of(draft):
            node, _, effect = self.operations(op)
            outlived = self.cluster.orphans.get(node) == peer and other_end(effect) == name
            if {node, other_end(effect)} == {name, peer} or outlived:
                if flags & FLYING:
                    # One that was done before it had landed, and is cut off now, has not been done.
                    flags &= ~ENDED_OK
                    flags = flags & ~FLYING | cut(flags)
                if flags & TOLD and node == name:
                    flags = 0
            ops.append((op, flags))
        self.put_ops(draft, ops)
        if name in self.cluster.d_ranks:
            cluster, ghost = self.cluster, self.ghost_of(draft)
            ends = engine_of(peer), engine_of(name)
            pair = cluster.bit.get((rank_of(peer), rank_of(name)), 0)
            for i, stage in enumerate(ghost.stages):
                if stage not in BEFORE_GRANT and cluster.ends_of(i) == ends:
                    self.put_ghost(draft, "barred", i, ghost.barred[i] | pair)
        self.event(draft, name, FenceEnded(peer))

    def unreachable(self, draft: Draft, i: int) -> None:
        """A handshake fails."""
        self.spend(draft, Fault.UNREACHABLE)
        _, node, about = self.take_task(draft, i)
        self.event(draft, self.cluster.nodes[node], HandshakeEnded(self.cluster.nodes[about], False, 0))

    def flush_fails(self, draft: Draft, i: int) -> None:
        """What was posted may have landed, or not."""
        self.spend(draft, Fault.ERR)
        _, node, about = self.take_task(draft, i)
        self.event(draft, self.cluster.nodes[node], FlushEnded(self.cluster.nodes[about], False))

    def flushed(self, state: State, node: int, peer: int) -> bool:
        """Whether everything that this node has posted to that peer has landed."""
        nodes = self.cluster.nodes
        for op, flags in self.ops_of(state):
            owner, _, effect = self.operations(op)
            if flags & FLYING and owner == nodes[node] and other_end(effect) == nodes[peer]:
                return False
        return True
