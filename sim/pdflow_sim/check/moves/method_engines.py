"""Moves of the engines of a transfer method, which choose their next moves themselves where a prompt is sent before all
of it is computed, or goes by way of staging memory.

The cores decide what an engine does with a prompt or a request, as everywhere (roles.py, layered_role.py,
staged_role.py). This module has the further moves of those engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdflow.methods.method import Grain, Method
from pdflow.protocol.effects import Send
from pdflow.protocol.messages import Progress, RegisterAck
from pdflow.protocol.producer.cell import ProducerCell
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.values import NEVER, Address, Allocation
from pdflow.serving.events import PromptWithdrawn, RequestAborted, RoomDue
from pdflow_sim.check.engines.layered_role import Chunk, LayeredPrefillRole, LayerOutcome
from pdflow_sim.check.engines.plan import Copied, EnginePlan
from pdflow_sim.check.engines.roles import BEGUN, QUEUED, Admits, Computes, Fails, Reports
from pdflow_sim.check.engines.staged_role import BLOCKS, StagedDecodeRole
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.moves.engines import Engines
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, TOKENS, FaultKind
from pdflow_sim.check.state.cluster import role_of
from pdflow_sim.check.state.shadow_state import Broken, PromptStage
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

OF_LAYERED = frozenset({"finish", "abort prefill", "cancel prefill"})
OF_STAGED = frozenset({"admit", "report", "end", "preempt"})
"""Moves that the shadow state decides for any other engine."""
BUDGETED = {"abort prefill": FaultKind.PREFILL_ABORT, "cancel prefill": FaultKind.ABORT, "preempt": FaultKind.PREEMPT}


def chunks_of(method: Method) -> tuple[int, ...]:
    """Return the tokens up to which the steps of a prompt compute it: one step, or two where each chunk is sent
    alone."""
    return (BLOCK_TOKENS, TOKENS) if method.grain is Grain.LAYER_CHUNK else (TOKENS,)


class MethodEngines:
    """The moves of a method's engines: those of `plain` engines, except where a method's engines have others."""

    def __init__(self, space: StateSpace, turns: TurnRunner, plain: Engines, plan: EnginePlan) -> None:
        cluster = space.cluster
        self.space = space
        self.turns = turns
        self.cluster = cluster
        self.checker = space.checker
        self.plain = plain
        self.plan = plan
        self.layered, self.staged_at_d = plan.layered, plan.method.staged_at_d
        self.chunks = chunks_of(plan.method)
        self.not_here = (OF_LAYERED if self.layered else frozenset()) | (OF_STAGED if self.staged_at_d else frozenset())
        chooses = {"P": self.layered, "D": self.staged_at_d}
        self.choosers = [cluster.at[node] for engine, node in cluster.roles.items() if chooses[role_of(engine)]]
        self._choices: dict[tuple[int, int], tuple[Move, ...]] = {}

    def acts(self) -> Acts:
        return {
            **self.plain.acts(),
            "finish": self.finish,
            "abort prefill": self.abort_prefill,
            "cancel prefill": self.cancel_prefill,
            "report": self.report_admitted,
            "begin": self.begin,
            "withdraw": self.withdraw,
            "room": self.room,
            "load": self.load,
            "copied": self.copied,
        }

    # What may happen.

    def moves(self, state: State) -> Iterator[Move]:
        for move in self.plain.moves(state):
            if move[0] not in self.not_here:
                yield move

    def withdrawals(self, state: State) -> Iterator[Move]:
        if self.space.left(state)[FaultKind.WITHDRAW]:
            for i, product in enumerate(self.space.shadow_of(state).products):
                if product == PromptStage.HELD:
                    yield ("withdraw", i)

    def chosen(self, state: State) -> list[Move]:
        """Return the moves that the engines' bodies allow next."""
        moves: list[Move] = []
        budget = state[self.space.budget]
        for slot in self.choosers:
            key = (state[slot], budget)
            found = self._choices.get(key)
            if found is None:
                found = self._choices[key] = tuple(self.of_engine(state, slot))
            moves += found
        return moves

    def of_engine(self, state: State, slot: int) -> Iterator[Move]:
        """Yield the moves that one engine's body allows next, uncached."""
        left, cluster = self.space.left(state), self.cluster
        body: LayeredPrefillRole | StagedDecodeRole = self.space.bodies[state[slot]]
        prefills = isinstance(body, LayeredPrefillRole)
        names = cluster.xids if prefills else cluster.requests
        for verb, handle in body.choices():
            budget = BUDGETED.get(verb)
            if verb == "room":
                yield (verb, cluster.number[handle])
            elif verb == "copied":
                yield (verb, int(prefills), names.index(handle))
            elif (budget is None or left[budget]) and (verb != "end" or self.space.scope.decodes):
                yield (verb, names.index(handle))

    # P's engine.

    def is_computed_on(self, draft: Draft, product: int) -> bool:
        """True if P's engine has computed a part of a prompt and still has to compute the rest."""
        return self.layered and self._phase(draft, product) == BEGUN

    def _phase(self, draft: Draft, i: int) -> int:
        role = self.space.body(draft, self.cluster.roles[self.cluster.p_of[i].engine])
        phase: int = role.seqs.get(self.cluster.xids[i], (0, None))[0]
        return phase

    def begin(self, draft: Draft, move: Move) -> None:
        self._first_piece(draft, move[1])

    def _first_piece(self, draft: Draft, i: int) -> None:
        """Compute the first piece of a prompt: a layer of it, or a chunk."""
        self._chunk(draft, i, self.chunks[0])
        self.plain.at_p(draft, i, LayerOutcome(self.cluster.xids[i], self.chunks[0], 0))

    def _chunk(self, draft: Draft, i: int, known: int) -> None:
        self.plain.at_p(draft, i, Chunk(self.cluster.xids[i], self.cluster.sources[i], known))

    def finish(self, draft: Draft, move: Move) -> None:
        """Compute the rest of a prompt, or report that it is computed."""
        if not self.layered:
            self.plain.finish(draft, move)
            return
        i = move[1]
        xid, source = self.cluster.xids[i], self.cluster.sources[i]
        phase = self._phase(draft, i)
        if phase not in (QUEUED, BEGUN):
            self.plain.at_p(draft, i, Reports(xid))
            return
        if self.plan.pipeline_policy.early:
            if phase == QUEUED:
                self._first_piece(draft, i)
            for known in self.chunks[1:]:
                self._chunk(draft, i, known)
                self.plain.at_p(draft, i, LayerOutcome(xid, known, 0))
            for layer in range(1, self.plan.layers):
                self.plain.at_p(draft, i, LayerOutcome(xid, self.chunks[-1], layer))
        if self.space.shadow_of(draft).products[i] == PromptStage.QUEUED:
            self.space.put_shadow(draft, "products", i, PromptStage.COMPUTED)
        self.plain.at_p(draft, i, Computes(xid, source))
        self.plain.report(draft, i, True)

    def abort_prefill(self, draft: Draft, move: Move) -> None:
        """Abort a prefill. The protocol knows of a prompt that has begun, and releases it."""
        i = move[1]
        if self.space.shadow_of(draft).products[i] == PromptStage.QUEUED:
            self.plain.abort_prefill(draft, move)
            return
        self.space.spend(draft, FaultKind.PREFILL_ABORT)
        self.checker.goal("aborted while being computed")
        self.plain.at_p(draft, i, Fails(self.cluster.xids[i]))

    def cancel_prefill(self, draft: Draft, move: Move) -> None:
        """Take the prefill leg back. The lease or the core decides about a prompt that is computed, or has begun."""
        i = move[1]
        product = self.space.shadow_of(draft).products[i]
        if product in (PromptStage.QUEUED, PromptStage.COMPUTED):
            self.plain.cancel_prefill(draft, move)
            return
        self.space.spend(draft, FaultKind.ABORT)
        self.checker.goal("aborted while being computed")
        self.plain.at_p(draft, i, RequestAborted(self.cluster.xids[i]))

    def withdraw(self, draft: Draft, move: Move) -> None:
        """Withdraw a prompt: P's memory needs its room for something outside this world."""
        self.space.spend(draft, FaultKind.WITHDRAW)
        self.plain.at_p(draft, move[1], PromptWithdrawn(self.cluster.xids[move[1]]))

    # D's engine.

    def room(self, draft: Draft, move: Move) -> None:
        """Give the request that is next at D room to land in."""
        self.turns.event(draft, self.cluster.roles[self.cluster.engines[move[1]]], RoomDue())

    def load(self, draft: Draft, move: Move) -> None:
        """Admit a request that has landed: D's engine has blocks for it, into which it is copied."""
        i = move[1]
        self.plain.at_d(draft, i, Admits(self.cluster.requests[i], Allocation(BLOCKS + i, ()), 0))

    def report_admitted(self, draft: Draft, move: Move) -> None:
        if not self.staged_at_d:
            self.plain.report_admitted(draft, move)
            return
        self.plain.at_d(draft, move[1], Reports(self.cluster.requests[move[1]]))

    def copied(self, draft: Draft, move: Move) -> None:
        """End a copy between blocks and staging memory."""
        _, at_p, i = move
        if at_p:
            self.plain.at_p(draft, i, Copied(self.cluster.xids[i]))
        else:
            self.plain.at_d(draft, i, Copied(self.cluster.requests[i]))

    # What P's ranks say of a prompt that is being computed.

    def takes_its_time(self, node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
        """Check the cells of P's ranks whose prompt is still being computed: no lease on it runs, unless no request
        needs it; and no progress is reported to D, which gives up requests that then make none. Raises Broken."""
        for cell in after.cells.values() if isinstance(after, ProducerRank) else ():
            if cell.source is not None and not cell.source.complete:
                self._takes_its_time(cell, effects)

    def _takes_its_time(self, cell: ProducerCell, effects: tuple[Any, ...]) -> None:
        if self.cluster.timers.release_lease_ns < cell.lease_until < NEVER:
            raise Broken("L1", f"a lease on {cell.xid} runs while it is computed")
        for effect in effects:
            message = effect.message if isinstance(effect, Send) else None
            if isinstance(message, RegisterAck) and message.reg == cell.reg and message.progress >= Progress.READY:
                raise Broken("L1", f"{message.reg.request_id} is reported {message.progress.name} while it is computed")
