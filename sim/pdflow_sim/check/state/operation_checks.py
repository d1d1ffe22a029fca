"""What endpoints ask of the fabric: messages, handshakes and operations, judged against the shadow state.

An operation is posted only on blocks that its rank holds, with what the layout says of each pair of ranks, and no
message claims what has not landed.
"""

from __future__ import annotations

from typing import Any

from pdflow.layout.groups import runs_kept
from pdflow.protocol.effects import (
    Fence,
    Flush,
    Handshake,
    PostRead,
    PostWrite,
    ReadWord,
    Send,
    SendLocal,
    StopWrite,
)
from pdflow.protocol.events import FrameOrdered, Received
from pdflow.protocol.ids import KvParams, Reg, engine_of, rank_of
from pdflow.protocol.messages import CancelAck, Disposition, Progress, Register, RegisterAck, Sync, SyncReply
from pdflow.protocol.values import NO_BLOCK, Address
from pdflow_sim.check.scopes.scope import TOKENS
from pdflow_sim.check.state.cluster import FIRST_INCARNATION, SHAPE, SOURCE, TARGET, ScopeCluster
from pdflow_sim.check.state.shadow_state import (
    ENDED_ERR,
    IN_FLIGHT,
    READING,
    Broken,
    Content,
    Interned,
    PartialState,
    PromptStage,
    RequestStage,
    ShadowState,
)


