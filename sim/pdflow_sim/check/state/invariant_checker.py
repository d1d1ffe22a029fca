"""The invariant checker: applies effects of endpoints and cores to the shadow state, and judges them against it.

A violated invariant is raised as Broken, at the step that violates it. S1 to S3 are judged where a block changes hands:
nothing is released, freed or committed while an operation may still touch it; and where an operation touches one
(operation_checks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from pdflow.protocol.effects import (
    AnswerPrefill,
    Commit,
    Enqueue,
    Fence,
    Flush,
    FreeBlocks,
    Handshake,
    Outcome,
    PostRead,
    PostWrite,
    ReadWord,
    ReleaseBlocks,
    Resolve,
    Send,
    SendLocal,
    StopWrite,
)
from pdflow.protocol.events import DecodeQueued, PeerFenced, ReconnectRefused
from pdflow.protocol.ids import KvParams, LeaseWord, rank_address
from pdflow.protocol.invariants.blocks import is_cancelled_by
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address
from pdflow.serving.effects import EndDecode, FreePrompt, GiveBackRoom, LeaveRoom, TakeRoom
from pdflow_sim.check.engines.plan import WaitsForRoom
from pdflow_sim.check.engines.roles import GivenBack, Loads, PromptReady, Withdrawn
from pdflow_sim.check.state.cluster import SOURCE, TARGET, role_of
from pdflow_sim.check.state.operation_checks import OperationChecker
from pdflow_sim.check.state.shadow_state import (
    BINDING,
    DECODING,
    IN_FLIGHT,
    INITIAL_WORD,
    OPEN,
    READING,
    Broken,
    Content,
    PartialState,
    PromptStage,
    RequestStage,
)


class InvariantChecker(OperationChecker):
    """Applies effects to a PartialState, and raises Broken for those that violate an invariant."""

    def check(self, draft: PartialState, node: Address, effect: Any, event: Any) -> None:
        act = _ON.get(type(effect))
        if act is not None:
            act(self, draft, node, effect, event)

    # Blocks and outcomes.

    def answered(self, draft: PartialState, node: Address, effect: AnswerPrefill, event: Any) -> None:
        """Keep the KV parameters of an answer, which a router would pass on to D.

        P numbers its lease words as prompts finish; here each prompt has lease words of its own, so that a state need
        not record the order in which prompts finished.
        """
        params = self.params[effect.params.xid] = self.with_own_words(effect.params)
        for rank, lease_word in enumerate(params.rank_words):
            self.word_values[rank_address(params.prefill.engine, rank), lease_word.index] = lease_word.value

    def with_own_words(self, params: KvParams) -> KvParams:
        first = self.cluster.xids.index(params.xid) * len(self.cluster.p_ranks)
        return structs.replace(
            params, rank_words=tuple(LeaseWord(first + i, INITIAL_WORD) for i in range(len(params.rank_words)))
        )

    def released(self, draft: PartialState, node: Address, effect: ReleaseBlocks, event: Any) -> None:
        product = self.cluster.xids.index(effect.xid)
        if draft.products[product] != PromptStage.HELD:
            raise Broken("S6", f"{effect.xid} is released twice")
        if self.reading(draft, product):
            raise Broken("S2", f"{effect.xid} is released under a WRITE")
        landed = 0
        died = 0
        for i, bits in enumerate(draft.landed):
            if self.cluster.product_of[i] == product:
                landed |= bits
                died += self.restarts(draft, self.cluster.d_of[i].engine)
        strict = self.cluster.scope.dialect.control_frames
        if strict and effect.code is Code.NONE and landed != self.cluster.everything and not died:
            raise Broken("S7", f"P reports {effect.xid} as sent, but not all of it has landed")
        draft.products[product] = PromptStage.RELEASED
        self.goal("expired" if effect.code is Code.EXPIRED else "released after use")

    def enqueued(self, draft: PartialState, node: Address, effect: Enqueue, event: Any) -> None:
        i = self.cluster.requests.index(effect.request_id)
        self.shared(draft, i)
        if type(event) is not DecodeQueued:
            self.goal("admitted once blocks were free")
        draft.stages[i] = RequestStage.ENQUEUED

    def shared(self, draft: PartialState, i: int) -> None:
        """Check D's pool before a request is enqueued: while D serves another P engine, no P engine may bind more than
        a quarter of the pool, or one request (L6)."""
        p_engine, d_engine = self.cluster.ends_of(i)
        ends = [(self.cluster.ends_of(j), stage) for j, stage in enumerate(draft.stages)]
        others = any(d == d_engine and p != p_engine and stage in OPEN for (p, d), stage in ends)
        bound = sum(d == d_engine and p == p_engine and stage in BINDING for (p, d), stage in ends)
        if others and bound and (bound + 1) * self.cluster.request_blocks > self.cluster.scope.pool_blocks // 4:
            what = (
                f"{self.cluster.requests[i]} is admitted, but {p_engine} already binds its share of {d_engine}'s pool"
            )
            raise Broken("L6", what)

    def committed(self, draft: PartialState, node: Address, effect: Commit, event: Any) -> None:
        i = self.cluster.requests.index(effect.request_id)
        if draft.stages[i] != RequestStage.ADMITTED:
            raise Broken("S6", f"{effect.request_id} is committed in stage {RequestStage(draft.stages[i]).name}")
        missing = self.cluster.everything & ~draft.landed[i]
        if missing or self.has_in_flight(draft, i):
            how = "incomplete" if missing else "while an operation may still write to it"
            raise Broken("S3", f"{effect.request_id} is committed {how}")
        if draft.content[i] == Content.STALE:
            raise Broken("S2", f"{effect.request_id} is committed, but its source had been released when it was read")
        if draft.content[i] == Content.FOREIGN:
            raise Broken("S4", f"{effect.request_id} is committed with KV that is not its prompt's")
        draft.stages[i] = RequestStage.COMMITTED
        self.goal("delivered")
        own = {self.cluster.number[engine] for engine in self.cluster.ends_of(i)}
        if any(draft.restarts) and not any(draft.restarts[engine] for engine in own):
            self.goal("delivered after a crash elsewhere")

    def resolved(self, draft: PartialState, node: Address, effect: Resolve, event: Any) -> None:
        i = self.cluster.requests.index(effect.request_id)
        if draft.stages[i] not in (
            RequestStage.KNOWN,
            RequestStage.ENQUEUED,
            RequestStage.GIVEN,
            RequestStage.ADMITTED,
        ):
            raise Broken("S6", f"{effect.request_id} is resolved in stage {RequestStage(draft.stages[i]).name}")
        if (effect.outcome is Outcome.CANCELLED) != is_cancelled_by(event):
            raise Broken("S6", f"{effect.request_id} is resolved {effect.outcome.name}, for {event}")
        p_engine, _ = self.cluster.ends_of(i)
        engine = self.cluster.number[p_engine]
        died, refused = draft.restarts[engine] or self.cluster.scope.twin, draft.refused and draft.refused[engine]
        gone = draft.down and draft.down[engine]
        if effect.code is Code.PEER_RESTARTED and not died:
            raise Broken("L10", f"{effect.request_id} is resolved PEER_RESTARTED, but its P engine has not restarted")
        if effect.code is Code.PEER_DEAD and not (died or gone or refused or self.cluster.scope.horizon):
            raise Broken(
                "L6",
                f"{effect.request_id} is resolved PEER_DEAD, but its P engine neither crashed nor refused a connection",
            )
        if type(event) is ReconnectRefused:
            self.goal("resolved by a refusal")
        if draft.stages[i] == RequestStage.GIVEN:
            self.goal("resolved before its admission was reported")
        holds = draft.stages[i] in (RequestStage.GIVEN, RequestStage.ADMITTED)
        draft.stages[i] = RequestStage.RESOLVED if holds else RequestStage.FREED
        self.goal(f"resolved {effect.code.name}")

    def freed(self, draft: PartialState, node: Address, effect: FreeBlocks, event: Any) -> None:
        i = effect.allocation.generation - TARGET
        if draft.stages[i] != RequestStage.RESOLVED:
            raise Broken("S6", f"{self.cluster.requests[i]} is freed in stage {RequestStage(draft.stages[i]).name}")
        if self.has_in_flight(draft, i):
            raise Broken("S1", f"{self.cluster.requests[i]} is freed while an operation may still land in it")
        draft.stages[i] = RequestStage.FREED
        if type(event) is PeerFenced and draft.down and draft.down[self.cluster.number[self.cluster.ends_of(i)[0]]]:
            self.goal("fenced while P is down")

    # What cores report.

    def given_back(self, draft: PartialState, node: Address, effect: GivenBack, event: Any) -> None:
        """Free blocks that a core gives back itself; no endpoint does."""
        self.freed(draft, node, FreeBlocks(effect.allocation), event)

    def loads(self, draft: PartialState, node: Address, effect: Loads, event: Any) -> None:
        i = self.cluster.requests.index(effect.handle)
        if draft.stages[i] != RequestStage.COMMITTED:
            raise Broken("S3", f"{effect.handle} is decoded in stage {RequestStage(draft.stages[i]).name}")

    def held(self, draft: PartialState, node: Address, effect: PromptReady, event: Any) -> None:
        """Set a prompt as held by the protocol from now on. If it was reported before all of it was computed, its lease
        may have ended already."""
        product = self.cluster.xids.index(effect.handle)
        now = draft.products[product]
        if now in (PromptStage.QUEUED, PromptStage.COMPUTED):
            draft.products[product] = PromptStage.HELD
        elif now == PromptStage.RELEASED and effect.all:
            self.goal("lease ended while being computed")
        elif now != PromptStage.HELD:
            raise Broken("S6", f"{effect.handle} may be sent, but it is {PromptStage(now).name}")

    def prompt_freed(self, draft: PartialState, node: Address, effect: FreePrompt, event: Any) -> None:
        """Check that a prompt whose blocks are freed was released (S2). Where prompts are sent from staging memory, the
        blocks are free as soon as the prompt is copied there, and nothing is checked."""
        if self.cluster.method is not None and self.cluster.method.staged_at_p:
            return
        product = self.cluster.xids.index(effect.handle)
        if draft.products[product] != PromptStage.RELEASED:
            now = PromptStage(draft.products[product]).name
            raise Broken("S2", f"the blocks of {effect.handle} are freed, but it is {now}")

    def room_left(self, draft: PartialState, node: Address, effect: LeaveRoom, event: Any) -> None:
        """Check that a prompt whose staging memory at P is given back can no longer be sent (S2): P reuses it for other
        prompts."""
        product = self.cluster.xids.index(effect.handle)
        if draft.products[product] == PromptStage.HELD or self.reading(draft, product):
            raise Broken("S2", f"the staging memory of {effect.handle} is released, but it may still be sent")

    def room_taken(self, draft: PartialState, node: Address, effect: TakeRoom, event: Any) -> None:
        i = self.cluster.requests.index(effect.handle)
        if draft.stages[i] != RequestStage.ENQUEUED:
            raise Broken("S6", f"{effect.handle} receives staging memory in stage {RequestStage(draft.stages[i]).name}")
        draft.stages[i] = RequestStage.ADMITTED

    def room_given_back(self, draft: PartialState, node: Address, effect: GiveBackRoom, event: Any) -> None:
        """Check that nothing may land any more in staging memory that D gives back (S1): it is reused for other
        requests' KV."""
        i = effect.staged.generation - TARGET
        if self.has_in_flight(draft, i) or draft.stages[i] in (RequestStage.ADMITTED, RequestStage.RESOLVED):
            raise Broken(
                "S1",
                f"the staging memory of {self.cluster.requests[i]} is released while an operation may still land in it",
            )

    def waits(self, draft: PartialState, node: Address, effect: WaitsForRoom, event: Any) -> None:
        self.goal(f"waits for memory at {role_of(node)}")

    def withdrawn(self, draft: PartialState, node: Address, effect: Withdrawn, event: Any) -> None:
        product = self.cluster.xids.index(effect.handle)
        for op, flags in draft.ops:
            posted = self.operations.values[op][2]
            reads = type(posted) is PostRead
            of = self.cluster.product_of[self.request_of(posted)] if reads else posted.source.generation - SOURCE
            if flags & IN_FLIGHT and flags & READING and of == product:
                self.goal(f"withdrawn under a {'READ' if reads else 'WRITE'}")

    def decode_ended(self, draft: PartialState, node: Address, effect: EndDecode, event: Any) -> None:
        i = self.cluster.requests.index(effect.handle)
        if not self.cluster.decodes or draft.stages[i] not in DECODING:
            return
        if draft.stages[i] == RequestStage.PREEMPTED:
            self.goal("decoded after a preemption" if effect.code is Code.NONE else "aborted after a preemption")
        draft.stages[i] = RequestStage.DECODED if effect.code is Code.NONE else RequestStage.LEFT


