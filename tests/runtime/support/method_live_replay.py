"""Stories of a transfer method's world: pieces that lanes post, prompts that are sent while they are computed, memory
beside the blocks.

A piece is posted, read, landed and ended when the story says so (held.py). Which piece a rank posts next, its own Lanes
say, as the world's do: they must say the same. An engine's steps may overlap here as no engine's do, so its core is
told of them itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import trio
from msgspec import structs

from pdflow.methods.lanes import lane_rules
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import WriteStopped
from pdflow.protocol.ids import engine_of
from pdflow.protocol.values import Address, Allocation, EngineId
from pdflow.serving.events import ChunkStarted, LayerReady, PrefillFailed, RoomDue
from pdflow.serving.sending import ProgressiveSending, Sending
from pdflow.serving.staged_sending import StagedSending
from pdflow_runtime.nodes.engine_node import LiveEngineNode, NodeConfig
from pdflow_runtime.nodes.rank_memory import StagingFactory
from pdflow_runtime.nodes.staging_memory import staging_pages
from pdflow_sim.check.engines.layered_role import LayeredPrefillRole, step_of
from pdflow_sim.check.engines.roles import BEGUN, QUEUED
from pdflow_sim.check.engines.staged_role import BLOCKS as LOADED
from pdflow_sim.check.engines.staged_role import StagedDecodeRole
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.pieces import PieceOperations
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.state.cluster import SHAPE, role_of
from pdflow_sim.check.state.shadow_state import ENDED_ERR, ENDED_OK, ORPHAN
from tests.runtime.support.aside import Aside, ReplayedDecodeNode, ReplayedPrefillNode, SlowCopies
from tests.runtime.support.held import HeldTransfers, Operation
from tests.runtime.support.live_replay import BLOCKS, LiveReplay, NotReplayable, hand

ELSEWHERE = 50
FIRST_LOADED = 240
"""The first of the blocks that D's engine gives to what has landed beside them."""