class OperationChecker:
    """Applies what endpoints ask of the fabric to a PartialState, and raises Broken for what violates an invariant.

    `operations` and `seen` are shared with the world: (node, its engine's restarts, effect) of every operation, and how
    often each goal was reached by a new step.
    """

    def __init__(self, cluster: ScopeCluster) -> None:
        self.cluster = cluster
        self.operations = Interned()
        self.seen: dict[str, int] = {}
        self.params: dict[str, KvParams] = {}
        self.word_values: dict[tuple[Address, int], int] = {}

    def goal(self, name: str) -> None:
        self.seen[name] = self.seen.get(name, 0) + 1

    def request_of(self, effect: Any) -> int:
        return self.cluster.requests.index(effect.op.reg.request_id)

    # What is asked of the fabric.

    def sent(self, draft: PartialState, node: Address, effect: Send, event: Any) -> None:
        """Check a message that claims a WRITE was sent: its bytes must have landed (S7)."""
        message = effect.message
        claims: list[Any] = []
        if isinstance(message, CancelAck):
            self.goal(
                "cancelled " + ("before the WRITE" if message.disposition is Disposition.NOT_STARTED else "in flight")
            )
            if message.disposition is Disposition.SENT:
                claims.append(message.reg)
            if type(event) is Received and type(event.message) is Register:
                self.goal("late REG refused")
        elif isinstance(message, RegisterAck) and message.progress is Progress.SENT:
            claims.append(message.reg)
        elif isinstance(message, SyncReply):
            claims += [item.reg for item in message.items if item.progress is Progress.SENT]
        cluster = self.cluster
        for reg in claims:
            if self.dead(draft, reg):
                continue  # Nobody is left to believe it.
            i = cluster.requests.index(reg.request_id)
            pair = (rank_of(node), rank_of(effect.to))
            if not draft.landed[i] & cluster.bit[pair]:
                raise Broken("S7", f"{node} reports {reg.request_id} as sent, but it has not landed")

    def asked(self, draft: PartialState, node: Address, effect: SendLocal, event: Any) -> None:
        """Check the order of a SYNC: it must name every registration that D holds open at that P engine, and every
        prompt that D waits for there (L5). P would treat a missing one as unwanted, or forget it."""
        assert isinstance(effect.event, FrameOrdered)
        sync, scope, cluster = effect.event.message, self.cluster.scope, self.cluster
        assert isinstance(sync, Sync)
        ends = engine_of(effect.event.to[0]), engine_of(node)
        held, interest = set(), set()
        for i, stage in enumerate(draft.stages):
            if cluster.ends_of(i) != ends:
                continue
            if stage in (RequestStage.KNOWN, RequestStage.ENQUEUED, RequestStage.GIVEN) or (
                scope.pulls and stage == RequestStage.ADMITTED
            ):
                interest.add(cluster.xids[cluster.product_of[i]])
            if stage in (RequestStage.ADMITTED, RequestStage.RESOLVED) and not scope.pulls:
                held.add(cluster.requests[i])
        named = {reg.request_id for reg in sync.open}
        if (named, set(sync.interest)) != (held, interest):
            claimed = f"names {sorted(named)} and wants {sorted(sync.interest)}"
            raise Broken("L5", f"{node}'s SYNC {claimed}, not {sorted(held)} and {sorted(interest)}")

    def dead(self, draft: PartialState, reg: Reg) -> bool:
        """True if a former incarnation of D registered this. vLLM's registrations carry no incarnation (0): never."""
        return reg.incarnation not in (
            0,
            FIRST_INCARNATION[reg.engine] + draft.restarts[self.cluster.number[reg.engine]],
        )

    def restarts(self, draft: PartialState | ShadowState, node: Address) -> int:
        """Return how often the engine of this node has started again; 0 for an orphan, and for a second engine."""
        besides = node in self.cluster.orphans or node in self.cluster.seconds
        return 0 if besides else draft.restarts[self.cluster.number[engine_of(node)]]

    def shook(self, draft: PartialState, node: Address, effect: Handshake, event: Any) -> None:
        draft.tasks.append(("handshake", self.cluster.at[node], self.cluster.at[effect.peer]))

    def fenced(self, draft: PartialState, node: Address, effect: Fence, event: Any) -> None:
        draft.tasks.append(("fence", self.cluster.at[node], self.cluster.at[effect.peer]))

    def flushed(self, draft: PartialState, node: Address, effect: Flush, event: Any) -> None:
        draft.tasks.append(("flush", self.cluster.at[node], self.cluster.at[effect.peer]))

    def lease_read_requested(self, draft: PartialState, node: Address, effect: ReadWord, event: Any) -> None:
        draft.tasks.append(("word", self.cluster.at[node], self.operations.of((node, 0, effect))))

    def stop_requested(self, draft: PartialState, node: Address, effect: StopWrite, event: Any) -> None:
        restarts = self.restarts(draft, node)
        for op, _ in draft.ops:
            owner, posted_in, posted = self.operations.values[op]
            if (owner, posted_in, posted.op) == (node, restarts, effect.op):
                draft.tasks.append(("stop", self.cluster.at[node], op))

    # Operations.

    def wrote(self, draft: PartialState, node: Address, effect: PostWrite, event: Any) -> None:
        i = self.request_of(effect)
        cluster = self.cluster
        product = effect.source.generation - SOURCE
        orphan = node in cluster.orphans
        if draft.products[product] != PromptStage.HELD and not orphan:
            raise Broken("S2", f"{node} writes from blocks of a released prompt")
        if draft.barred[i] & cluster.bit[effect.op.p_rank, effect.op.d_rank]:
            # The transport's part of D's fence: an older grant leads nowhere (spec 2.6).
            if orphan:
                self.goal("an orphan is fenced")
            draft.ops.append((self.operations.of((node, self.restarts(draft, node), effect)), ENDED_ERR | READING))
            return
        here = cluster.scope.hit_tokens
        asked = (effect.registration.token_start, effect.registration.num_tokens)
        if product != cluster.product_of[i] or asked != (here, TOKENS - here):
            draft.content[i] = Content.FOREIGN
        if self.dead(draft, effect.op.reg):
            # Its process went, and with it what its blocks' addresses meant: the handle ends badly, and nothing lands.
            draft.ops.append((self.operations.of((node, self.restarts(draft, node), effect)), READING | ENDED_ERR))
            return
        if (
            draft.stages[i] not in (RequestStage.ADMITTED, RequestStage.RESOLVED)
            or effect.registration.target.generation != TARGET + i
        ):
            raise Broken("S1", f"{node} writes into blocks that {cluster.requests[i]} does not hold")
        if orphan:
            self.goal("an orphan posts")
        self.post(draft, node, effect, i)

    def read(self, draft: PartialState, node: Address, effect: PostRead, event: Any) -> None:
        i = self.request_of(effect)
        if draft.stages[i] not in (RequestStage.ADMITTED, RequestStage.RESOLVED):
            raise Broken("S1", f"{node} reads into blocks that {self.cluster.requests[i]} does not hold")
        if draft.products[self.cluster.product_of[i]] != PromptStage.HELD:
            draft.content[i] = Content.STALE
        self.post(draft, node, effect, i)

    def post(self, draft: PartialState, node: Address, effect: PostWrite | PostRead, i: int) -> None:
        op = self.operations.of((node, self.restarts(draft, node), effect))
        bit = self.cluster.bit[effect.op.p_rank, effect.op.d_rank]
        if draft.landed[i] & bit or any(known == op and flags & IN_FLIGHT for known, flags in draft.ops):
            raise Broken("S3", f"{node} posts {self.cluster.requests[i]} twice")
        if self.cluster.scope.groups > 1:
            self.by_tables(node, effect)
        draft.ops.append((op, IN_FLIGHT | READING))

    def by_tables(self, node: Address, effect: PostWrite | PostRead) -> None:
        """Check that in each KV cache group P has a block of every token that D keeps (S4)."""
        registration = effect.registration
        sources = effect.groups or (effect.blocks,) if isinstance(effect, PostRead) else effect.source.tables
        targets, first = registration.target.tables, registration.token_start
        try:
            for source, target in zip(sources, targets, strict=True):
                sizes = SHAPE.block_size, registration.shards.block_size
                runs_kept(source, sizes[0], target, sizes[1], first, first, first + registration.num_tokens)
        except ValueError as error:
            raise Broken("S4", f"{node} moves KV with block tables that are not its request's: {error}") from None
        if any(NO_BLOCK in target for target in targets):
            self.goal("moved without the tokens outside the window")

    def reading(self, draft: PartialState, product: int) -> bool:
        """True if a WRITE may still read this prompt's blocks. A READ that does is D's risk, and shows as stale."""
        for op, flags in draft.ops:
            effect = self.operations.values[op][2]
            if flags & READING and type(effect) is PostWrite and effect.source.generation - SOURCE == product:
                return True
        return False

    def has_in_flight(self, draft: PartialState, i: int) -> bool:
        """True if bytes may still land in this request's blocks."""
        operations = self.operations.values
        return any(flags & IN_FLIGHT and self.request_of(operations[op][2]) == i for op, flags in draft.ops)
