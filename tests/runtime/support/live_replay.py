"""A story of the checker's world, told with live nodes: each move is made to happen to the driver, and what its
endpoints hear, answer and remember must be what the world's do.

The world says which move follows; engines, transports and streams are a test's (hand.py, held.py), nodes, ranks, frames
and endpoints are those that are served. An armed timer fires in the world whenever it likes: so it does here, by hand,
and the clock stands at 0, as the world's does.

In a scope with clocks both engines' go forward together, by a nanosecond for each tick (`tick`), and it is the driver
that finds out what is due. Instants are the world's distances then, so what endpoints remember is not compared.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
import trio
import trio.testing
from msgspec import structs
from trio.testing import MockClock

from pdflow.engine.sequence import Sequence
from pdflow.protocol.effects import AnswerPrefill, PostRead, PostWrite, ReadWord
from pdflow.protocol.events import DecodeQueued, HandshakeEnded, PeerLost, Received, TimerFired
from pdflow.protocol.ids import KvParams, engine_of, rank_of
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.values import Address, EngineId, Instant, Xid
from pdflow.serving.events import PrefillFailed
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.decode_node import DecodeLeg, LiveDecodeNode
from pdflow_runtime.nodes.engine_node import LiveEngineNode, NodeConfig
from pdflow_runtime.nodes.node import TIME_REACHED
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg, LivePrefillNode
from pdflow_runtime.nodes.rank_memory import WORD_BYTES, StagingFactory
from pdflow_runtime.nodes.ranks import LayoutBook
from pdflow_runtime.transports.base import EventSink
from pdflow_sim.check.counterexamples import names
from pdflow_sim.check.engines.roles import WEIGHTS
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.scopes.scope import TOKENS, Scope
from pdflow_sim.check.state.cluster import DIGEST, FIRST_INCARNATION, SHAPE, role_of
from pdflow_sim.check.state.shadow_state import ENDED_OK, PIECE, PromptStage, RequestStage
from pdflow_sim.check.state.space import State
from tests.runtime.support.hand import Hand
from tests.runtime.support.held import Held, Operation, Wires, frame
from tests.runtime.support.kv import kv, put_kv
from tests.runtime.support.obligations import misplaced

BLOCKS = 300
"""More than any block of the world's is called."""


HAVING_BLOCKS = (RequestStage.GIVEN, RequestStage.ADMITTED, RequestStage.RESOLVED)
AT_ONCE = ("finish", "admit", "decode", "abort", "task", "unreachable", "notice", "ended", "lose")
AT_ONCE += ("falsely refused", "flush fails", "flush refused")
"""Moves that are made without waiting: what peers say goes through a door that does."""


class Turn(NamedTuple):
    address: Address
    event: Any
    effects: tuple[Any, ...]


def digest_of(tokens: list[int], weights: int) -> int:
    """As the world has it: its prompts have numbers, no tokens."""
    return DIGEST + tokens[0]


