"""Pairs of faults: which kinds of faults are paired, in which clusters, and the scope of each pair in each cluster.

A scope of a pair has a budget of 1 for both faults (2 for a fault with itself), and no other budget, so that it stays
small. Repeated CANCELs need a CANCEL: a scope with them has one abort too, unless its other fault ends a request.
Surviving rank processes are those of P's first crash; with them, a restart of P is its second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

import attrs

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT, Dialect
from pdflow_sim.check.scopes.scope import Scope

FAULTS = (
    "drop",
    "dup",
    "delay",
    "lose",
    "err",
    "abort",
    "cancel",
    "deadline",
    "stall",
    "sync",
    "p_restart",
    "orphan",
    "d_restart",
)
"""The paired kinds of faults: fields of Scope."""
TIMERS = frozenset({"cancel", "deadline", "stall", "sync"})
"""Those whose budgets count only in scopes in which timers fire at any moment."""
ENDS_A_REQUEST = frozenset({"abort", "deadline", "stall"})
"""Those after which D sends a CANCEL."""
SHAPES: dict[str, dict[str, Any]] = {
    "two requests": {"requests": 2},
    "1x2 ranks": {"d_tp": 2},
    "2x1 ranks": {"p_tp": 2},
    "2x2 ranks": {"p_tp": 2, "d_tp": 2},
}
"""The clusters of a pair; ranks of P x ranks of D, one of each where nothing is said, and so with requests."""


@attrs.frozen
class PairSetting:
    """A dialect, and whether D pulls."""

    dialect: Dialect
    pulls: bool

    def __str__(self) -> str:
        return f"{'pull' if self.pulls else 'push'}, {self.dialect.name}"


SETTINGS = tuple(PairSetting(dialect, pulls) for dialect in (STRICT, VLLM_COMPAT) for pulls in (False, True))


@attrs.frozen
class PairCell:
    """Two kinds of faults, in the order of FAULTS, in one setting and shape."""

    setting: PairSetting
    shape: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"pair {self.first} + {self.second}, {self.setting}, {self.shape}"

    @property
    def scope(self) -> Scope:
        """The scope of this pair. The decode leg may arrive before the prefill has finished in vllm-compat only: in
        strict a push would have too many states, and a pull has the same."""
        return Scope(
            dialect=self.setting.dialect,
            pulls=self.setting.pulls,
            concurrent=not self.setting.dialect.control_frames,
            **SHAPES[self.shape],
            **_budgets(self.first, self.second),
        )


def cells() -> Iterator[PairCell]:
    """Yield each pair in each setting and shape."""
    for setting in SETTINGS:
        for shape in SHAPES:
            for first, second in _pairs():
                yield PairCell(setting, shape, first, second)


def cells_of(scope: Scope) -> Iterator[PairCell]:
    """Yield each pair of faults that may occur in one run of this scope, in its setting and shapes."""
    if scope.method:
        return
    setting = PairSetting(scope.dialect, scope.pulls)
    budgets = {fault: _budget(fault, scope) for fault in FAULTS}
    for shape in _shapes(scope):
        for first, second in _pairs():
            once = (first, second) == ("p_restart", "orphan") or first == second
            if budgets[first] > once and budgets[second]:
                yield PairCell(setting, shape, first, second)


def _pairs() -> Iterator[tuple[str, str]]:
    for first, second in combinations_with_replacement(FAULTS, 2):
        if (first, second) != ("orphan", "orphan"):
            yield first, second


def _shapes(scope: Scope) -> Iterator[str]:
    """Yield the shapes of a scope's cluster. More requests or ranks than two count as two."""
    if scope.requests > 1:
        yield "two requests"
    if max(scope.p_tp, scope.d_tp) > 1:
        yield f"{min(scope.p_tp, 2)}x{min(scope.d_tp, 2)} ranks"


def _budgets(first: str, second: str) -> dict[str, Any]:
    found: dict[str, Any] = {"abort": 0, "deadline": 0, "stall": 0}
    for fault in (first, second):
        if fault == "orphan":
            found["orphan"] = True
        counted = "p_restart" if fault == "orphan" else fault
        found[counted] = found.get(counted, 0) + 1
    if "cancel" in (first, second) and not ENDS_A_REQUEST.intersection((first, second)):
        found["abort"] = 1
    return found


def _budget(fault: str, scope: Scope) -> int:
    """Return how often a fault may occur in a run of this scope."""
    if fault in TIMERS and (scope.horizon or not scope.clocks):
        return 0
    if fault == "orphan":
        return int(scope.orphan and scope.p_restart > 0)
    return int(getattr(scope, fault))
