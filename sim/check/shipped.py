"""The world of a transfer method: its pieces go by lanes, and its engines say themselves what they may do next, where a
prompt is sent before all of it is computed, or goes by way of memory beside the blocks.

What an engine does with a prompt or a request is the cores', as everywhere (roles.py, layered_role.py, staged_role.py).
Here are the moves that those engines have besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pdflow.protocol.effects import Send
from pdflow.protocol.messages import Progress, RegisterAck
from pdflow.protocol.producer import ProducerCell
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.values import NEVER, Allocation
from pdflow.serving.events import PromptWithdrawn, RequestAborted, RoomDue
from sim.check.cluster import role_of
from sim.check.ghost import Broken, Product
from sim.check.layered_role import Chunk, Layer, LayeredPrefillRole
from sim.check.parcels import Parcels, chunks_of
from sim.check.plan import Copied
from sim.check.relation import Move
from sim.check.roles import BEGUN, QUEUED, Admits, Computes, Fails, Reports
from sim.check.scope import Fault, Scope
from sim.check.staged_role import BLOCKS, StagedDecodeRole
from sim.check.world import Draft, State

OF_LAYERED = frozenset({"finish", "abort prefill", "cancel prefill"})
OF_STAGED = frozenset({"admit", "report", "end", "preempt"})
"""Moves that any other engine has, by the ghosts."""
BUDGETED = {"abort prefill": Fault.PREFILL_ABORT, "cancel prefill": Fault.ABORT, "preempt": Fault.PREEMPT}


class Shipped(Parcels):
    """A Relation by a method."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        cluster, plan = self.cluster, self.plan
        self.layered, self.staged_at_d = plan.layered, plan.method.staged_at_d
        self.parts = chunks_of(plan.method)
        self.not_here = (OF_LAYERED if self.layered else frozenset()) | (OF_STAGED if self.staged_at_d else frozenset())
        chooses = {"P": self.layered, "D": self.staged_at_d}
        self.choosers = [cluster.at[node] for engine, node in cluster.roles.items() if chooses[role_of(engine)]]
        self._choices: dict[tuple[int, int], tuple[Move, ...]] = {}
        more: dict[str, Callable[..., None]] = {
            "begin": self.begin,
            "withdraw": self.withdraw,
            "room": self.room,
            "load": self.load,
            "copied": self.copied,
        }
        self.do |= {verb: self._then_tidy(act) for verb, act in more.items()}

    # What may happen.

    def moves(self, state: State) -> list[Move]:
        moves = super().moves(state)
        budget = state[self.budget]
        for slot in self.choosers:
            key = (state[slot], budget)
            found = self._choices.get(key)
            if found is None:
                found = self._choices[key] = tuple(self._of_engine(state, slot))
            moves += found
        return moves

    def _of_tail(self, state: State) -> Iterator[Move]:
        for move in super()._of_tail(state):
            if move[0] not in self.not_here:
                yield move
        if self.left(state)[Fault.WITHDRAW]:
            for i, product in enumerate(self.ghost_of(state).products):
                if product == Product.HELD:
                    yield ("withdraw", i)

    def _of_engine(self, state: State, slot: int) -> Iterator[Move]:
        left, cluster = self.left(state), self.cluster
        body: LayeredPrefillRole | StagedDecodeRole = self.bodies[state[slot]]
        prefills = isinstance(body, LayeredPrefillRole)
        names = cluster.xids if prefills else cluster.requests
        for verb, handle in body.choices():
            budget = BUDGETED.get(verb)
            if verb == "room":
                yield (verb, cluster.number[handle])
            elif verb == "copied":
                yield (verb, int(prefills), names.index(handle))
            elif (budget is None or left[budget]) and (verb != "end" or self.scope.decodes):
                yield (verb, names.index(handle))

    # P's engine.

    def is_computed_on(self, draft: Draft, product: int) -> bool:
        return self.layered and self._phase(draft, product) == BEGUN

    def _phase(self, draft: Draft, i: int) -> int:
        role = self.body(draft, self.cluster.roles[self.cluster.p_of[i].engine])
        phase: int = role.seqs.get(self.cluster.xids[i], (0, None))[0]
        return phase

    def begin(self, draft: Draft, i: int) -> None:
        """A first part of a prompt is computed: a layer of it, or a chunk."""
        self._chunk(draft, i, self.parts[0])
        self.at_p(draft, i, Layer(self.cluster.xids[i], self.parts[0], 0))

    def _chunk(self, draft: Draft, i: int, known: int) -> None:
        self.at_p(draft, i, Chunk(self.cluster.xids[i], self.cluster.sources[i], known))

    def finish(self, draft: Draft, i: int) -> None:
        """All of a prompt is computed, or said to be."""
        xid, source = self.cluster.xids[i], self.cluster.sources[i]
        if not self.layered:
            super().finish(draft, i)
            return
        phase = self._phase(draft, i)
        if phase not in (QUEUED, BEGUN):
            self.at_p(draft, i, Reports(xid))
            return
        if self.plan.conduct.early:
            if phase == QUEUED:
                self.begin(draft, i)
            for known in self.parts[1:]:
                self._chunk(draft, i, known)
                self.at_p(draft, i, Layer(xid, known, 0))
            for layer in range(1, self.plan.layers):
                self.at_p(draft, i, Layer(xid, self.parts[-1], layer))
        if self.ghost_of(draft).products[i] == Product.QUEUED:
            self.put_ghost(draft, "products", i, Product.COMPUTED)
        self.at_p(draft, i, Computes(xid, source))
        self.report(draft, i, True)

    def abort_prefill(self, draft: Draft, i: int) -> None:
        """Of one that has begun the protocol knows, and releases it."""
        if self.ghost_of(draft).products[i] == Product.QUEUED:
            super().abort_prefill(draft, i)
            return
        self.spend(draft, Fault.PREFILL_ABORT)
        self.judge.goal("given up while being computed")
        self.at_p(draft, i, Fails(self.cluster.xids[i]))

    def cancel_prefill(self, draft: Draft, i: int) -> None:
        """The prefill leg is taken back. Of what has been computed, or has begun, the lease decides, or the core."""
        product = self.ghost_of(draft).products[i]
        if product in (Product.QUEUED, Product.COMPUTED):
            super().cancel_prefill(draft, i)
            return
        self.spend(draft, Fault.ABORT)
        self.judge.goal("given up while being computed")
        self.at_p(draft, i, RequestAborted(self.cluster.xids[i]))

    def withdraw(self, draft: Draft, i: int) -> None:
        """P's memory wants this prompt's room for what is not in this world."""
        self.spend(draft, Fault.WITHDRAW)
        self.at_p(draft, i, PromptWithdrawn(self.cluster.xids[i]))

    # D's engine.

    def room(self, draft: Draft, engine: int) -> None:
        """Whoever is next has room to land in."""
        self.event(draft, self.cluster.roles[self.cluster.engines[engine]], RoomDue())

    def load(self, draft: Draft, i: int) -> None:
        """D's engine has blocks for what has landed, and it is copied into them."""
        self.at_d(draft, i, Admits(self.cluster.requests[i], Allocation(BLOCKS + i, ()), 0))

    def tell_admitted(self, draft: Draft, i: int) -> None:
        if not self.staged_at_d:
            super().tell_admitted(draft, i)
            return
        self.at_d(draft, i, Reports(self.cluster.requests[i]))

    def copied(self, draft: Draft, at_p: int, i: int) -> None:
        """A copy between blocks and what lies beside them has ended."""
        if at_p:
            self.at_p(draft, i, Copied(self.cluster.xids[i]))
        else:
            self.at_d(draft, i, Copied(self.cluster.requests[i]))

    # What P's ranks say of a prompt that is being computed.

    def _step(self, end: int, event: int) -> tuple[int, tuple[Any, ...]]:
        known = (end, event) in self.steps
        after, effects = super()._step(end, event)
        body = self.bodies[after]
        if not known and isinstance(body, ProducerRank):
            for cell in body.cells.values():
                if cell.source is not None and not cell.source.complete:
                    self._take_their_time(cell, effects)
        return after, effects

    def _take_their_time(self, cell: ProducerCell, effects: tuple[Any, ...]) -> None:
        """It is kept for as long as it takes, unless nobody wants it; and D is not told that anything goes on, since it
        gives up what then makes no progress."""
        if self.cluster.timers.release_lease_ns < cell.lease_until < NEVER:
            raise Broken("L1", f"a lease on {cell.xid} runs while it is computed")
        for effect in effects:
            said = effect.message if isinstance(effect, Send) else None
            if isinstance(said, RegisterAck) and said.reg == cell.reg and said.progress >= Progress.READY:
                raise Broken("L1", f"{said.reg.request_id} is said to be {said.progress.name} while it is computed")