_ON: dict[type, Callable[[InvariantChecker, PartialState, Address, Any, Any], None]] = {
    AnswerPrefill: InvariantChecker.answered,
    Commit: InvariantChecker.committed,
    EndDecode: InvariantChecker.decode_ended,
    Enqueue: InvariantChecker.enqueued,
    Fence: InvariantChecker.fenced,
    Flush: InvariantChecker.flushed,
    FreeBlocks: InvariantChecker.freed,
    FreePrompt: InvariantChecker.prompt_freed,
    GiveBackRoom: InvariantChecker.room_given_back,
    GivenBack: InvariantChecker.given_back,
    Handshake: InvariantChecker.shook,
    PromptReady: InvariantChecker.held,
    LeaveRoom: InvariantChecker.room_left,
    Loads: InvariantChecker.loads,
    PostRead: InvariantChecker.read,
    PostWrite: InvariantChecker.wrote,
    ReadWord: InvariantChecker.lease_read_requested,
    ReleaseBlocks: InvariantChecker.released,
    Resolve: InvariantChecker.resolved,
    Send: InvariantChecker.sent,
    StopWrite: InvariantChecker.stop_requested,
    TakeRoom: InvariantChecker.room_taken,
    SendLocal: InvariantChecker.asked,
    WaitsForRoom: InvariantChecker.waits,
    Withdrawn: InvariantChecker.withdrawn,
}
