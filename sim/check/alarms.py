"""Timers of a world without clocks: which may fire, and how often."""

from __future__ import annotations

from pdflow.protocol.events import TimerFired
from pdflow.protocol.timers import Timer, TimerKind
from sim.check.changes import Changes
from sim.check.ghost import Product
from sim.check.scope import BUDGETED_TIMERS, Fault, Scope
from sim.check.world import Draft, State


class Alarms(Changes):
    """The moves of timers."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.fair = None if scope.dialect.control_frames or scope.horizon else self._fair_by_clocks
        self._fired: dict[tuple[int, int, int], tuple[Fault | None, int]] = {}

    def _fair_by_clocks(self, state: State, node: int, index: int) -> bool:
        """What vllm-compat rests on clocks for (PROTOCOL 7.2): that they agree is assumed here, and nowhere in strict.

        D frees a quarantine once a correctly running P cannot write any more; a D that is not silent keeps P's lease.
        """
        return self.by_clocks(state, self.armed[state[node]][index])

    def by_clocks(self, state: State, timer: Timer) -> bool:
        """Whether this timer may fire, if clocks agree (vllm-compat)."""
        ghost = self.ghost_of(state)
        if timer.kind is TimerKind.RECLAIM:
            under_way = any(state[self.first_link : self.bag]) or self.bags.values[state[self.bag]]
            held = any(product in (Product.QUEUED, Product.HELD) for product in ghost.products)
            orphans = any(getattr(self.body(state, node), "cells", None) for node in self.cluster.orphans)
            return not under_way and not held and not orphans and not self.ops_of(state)
        wanted = any(stage not in self.over for stage in ghost.stages)
        return timer.kind is not TimerKind.LEASE or not self.scope.pulls or not (wanted or self.ops_of(state))

    def timer(self, draft: Draft, node: int, i: int) -> None:
        key = (node, draft[node], i)
        found = self._fired.get(key)
        if found is None:
            timer = self.armed[draft[node]][i]
            found = self._fired[key] = (BUDGETED_TIMERS.get(timer.kind), self.events.of((node, TimerFired(timer))))
        fault, event = found
        if fault is not None:
            self.spend(draft, fault)
        self.turn(draft, node, event)