class TurnRecorder:
    """What a world's endpoints heard and answered in a move, for its user to empty. The world remembers no turn."""

    def __init__(self, world: Relation) -> None:
        self.turns: list[Turn] = []
        world.turns.observer = self

    def checking(self, node: Address) -> None:
        """What is judged, the world's own tests look at."""

    def stepped(self, node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
        self.turns.append(Turn(node, event, effects))


class NotReplayable(Exception):  # noqa: N818 (what happened, not which kind of error)
    """The world goes a way that is none here, or does not say which."""


class LiveReplay:
    """One telling. `nursery` is where nodes run."""

    def __init__(self, scope: Scope, nursery: trio.Nursery) -> None:
        self.world: Final = relation(scope)
        self.world_turns: Final = TurnRecorder(self.world)
        self.cluster: Final = self.world.space.cluster
        self.state: State = self.world.space.beginning()
        self.oracle: Final = Oracle(self.cluster.geometry, scope.done_is_remote)
        self.nursery: Final = nursery
        self.shape = SHAPE
        self.live_turns: list[Turn] = []
        self.nodes: dict[EngineId, LiveEngineNode] = {}
        self.scopes: dict[EngineId, trio.CancelScope] = {}
        self.restarts: Counter[EngineId] = Counter()
        self.prefills: dict[int, LivePrefillLeg] = {}
        self.decodes: dict[int, DecodeLeg] = {}
        self.late: list[tuple[tuple[Address, Address], bytes]] = []
        self.expected: deque[Any] = deque()
        """By whom, in which life, and what was asked of a transport, which it has not been yet."""
        self.operations: dict[Any, Operation] = {}
        self.answers: dict[Xid, KvParams] = {}
        self.committed = self.fired = 0
        self.moves: Final[dict[str, Any]] = {
            "finish": self.finish,
            "decode": self.decode,
            "admit": self.admit,
            "abort": self.abort,
            "deliver": self.deliver,
            "drop": self.drop,
            "delay": self.delay,
            "duplicate": self.duplicate,
            "late": self.arrive_late,
            "task": self.task,
            "unreachable": self.unreachable,
            "falsely refused": self.falsely_refused,
            "flush fails": self.flush_fails,
            "flush refused": self.flush_fails,
            "lose": self.lose,
            "restart": self.restart,
            "read": self.read,
            "land": self.land,
            "error": self.nothing,
            "notice": self.deliver_notification,
            "lose notice": self.nothing,
            "ended": self.ended,
            "timer": self.timer,
            "abort prefill": self.abort_prefill,
            "cancel prefill": self.cancel_prefill,
            "hit": self.hit,
            "report": self.report_admitted,
            "preempt": self.preempt,
            "end": self.end,
        }

    async def begin(self) -> None:
        """Every prompt is queued at P."""
        for engine in self.cluster.engines:
            self.start(engine)
        for i, (xid, request_id) in enumerate(zip(self.cluster.xids, self.cluster.prefill_ids, strict=True)):
            self.prefills[i] = self.prefill_node(i).begin(request_id, xid, [i] * TOKENS)
        self.state = self.world.turns.start()
        await self.agree("the beginning")

    async def make_named(self, name: str) -> None:
        """The move of this name, in both worlds."""
        move = names.find(self.world, self.state, name)
        assert move is not None, f"{name} is not possible"
        await self.make(move)

    async def make(self, move: Move) -> None:
        name = names.name(self.world, self.state, move)
        await self.happen(move)
        await self.agree(name)

    async def happen(self, move: Move) -> None:
        """Without waiting for what comes of it."""
        after = self.world.apply(self.state, move)
        found = self.moves[move[0]](*move[1:])
        if found is not None:
            await found
        self.state = after

    async def tick(self, clock: MockClock, at_once: Callable[[list[Move]], Move | None]) -> bool:
        """A nanosecond, in which deadlines come, and in the same moment something else. False: the world's clocks wait.

        NotToldOn if several timers are due at one endpoint."""
        state = self.state
        for move in (("tick", 0), ("tick", 1)):
            if move not in self.world.moves(state):
                return False
            state = self.world.apply(state, move)
        self.state = state
        clock.jump(1e-9)
        others = [move for move in self.world.moves(self.state) if move[0] in AT_ONCE]
        if (also := at_once(others)) is not None:
            await self.happen(also)
        while (due := self.due()) is not None:
            self.state = self.world.apply(self.state, due)
            self.fired += 1
        await self.agree("a tick")
        return True

    def due(self) -> Move | None:
        """The next timer that fires, as the driver looks at its endpoints."""
        found = [move for move in self.world.moves(self.state) if move[0] == "timer"]
        at = [number for _, number, _ in found]
        if len(set(at)) < len(at):
            raise NotReplayable("several timers are due at one endpoint at once, in an order that is not said")
        return min(found, default=None)

    async def agree(self, name: str) -> None:
        """What was heard and answered, what is remembered, who holds blocks: the same in both worlds."""
        await trio.testing.wait_all_tasks_blocked()
        self.take_posted()
        self.all_were_posted(name)
        for engine in self.nodes:
            live, world = (self.of_engine(engine, turns) for turns in (self.live_turns, self.world_turns.turns))
            assert live == world, differing(name, live, world)
        self.live_turns.clear()
        self.world_turns.turns.clear()
        for node in self.nodes.values():
            wrong = misplaced(node)
            assert not wrong, f"{name}: {wrong}"
            if not self.cluster.scope.decodes:
                hand(node).decode_all()
            for address, port in node.ports.items() if not self.cluster.scope.horizon else ():
                assert port.endpoint.fingerprint() == self.world.space.body(self.state, address).fingerprint(), name  # type: ignore[attr-defined]
        self.agree_on_blocks(name)

    def all_were_posted(self, name: str) -> None:
        if self.expected:
            address, _, effect = self.expected[0]
            fenced = (
                isinstance(effect, ReadWord)
                and effect.source not in self.nodes[engine_of(address)].ranks[address].peers
            )
            if fenced:
                raise NotReplayable("whose memory was let go of at a fence is not asked for a word, and the world asks")
            raise AssertionError(f"{name}: {self.expected} were never posted")

    def of_engine(self, engine: EngineId, turns: list[Turn]) -> list[Turn]:
        """With clocks, a timer that is due is what a moment has reached; that it has reached none says nothing."""
        mine = [turn for turn in turns if engine_of(turn.address) == engine]
        if not self.cluster.scope.horizon:
            return mine
        alike = [turn._replace(event=TIME_REACHED) if type(turn.event) is TimerFired else turn for turn in mine]
        return [turn for turn in alike if turn.effects or turn.event != TIME_REACHED]

    def agree_on_blocks(self, name: str) -> None:
        found = {engine: set(hand(node).pool.held) for engine, node in self.nodes.items()}
        assert found == self.held(), name

    def held(self) -> dict[EngineId, set[int]]:
        """By engine, the generations of the world's blocks that somebody has."""
        shadow, cluster = self.world.space.shadow_of(self.state), self.cluster
        held: dict[EngineId, set[int]] = {engine: set() for engine in cluster.engines}
        for i, product in enumerate(shadow.products):
            if product in (PromptStage.HELD, PromptStage.COMPUTED):
                held[cluster.p_of[i].engine].add(cluster.sources[i].generation)
        for i, stage in enumerate(shadow.stages):
            if stage in HAVING_BLOCKS or (self.cluster.scope.decodes and stage == RequestStage.COMMITTED):
                held[cluster.d_of[i].engine].add(cluster.targets[i].generation)
        return held

    # Nodes.

    def start(self, engine: EngineId) -> None:
        """A life of an engine begins."""
        cluster, restarts = self.cluster, self.restarts[engine]
        scheduler, *ranks = cluster.engine(engine, restarts)
        info = (*cluster.ps, *cluster.ds)[cluster.number[engine]]
        shape = structs.replace(self.shape, block_size=info.shards.block_size)
        config = NodeConfig(
            info=info,
            incarnation=FIRST_INCARNATION[engine] + restarts,
            shape=shape,
            num_blocks=BLOCKS,
            layouts=LayoutBook(shape, "pull" if cluster.scope.pulls else "push", "exactly-once"),
            weights=WEIGHTS,
            staging_factory=self.staging_factory(engine),
        )
        node = self.node(config, scheduler, ranks)
        node.engine = Hand(node, self.loaded)  # type: ignore[assignment]
        node.observe = self.observe
        self.nodes[engine] = node
        self.scopes[engine] = trio.CancelScope()
        self.nursery.start_soon(self.run, node, self.scopes[engine])

    def staging_factory(self, engine: EngineId) -> StagingFactory | None:
        """What its ranks have beside their blocks."""
        return None

    def node(self, config: NodeConfig, scheduler: Any, ranks: Any) -> LiveEngineNode:
        if role_of(config.info.engine) == "P":
            return LivePrefillNode(config, scheduler, ranks, self.make_transport)
        return LiveDecodeNode(config, scheduler, ranks, self.make_transport)

    @staticmethod
    async def run(node: LiveEngineNode, scope: trio.CancelScope) -> None:
        with scope:
            await node.run()

    def make_transport(self, address: Address, on_event: EventSink) -> Held:
        return Held(address, on_event, self.transport, "remote" if self.cluster.scope.done_is_remote else "local")

    def transport(self, address: Address) -> Held:
        found = self.nodes[engine_of(address)].ranks[address].transport
        assert isinstance(found, Held)
        return found

    def observe(self, address: Address, event: Any, effects: tuple[Any, ...], now: Instant) -> None:
        self.take_posted()
        self.live_turns.append(Turn(address, event, effects))
        self.oracle.observe(address, event, effects, now)
        for effect in effects:
            if isinstance(effect, ReadWord):
                self.expected.append((address, 0, effect))
            elif isinstance(effect, PostWrite | PostRead):
                self.begun(address, effect)
            elif isinstance(effect, AnswerPrefill):
                self.answers[effect.params.xid] = effect.params

    def begun(self, address: Address, effect: PostWrite | PostRead) -> None:
        """It is asked of the transport at once."""
        self.expected.append((address, self.restarts[engine_of(address)], effect))

    def take_posted(self) -> None:
        """What ranks have asked of transports since, by what endpoints had asked of ranks."""
        while self.expected and (posted := self.transport(self.expected[0][0]).posted):
            self.operations[self.expected.popleft()] = posted.popleft()

    def loaded(self, seq: Sequence) -> None:
        """D's KV of a request is what P has, byte for byte."""
        i = self.cluster.requests.index(seq.handle)
        product, here = self.cluster.product_of[i], self.cluster.scope.hit_tokens
        assert seq.allocation is not None
        found = kv(self.nodes[self.cluster.d_of[i].engine], seq.allocation.blocks, TOKENS - here)
        assert (found == self.content(product)[:, :, :, here:]).all()
        self.committed += 1

    def content(self, product: int) -> Any:
        """`[layers, 2, heads, tokens, cell_bytes]` of a prompt: no two prompts', tokens' or heads' are alike."""
        shape = (self.shape.num_layers, 2, SHAPE.stored_heads, TOKENS, SHAPE.cell_bytes)
        return np.random.default_rng(product).integers(0, 256, shape, np.uint8)

    # What engines and clients do.

    def finish(self, i: int) -> None:
        """Where engines report late, that is another move of this name."""
        if self.world.space.shadow_of(self.state).products[i] == PromptStage.QUEUED:
            self.compute(i)
            self.hand_at_p(i).finish_prompt(self.prompt(i))
            if self.cluster.scope.late:
                return
        self.hand_at_p(i).report_prompt(self.prompt(i))

    def compute(self, i: int) -> None:
        """In the blocks that it has in the world."""
        source = self.cluster.sources[i]
        put_kv(self.nodes[self.cluster.p_of[i].engine], source.blocks, self.content(i))
        self.hand_at_p(i).compute(self.prompt(i), source)

    def abort_prefill(self, i: int) -> None:
        node = self.prefill_node(i)
        self.hand_at_p(i).drop(self.prompt(i))
        node.put(node.role, PrefillFailed(self.cluster.xids[i]))

    def cancel_prefill(self, i: int) -> None:
        self.prefill_node(i).abort(self.prefills[i])

    def prefill_node(self, i: int) -> LivePrefillNode:
        """Where a prompt is computed."""
        node = self.nodes[self.cluster.p_of[i].engine]
        assert isinstance(node, LivePrefillNode)
        return node

    def hand_at_p(self, i: int) -> Hand:
        return hand(self.nodes[self.cluster.p_of[i].engine])

    def prompt(self, i: int) -> Sequence:
        return self.prefills[i].job.seq

    def decode(self, i: int) -> None:
        node = self.nodes[self.cluster.d_of[i].engine]
        assert isinstance(node, LiveDecodeNode)
        (queued,) = [turn.event for turn in self.world_turns.turns if type(turn.event) is DecodeQueued]
        sampling = Sampling(max_tokens=1)
        tokens = [self.cluster.product_of[i]] * TOKENS
        self.decodes[i] = node.begin(self.cluster.requests[i], queued.params, tokens, sampling)

    def admit(self, i: int) -> None:
        self.hand_at_d(i).give(self.sequence(i), self.cluster.targets[i], self.cluster.scope.hit_tokens)
        if not self.cluster.scope.late:
            self.report_admitted(i)

    def hit(self, i: int) -> None:
        """All of it is in D's prefix cache: nothing has to land."""
        self.admit(i)

    def report_admitted(self, i: int) -> None:
        self.hand_at_d(i).report_admitted(self.sequence(i))

    def preempt(self, i: int) -> None:
        self.hand_at_d(i).preempt(self.sequence(i))

    def end(self, i: int) -> None:
        self.hand_at_d(i).decode(self.sequence(i))

    def hand_at_d(self, i: int) -> Hand:
        return hand(self.nodes[self.cluster.d_of[i].engine])

    def sequence(self, i: int) -> Sequence:
        return self.decodes[i].job.seq

    def abort(self, i: int) -> None:
        node = self.nodes[self.cluster.d_of[i].engine]
        assert isinstance(node, LiveDecodeNode)
        node.abort(self.decodes[i])

    # Frames.

    def wire(self, link: int) -> deque[bytes]:
        sender, _ = self.cluster.links[link]
        return wires(self.nodes[engine_of(sender)]).out[self.cluster.links[link]]

    async def deliver(self, link: int) -> None:
        await self.arrive(self.cluster.links[link], self.wire(link).popleft())

    async def arrive(self, link: tuple[Address, Address], data: bytes) -> None:
        sender, to = link
        node = self.nodes[engine_of(to)]
        incarnation = self.nodes[engine_of(sender)].config.incarnation
        await node.offer(node.ports[to], Received(sender, incarnation, frame(data)))

    def drop(self, link: int) -> None:
        self.wire(link).popleft()

    def delay(self, link: int) -> None:
        self.late.append((self.cluster.links[link], self.wire(link).popleft()))

    def duplicate(self, link: int) -> None:
        self.late.append((self.cluster.links[link], self.wire(link)[0]))

    async def arrive_late(self, i: int) -> None:
        link, number = self.world.space.bags.values[self.state[self.world.space.bag]][i]
        ends, message = self.cluster.links[link], self.world.space.frames.values[number]
        at = next(at for at, (on, data) in enumerate(self.late) if on == ends and frame(data) == message)
        await self.arrive(*self.late.pop(at))

    def lose(self, link: int) -> None:
        name, peer = self.cluster.links[link]
        node = self.nodes[engine_of(name)]
        wires(node).out.pop((name, peer), None)
        node.put(node.ports[name], PeerLost(peer))

    def restart(self, engine: int) -> None:
        """Nothing of the old life is left but what its transports have under way."""
        name = self.cluster.engines[engine]
        self.scopes[name].cancel()
        self.oracle.lost(name)
        for node in self.nodes.values():
            out = wires(node).out
            for ends in [ends for ends in out if name in map(engine_of, ends)]:
                del out[ends]
        self.late = [one for one in self.late if name not in map(engine_of, one[0])]
        self.restarts[name] += 1
        self.start(name)

    # Transports.

    async def task(self, i: int) -> None:
        kind, number, target = self.world.space.tasks_of(self.state)[i]
        name, nodes = self.cluster.nodes[number], self.cluster.nodes
        if kind == "handshake":
            await self.shake(name, nodes[target])
        elif kind == "fence":
            self.transport(name).end_fence(nodes[target])
        elif kind == "flush":
            self.transport(name).end_flush(nodes[target], True)
        else:
            assert kind == "word", kind
            _, _, effect = self.world.space.operations(target)
            word_value = self.world.components.tasks.word_value(self.state, effect)
            unchanged = word_value == self.world.space.checker.word_values[effect.source, effect.index]
            assert self.stands(effect) == unchanged, "P's memory says otherwise"
            self.operation(target).report_word(word_value)

    def stands(self, effect: ReadWord) -> bool:
        """Whether P's word is what it was when the prompt was answered. The world numbers words in its own way."""
        xid = self.cluster.xids[self.cluster.product_of[self.world.space.checker.request_of(effect)]]
        rank = self.nodes[engine_of(effect.source)].ranks[effect.source]
        lease_word = self.answers[xid].rank_words[rank_of(effect.source)]
        at = rank.words_at + lease_word.index % rank.slots * WORD_BYTES
        return int.from_bytes(rank.view[at : at + WORD_BYTES], "little") == lease_word.value

    async def shake(self, name: Address, peer: Address) -> None:
        node, other = self.nodes[engine_of(name)], self.nodes[engine_of(peer)]
        await node.ranks[name].connect(peer, other.ranks[peer].metadata_for(name))
        node.put(node.ports[name], HandshakeEnded(peer, True, other.config.incarnation))

    def unreachable(self, i: int, refused: bool = False) -> None:
        _, node, target = self.world.space.tasks_of(self.state)[i]
        name = self.cluster.nodes[node]
        at = self.nodes[engine_of(name)]
        at.put(at.ports[name], HandshakeEnded(self.cluster.nodes[target], False, 0, refused))

    def falsely_refused(self, i: int) -> None:
        self.unreachable(i, True)

    def flush_fails(self, i: int) -> None:
        _, node, target = self.world.space.tasks_of(self.state)[i]
        self.transport(self.cluster.nodes[node]).end_flush(self.cluster.nodes[target], False)

    def operation(self, op: int) -> Operation:
        self.take_posted()
        return self.operations[self.world.space.operations(op)]

    def of_move(self, i: int) -> tuple[Operation, int]:
        op, flags = self.world.space.ops_of(self.state)[i]
        return self.operation(op), flags

    def read(self, i: int) -> None:
        operation, flags = self.of_move(i)
        operation.read(flags >> PIECE & 7, self.cluster.scope.chunks)

    def land(self, i: int, k: int = 0) -> None:
        operation, _ = self.of_move(i)
        if not self.world.components.operations.split:
            operation.read(0, 1)
        operation.land()

    def deliver_notification(self, i: int) -> None:
        self.of_move(i)[0].report_notification()

    def ended(self, i: int) -> None:
        operation, flags = self.of_move(i)
        operation.end(bool(flags & ENDED_OK))

    def nothing(self, i: int) -> None:
        """It is told by and by, or never."""

    def timer(self, number: int, i: int) -> None:
        address = self.cluster.nodes[number]
        node = self.nodes[engine_of(address)]
        node.put(node.ports[address], TimerFired(self.world.space.armed[self.state[number]][i]))


def differing(name: str, live: list[Turn], world: list[Turn]) -> str:
    """The first turn in which they do."""
    for ours, theirs in zip_longest(live, world):
        if ours != theirs:
            return f"{name}:\n  live  {ours}\n  world {theirs}"
    raise AssertionError("they do not differ")


def hand(node: LiveEngineNode) -> Hand:
    assert isinstance(node.engine, Hand)
    return node.engine


def wires(node: LiveEngineNode) -> Wires:
    assert isinstance(node.links, Wires)
    return node.links