class MethodLiveReplay(LiveReplay):
    """One telling, by a method."""

    def __init__(self, scope: Scope, nursery: trio.Nursery) -> None:
        super().__init__(scope, nursery)
        assert self.cluster.plan is not None
        self.plan: Final = self.cluster.plan
        operations = self.world.components.operations
        assert isinstance(operations, PieceOperations)
        self.pieces: Final = operations
        self.shape = structs.replace(SHAPE, num_layers=self.plan.layers)
        self.air: dict[Any, dict[Piece, Operation]] = defaultdict(dict)
        """By operation, its pieces that are read and have not landed."""
        self.open: dict[Any, dict[Piece, Operation]] = defaultdict(dict)
        """Those that have not ended."""
        self.last: dict[Any, Operation] = {}
        """By operation, its last piece, which has the notice."""
        self.moves |= {
            "begin": self.begin_prompt,
            "withdraw": self.withdraw,
            "room": self.room,
            "load": self.load,
            "copied": self.copied,
        }

    # Nodes.

    def staging(self, engine: EngineId) -> Staging | None:
        """An empty memory of its kind, with room for as many as in the world."""
        method, scope, at_p = self.plan.method, self.cluster.scope, role_of(engine) == "P"
        if not (method.staged_at_p if at_p else method.staged_at_d):
            return None
        room = (scope.p_pool if at_p else scope.pool) or scope.requests
        inner = self.plan.memory(method.p_memory if at_p else method.d_memory, room)
        return Aside(inner, self.plan.staged if method.pulls or not at_p else self.elsewhere())

    def elsewhere(self) -> dict[str, Allocation]:
        """Where P's prompts lie if nobody is told: in pages of other numbers than their blocks'."""
        return {
            handle: Allocation(staged.generation, tuple([block + ELSEWHERE for block in staged.blocks]))
            for handle, staged in self.plan.staged.items()
        }

    def staging_factory(self, engine: EngineId) -> StagingFactory | None:
        return None if self.staging(engine) is None else staging_pages(BLOCKS)

    def node(self, config: NodeConfig, scheduler: Any, ranks: Any) -> LiveEngineNode:
        staging = self.staging(config.info.engine)
        if role_of(config.info.engine) == "P" and self.plan.layered:
            sending = self.sending(staging)
            node: LiveEngineNode = ReplayedPrefillNode(config, scheduler, ranks, self.make_transport, sending, staging)
        elif staging is not None:
            node = ReplayedDecodeNode(config, scheduler, ranks, self.make_transport, staging)
        else:
            node = super().node(config, scheduler, ranks)
        for rank in node.ranks.values():
            assert isinstance(rank.transfers, HeldTransfers)
            rank.transfers.adopt(lane_rules(self.plan.method, self.plan.pipeline_policy))
            rank.transfers.holds = True
        if isinstance(node, SlowCopies):
            node.slow = self.cluster.scope.late
        return node

    def sending(self, staging: Staging | None) -> Sending:
        plan = self.plan
        if staging is None:
            return ProgressiveSending(plan.layers)
        return StagedSending(plan.method, plan.pipeline_policy, staging, plan.layers, plan.ranks, plan.ranks)

    def transfers(self, rank: Address) -> HeldTransfers:
        transfers = self.nodes[engine_of(rank)].ranks[rank].transfers
        assert isinstance(transfers, HeldTransfers)
        return transfers

    # What is compared.

    async def agree(self, name: str) -> None:
        await super().agree(name)
        for rank in self.pieces.ranks:
            lanes = self.pieces.lanes(self.state, rank)
            _, ready, *_ = lanes.fingerprint()
            posts, would = self.transfers(rank).next(), lanes.next()
            assert posts == would, f"{name}: {rank} would post {posts}, and in the world {would}"
            assert self.transfers(rank).ready() == ready, f"{name}: other pieces can be sent of what {rank} has"

    def held(self) -> dict[EngineId, set[int]]:
        """Where the world's engine keeps account of blocks, its account; and who has room, or waits for some."""
        held = super().held()
        for engine, node in self.nodes.items():
            role = self.world.space.body(self.state, self.cluster.roles[engine])
            if not isinstance(role, LayeredPrefillRole | StagedDecodeRole):
                continue
            allocations = [allocation for _, allocation in role.seqs.values() if allocation is not None]
            if isinstance(role, StagedDecodeRole):
                allocations += role.abandoned.values()
            else:
                assert hand(node).stands_still == bool(role.awaited)
            held[engine] = {allocation.generation for allocation in allocations}
            if role.staging is not None:
                assert isinstance(node.staging, Aside)
                assert node.staging.inner.fingerprint() == role.staging.fingerprint()
        return held

    # P's engine.

    def phase(self, i: int) -> int:
        """Where a prompt is in the world's engine."""
        role = self.world.space.body(self.state, self.cluster.roles[self.cluster.p_of[i].engine])
        phase: int = role.seqs.get(self.cluster.xids[i], (0, None))[0]
        return phase

    def begin_prompt(self, i: int) -> None:
        self.compute(i)
        self.chunk(i, self.pieces.engines.chunks[0])
        self.layer(i, self.pieces.engines.chunks[0], 0)

    def chunk(self, i: int, known: int) -> None:
        node, xid = self.prefill_node(i), self.cluster.xids[i]
        node.put(node.role, ChunkStarted(xid, self.cluster.sources[i], known, step_of(xid, known)))

    def layer(self, i: int, known: int, layer: int) -> None:
        node = self.prefill_node(i)
        node.put(node.role, LayerReady(step_of(self.cluster.xids[i], known), layer))

    def finish(self, i: int) -> None:
        """The rest of its steps, and then that all of it is computed."""
        if not self.plan.layered:
            super().finish(i)
            return
        phase, chunks = self.phase(i), self.pieces.engines.chunks
        if phase in (QUEUED, BEGUN):
            self.end_steps(i, phase, chunks)
            self.hand_at_p(i).finish_prompt(self.prompt(i))
            if self.cluster.scope.late:
                return
        self.prefill_node(i).settle()
        self.hand_at_p(i).report_prompt(self.prompt(i))

    def end_steps(self, i: int, phase: int, chunks: tuple[int, ...]) -> None:
        if not self.plan.pipeline_policy.early:
            self.compute(i)
            return
        if phase == QUEUED:
            self.begin_prompt(i)
        for known in chunks[1:]:
            self.chunk(i, known)
            self.layer(i, known, 0)
        for layer in range(1, self.plan.layers):
            self.layer(i, chunks[-1], layer)

    def abort_prefill(self, i: int) -> None:
        """What the protocol may send from its blocks stays in them."""
        node, phase, engine = self.prefill_node(i), self.phase(i), self.hand_at_p(i)
        if phase == QUEUED:
            super().abort_prefill(i)
            return
        failed = PrefillFailed(self.cluster.xids[i])
        assert isinstance(node, ReplayedPrefillNode)
        if node.staging is None:
            engine.finish_prompt(self.prompt(i))
            node.run_out(failed.handle)
            node.put(node.role, failed)
        else:
            engine.drop(self.prompt(i))
            node.put(node.role, failed)
            node.run_out(failed.handle)

    def withdraw(self, i: int) -> None:
        self.prefill_node(i).withdraw(self.cluster.xids[i])

    # D's engine.

    def room(self, engine: int) -> None:
        node = self.nodes[self.cluster.engines[engine]]
        node.put(node.role, RoomDue())

    def load(self, i: int) -> None:
        """Blocks of which the world knows a generation, and no more."""
        first = FIRST_LOADED + i * self.cluster.d_blocks
        blocks = Allocation(LOADED + i, tuple(range(first, first + self.cluster.d_blocks)))
        self.hand_at_d(i).give(self.sequence(i), blocks, 0)
        if not self.cluster.scope.late:
            self.report_admitted(i)

    def copied(self, at_p: int, i: int) -> None:
        info, names = (self.cluster.p_of, self.cluster.xids) if at_p else (self.cluster.d_of, self.cluster.requests)
        node = self.nodes[info[i].engine]
        assert isinstance(node, SlowCopies)
        node.end_copy(names[i])

    # Pieces.

    def begun(self, address: Address, effect: PostWrite | PostRead) -> None:
        """Its pieces are posted by and by."""

    async def happen(self, move: Move) -> None:
        await super().happen(move)
        await trio.testing.wait_all_tasks_blocked()
        self.fail()

    def fail(self) -> None:
        """What in the world has ended badly with this move ends so: whatever of it is under way, or else the piece that
        is posted next."""
        flags_of = {self.world.space.operations(op): flags for op, flags in self.world.space.ops_of(self.state)}
        for key, flags in flags_of.items():
            rank, restarts, effect = key
            if not flags & ENDED_ERR or restarts != self.restarts[engine_of(rank)]:
                continue
            for operation in self.open.pop(key, {}).values():
                operation.end(False)
            transfers = self.transfers(rank)
            if transfers.is_open(effect.op) and effect.op not in transfers.ends:
                assert not transfers.is_disconnected(effect.op), f"{effect.op} goes on behind a fence"
                self.post(rank, effect, None).end(False)

    def post(self, rank: Address, effect: PostWrite | PostRead, piece: Piece | None) -> Operation:
        """The rank's next piece, which must be this one, or at least one of this operation."""
        self.take_posted()
        found = self.transfers(rank).post_next()
        if found is None or found[0] != effect:
            if piece is None:
                raise NotReplayable("the world has an operation fail of which no piece can be posted now")
            raise AssertionError(f"{rank} posts {found}, and in the world {piece} of {effect}")
        assert piece in (None, found[1]), f"{rank} posts {found[1]}, and in the world {piece}"
        return self.transport(rank).posted.popleft()

    def key(self, i: int) -> tuple[Any, int]:
        op, flags = self.world.space.ops_of(self.state)[i]
        return self.world.space.operations(op), flags

    def read(self, i: int) -> None:
        key, _ = self.key(i)
        rank, _, effect = key
        lanes = self.pieces.lanes(self.state, rank)
        _, piece = lanes.next()
        operation = self.post(rank, effect, piece)
        has_notification = isinstance(effect, PostWrite) and lanes.all_posted(effect.op)
        assert has_notification == (operation.notification is not None), f"{piece} of {effect.op}"
        operation.read(0, 1)
        self.air[key][piece] = self.open[key][piece] = operation

    def land(self, i: int, k: int = 0) -> None:
        """Where DONE is local, the last piece's has been seen already, or will be told."""
        key, flags = self.key(i)
        piece, last = self.pieces.progress_of(flags).air[k]
        operation = self.air[key].pop(piece)
        operation.land()
        if last:
            self.last[key] = operation
        if not flags & ORPHAN and (not last or self.pieces.whole.ends_landed(key[2])):
            del self.open[key][piece]
            operation.end(True)

    def deliver_notification(self, i: int) -> None:
        self.last[self.key(i)[0]].report_notification()

    def ended(self, i: int) -> None:
        key, flags = self.key(i)
        rank, _, effect = key
        transfers = self.transfers(rank)
        if flags & ENDED_OK:
            for operation in self.open.pop(key, {}).values():
                operation.end(True)
        event = transfers.ends.pop(effect.op)
        if flags & ENDED_ERR and isinstance(event, WriteStopped):
            raise NotReplayable("it has stopped, and nothing of it is left that could fail")
        transfers.on_event(event)

    async def task(self, i: int) -> None:
        kind, number, target = self.world.space.tasks_of(self.state)[i]
        name = self.cluster.nodes[number]
        if kind == "stop":
            self.transfers(name).stop_now(self.world.space.operations(target)[2].op)
            return
        if kind == "fence":
            self.transfers(name).disconnect_now(self.cluster.nodes[target])
        await super().task(i)


def replay_of(scope: Scope, nursery: trio.Nursery) -> LiveReplay:
    """A telling of a story of this scope."""
    return MethodLiveReplay(scope, nursery) if scope.method else LiveReplay(scope, nursery)
