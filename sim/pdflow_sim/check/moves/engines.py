"""Moves of engines and clients of their own accord: prompts finish; requests arrive, are admitted, are given up."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from pdflow.protocol.ids import KvParams
from pdflow.serving.events import DecodeRequested, PrefillReported, RequestAborted
from pdflow_sim.check.engines.roles import Admits, Computes, Ends, Fails, Preempts, Reports
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.scopes.scope import TOKENS, FaultKind
from pdflow_sim.check.state.cluster import DIGEST
from pdflow_sim.check.state.shadow_state import DECODING, IN_FLIGHT, Broken, PromptStage, RequestStage, ShadowState
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

ANSWERED = (PromptStage.HELD, PromptStage.RELEASED, PromptStage.DEAD)
"""Stages of a prompt after P has reported its outcome."""


class Engines:
    """The moves of engines and clients."""

    def __init__(self, space: StateSpace, turns: TurnRunner) -> None:
        self.space = space
        self.turns = turns
        self.cluster = space.cluster
        self.scope = space.scope
        self.checker = space.checker
        self.abortable = (
            RequestStage.KNOWN,
            RequestStage.ENQUEUED,
            RequestStage.GIVEN,
            RequestStage.ADMITTED,
            *DECODING * self.cluster.decodes,
        )
        self.routed = self.scope.attempts > 0
        """Whether the router's endpoint dispatches decode legs, takes them back, and reports how prefill legs ended."""

    def acts(self) -> Acts:
        return {
            "finish": self.finish,
            "abort prefill": self.abort_prefill,
            "cancel prefill": self.cancel_prefill,
            "report": self.report_admitted,
            "preempt": self.preempt,
            "end": self.end,
            "decode": self.decode,
            "admit": self.admit,
            "hit": self.hit,
            "abort": self.abort,
        }

    # What may happen.

    def moves(self, state: State) -> Iterator[Move]:
        left, shadow = self.space.left(state), self.space.shadow_of(state)
        yield from self.prompt_moves(shadow, left)
        yield from self.request_moves(shadow, left)

    def prompt_moves(self, shadow: ShadowState, left: tuple[int, ...]) -> Iterator[Move]:
        for i, product in enumerate(shadow.products):
            if product == PromptStage.QUEUED:
                yield ("finish", i)
                if left[FaultKind.PREFILL_ABORT]:
                    yield ("abort prefill", i)
            elif product == PromptStage.COMPUTED:
                yield ("finish", i)
            here = product in (PromptStage.QUEUED, PromptStage.COMPUTED)
            if here and self.scope.late and left[FaultKind.ABORT] and not self.routed:
                yield ("cancel prefill", i)

    def request_moves(self, shadow: ShadowState, left: tuple[int, ...]) -> Iterator[Move]:
        early = self.scope.concurrent and not self.scope.pulls
        for i, stage in enumerate(shadow.stages):
            if stage == RequestStage.UNREGISTERED:
                if not self.routed and (early or shadow.products[self.cluster.product_of[i]] in ANSWERED):
                    yield ("decode", i)
            elif stage == RequestStage.ENQUEUED:
                if self.scope.hit_tokens == TOKENS:
                    yield ("hit", i)
                elif not self.scope.pool or not self.taken(shadow, i):
                    yield ("admit", i)
            elif stage == RequestStage.GIVEN:
                yield ("report", i)
            elif self.scope.decodes and stage in DECODING:
                yield ("end", i)
                if left[FaultKind.PREEMPT] and stage == RequestStage.COMMITTED:
                    yield ("preempt", i)
            if left[FaultKind.ABORT] and not self.routed and stage in self.abortable:
                yield ("abort", i)

    # P's engine.

    def finish(self, draft: Draft, move: Move) -> None:
        """Let P finish a prompt: its engine has computed it."""
        cluster, i = self.cluster, move[1]
        if self.scope.late and self.space.shadow_of(draft).products[i] == PromptStage.QUEUED:
            self.space.put_shadow(draft, "products", i, PromptStage.COMPUTED)
            self.at_p(draft, i, Computes(cluster.xids[i], cluster.sources[i]))
            return
        event = Reports(cluster.xids[i]) if self.scope.late else Computes(cluster.xids[i], cluster.sources[i])
        self.at_p(draft, i, event)
        self.report(draft, i, True)

    def cancel_prefill(self, draft: Draft, move: Move) -> None:
        """Take the prefill leg back. A prompt that P has computed stays."""
        i = move[1]
        self.space.spend(draft, FaultKind.ABORT)
        queued = self.space.shadow_of(draft).products[i] == PromptStage.QUEUED
        if queued:
            self.space.put_shadow(draft, "products", i, PromptStage.DEAD)
        else:
            self.checker.goal("cancelled too late")
        self.at_p(draft, i, RequestAborted(self.cluster.xids[i]))
        if queued:
            self.report(draft, i, False)

    def abort_prefill(self, draft: Draft, move: Move) -> None:
        i = move[1]
        self.space.spend(draft, FaultKind.PREFILL_ABORT)
        self.space.put_shadow(draft, "products", i, PromptStage.DEAD)
        self.at_p(draft, i, Fails(self.cluster.xids[i]))
        self.report(draft, i, False)

    def at_p(self, draft: Draft, i: int, event: object) -> None:
        """Deliver an event to the engine of a prompt."""
        self.turns.event(draft, self.cluster.roles[self.cluster.p_of[i].engine], event)

    def report(self, draft: Draft, product: int, ok: bool) -> None:
        """Report to D, as the router does, how a prefill leg ended, which vllm-compat relies on."""
        if not self.scope.dialect.control_frames and not self.routed:
            for i, request_id in enumerate(self.cluster.requests):
                if (
                    self.cluster.product_of[i] == product
                    and self.space.shadow_of(draft).stages[i] != RequestStage.UNREGISTERED
                ):
                    self.at_d(draft, i, PrefillReported(request_id, ok))

    # D's engine.

    def at_d(self, draft: Draft, i: int, event: object) -> None:
        """Deliver an event to the decode engine of a request."""
        self.turns.event(draft, self.cluster.roles[self.cluster.d_of[i].engine], event)

    def decode(self, draft: Draft, move: Move) -> None:
        """Deliver the decode leg to D."""
        space, cluster, i = self.space, self.cluster, move[1]
        product = cluster.product_of[i]
        xid = cluster.xids[product]
        answered = space.shadow_of(draft).products[product] in (PromptStage.HELD, PromptStage.RELEASED)
        if self.scope.pulls and answered:
            params = self.checker.params[xid]
        else:
            params = KvParams(
                cluster.p_of[product],
                xid,
                cluster.prefill_ids[product],
                TOKENS,
                incarnation=self.named_incarnation(draft, product),
            )
        space.put_shadow(draft, "stages", i, RequestStage.KNOWN)
        self.requested_at_d(draft, i, params)
        now = space.shadow_of(draft).products[product]
        if not self.scope.dialect.control_frames and now not in (PromptStage.QUEUED, PromptStage.COMPUTED):
            self.at_d(draft, i, PrefillReported(cluster.requests[i], now != PromptStage.DEAD))

    def named_incarnation(self, draft: Draft, product: int) -> int | UnsetType:
        """Return the incarnation of P that the router passes on, if it has waited for P's answer and dispatches only
        then. What P does not hold any more needs none."""
        shadow = self.space.shadow_of(draft)
        if self.scope.concurrent or not self.scope.dialect.control_frames:
            return UNSET
        if shadow.products[product] != PromptStage.HELD:
            return UNSET
        return self.space.incarnation(shadow, self.cluster.p_of[product].engine)

    def requested_at_d(self, draft: Draft, i: int, params: KvParams) -> None:
        cluster = self.cluster
        digest = DIGEST + cluster.product_of[i]
        self.at_d(draft, i, DecodeRequested(cluster.requests[i], params, cluster.request_blocks, TOKENS, digest))

    def admit(self, draft: Draft, move: Move) -> None:
        """Admit a request: D's engine has a seat and blocks for it."""
        i = move[1]
        self.space.put_shadow(draft, "stages", i, RequestStage.GIVEN if self.scope.late else RequestStage.ADMITTED)
        self.at_d(draft, i, Admits(self.cluster.requests[i], self.cluster.targets[i], self.scope.hit_tokens))

    def report_admitted(self, draft: Draft, move: Move) -> None:
        """Let D's engine report an admission."""
        self.space.put_shadow(draft, "stages", move[1], RequestStage.ADMITTED)
        self.at_d(draft, move[1], Reports(self.cluster.requests[move[1]]))

    def preempt(self, draft: Draft, move: Move) -> None:
        """Preempt a request: D's engine takes the blocks of one that it decodes."""
        space, i = self.space, move[1]
        space.spend(draft, FaultKind.PREEMPT)
        in_flight = [space.operations(op)[2] for op, flags in space.ops_of(draft) if flags & IN_FLIGHT]
        if any(self.checker.request_of(effect) == i for effect in in_flight):
            raise Broken(
                "S1", f"blocks of {self.cluster.requests[i]} are reused, but an operation may still land in them"
            )
        space.put_shadow(draft, "stages", i, RequestStage.PREEMPTED)
        self.at_d(draft, i, Preempts(self.cluster.requests[i]))

    def end(self, draft: Draft, move: Move) -> None:
        """End a request: D's engine has generated the last token."""
        self.at_d(draft, move[1], Ends(self.cluster.requests[move[1]]))

    def taken(self, shadow: ShadowState, i: int) -> bool:
        """True if another request still holds the blocks that this one would get. Decoding takes no time here."""
        pool, d_of = self.scope.pool, self.cluster.d_of
        holding = (RequestStage.GIVEN, RequestStage.ADMITTED, RequestStage.RESOLVED) + (
            RequestStage.COMMITTED,
        ) * self.scope.decodes
        return any(
            stage in holding and j % pool == i % pool and d_of[j] is d_of[i] for j, stage in enumerate(shadow.stages)
        )

    def hit(self, draft: Draft, move: Move) -> None:
        """Admit a request whose whole prompt is in D's prefix cache: nothing has to land."""
        i = move[1]
        self.space.put_shadow(draft, "landed", i, self.cluster.everything)
        self.space.put_shadow(draft, "stages", i, RequestStage.ADMITTED)
        self.at_d(draft, i, Admits(self.cluster.requests[i], self.cluster.targets[i], TOKENS))

    def abort(self, draft: Draft, move: Move) -> None:
        """Abort a request: its client gives up."""
        i = move[1]
        self.space.spend(draft, FaultKind.ABORT)
        decodes = self.space.shadow_of(draft).stages[i] in DECODING
        self.at_d(draft, i, RequestAborted(self.cluster.requests[i]))
        if decodes and self.space.shadow_of(draft).stages[i] in DECODING:
            raise Broken("S6", f"{self.cluster.requests[i]} is aborted, but its engine goes on decoding")
