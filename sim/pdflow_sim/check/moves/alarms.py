"""Timers of a world without clocks: which of them may fire, and how often."""

from __future__ import annotations

from collections.abc import Iterator

from pdflow.protocol.events import TimerFired
from pdflow.protocol.timers import Timer, TimerKind
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.scopes.scope import BUDGETED_TIMERS, FaultKind
from pdflow_sim.check.state.shadow_state import PromptStage
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner


class Alarms:
    """The moves of timers. `by_clocks`: whether they fire only as clocks that agree allow (vllm-compat)."""

    def __init__(self, space: StateSpace, turns: TurnRunner) -> None:
        self.space = space
        self.turns = turns
        scope = space.scope
        self.clocks = scope.clocks
        self.by_clocks = not (scope.dialect.control_frames or scope.horizon)
        self._fired: dict[tuple[int, int, int], tuple[FaultKind | None, int]] = {}
        self._moves: dict[tuple[int, int, int], tuple[Move, ...]] = {}

    def acts(self) -> Acts:
        return {"timer": self.fire}

    def moves(self, state: State) -> list[Move]:
        moves: list[Move] = []
        armed, known, budget = self.space.armed, self._moves, state[self.space.budget]
        for node, end in enumerate(state[: self.space.first_link]):
            if armed[end]:
                key = (node, end, budget)
                timers = known.get(key)
                if timers is None:
                    timers = known[key] = tuple(self.armed_at(node, end, budget))
                moves += [move for move in timers if self.fair(state, move)] if self.by_clocks else timers
        return moves

    def armed_at(self, node: int, end: int, budget: int) -> Iterator[Move]:
        """Yield the timers of one endpoint that this budget still lets fire."""
        left = self.space.budgets.values[budget]
        for i, timer in enumerate(self.space.armed[end] if self.clocks else ()):
            fault = BUDGETED_TIMERS.get(timer.kind)
            if fault is None or left[fault]:
                yield ("timer", node, i)

    def fair(self, state: State, move: Move) -> bool:
        """True if a timer may fire when clocks agree, which vllm-compat relies on (spec 6.2) and strict never does.

        D frees a quarantine once a correctly running P cannot write any more; a D that is not silent keeps P's lease.
        """
        return fires_by_clocks(self.space, state, self.space.armed[state[move[1]]][move[2]])

    def fire(self, draft: Draft, move: Move) -> None:
        _, node, i = move
        key = (node, draft[node], i)
        found = self._fired.get(key)
        if found is None:
            timer = self.space.armed[draft[node]][i]
            event = self.turns.events.of((node, TimerFired(timer)))
            found = self._fired[key] = (BUDGETED_TIMERS.get(timer.kind), event)
        fault, event = found
        if fault is not None:
            self.space.spend(draft, fault)
        self.turns.turn(draft, node, event)


def fires_by_clocks(space: StateSpace, state: State, timer: Timer) -> bool:
    """True if this timer may fire when clocks agree (vllm-compat)."""
    cluster, shadow = space.cluster, space.shadow_of(state)
    if timer.kind is TimerKind.RECLAIM:
        under_way = any(state[space.first_link : space.bag]) or space.bags.values[state[space.bag]]
        held = any(product in (PromptStage.QUEUED, PromptStage.HELD) for product in shadow.products)
        orphans = any(getattr(space.body(state, node), "cells", None) for node in cluster.orphans)
        return not under_way and not held and not orphans and not space.ops_of(state)
    if timer.kind is not TimerKind.LEASE or not space.scope.pulls:
        return True
    # A pull is wanted while its decode leg is being dispatched, too.
    dispatching = any(state[space.first_link + cluster.first_http : space.bag])
    needed = dispatching or any(stage not in space.over for stage in shadow.stages)
    return not needed and not space.ops_of(state)
