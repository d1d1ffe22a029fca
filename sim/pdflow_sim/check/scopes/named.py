"""A named scope: a scope, and the goals that its search must reach for the result to count."""

from __future__ import annotations

import attrs

from pdflow_sim.check.scopes.scope import Scope

DELIVERED = frozenset({"delivered"})
ENDS = DELIVERED | {"expired"}
EVERY_END = ENDS | {"cancelled before the WRITE", "cancelled in flight", "released after use"}


def resolved(*codes: str) -> frozenset[str]:
    return frozenset(f"resolved {code}" for code in codes)


@attrs.frozen
class Named:
    """A scope with a name and goals. `states` and `transitions` are what a complete search of it finds; 0 where there
    are too many to assert in every run. The search stops, incomplete, at `max_states`, if that is not 0; only
    where `truncated` is true may that happen. `endless`: its fair runs, in which numbers of SYNCs drift apart between
    pairs of ranks, lead to states without end, and are not followed."""

    name: str
    scope: Scope
    goals: frozenset[str]
    states: int = 0
    transitions: int = 0
    nightly: bool = False
    max_states: int = 0
    truncated: bool = False
    endless: bool = False
