"""docs/mutants.md: the result of every mutant. Seconds are left out, so that every computer writes the same page."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from pdflow_sim.check.mutants.catalogue import GROUPS, MUTANTS
from pdflow_sim.check.mutants.hunt import hunt
from pdflow_sim.check.mutants.mutant import Mutant
from pdflow_sim.check.scopes.scope import ENDLESS, Scope

HEAD = """\
# Mutants

A mutant is the protocol without one rule. A patch in `sim/pdflow_sim/check/mutants` removes the rule; no other code
knows of it. The checker must then find a broken invariant. With all rules in place, the same search of the same scope
finds none. The search is breadth first, so every counterexample is a shortest one. `pdflow check mutants` searches for
all mutants again. `python docs/generate.py` writes this page, and a test compares it with a new search.

*Caught by* names the invariant that the mutant breaks ([invariants](invariants.md)):

- S1: a writer reaches only blocks that its request holds. S2: a source keeps its blocks until every READ or WRITE of it
  has ended. S3: D commits only complete KV. S4: D commits only its own prompt's KV. S6: a request has one outcome. S7:
  P reports as sent only what has landed. S8: a frame of a former incarnation changes nothing. S9: state is bounded.
- S10: a driver would not fire an armed timer in time. S11: a count or an index of an endpoint is not what its cells
  say.
- L: after the last fault something never ends, although D repeats SYNCs and CANCELs. Where the scope says "fair runs",
  one schedule from each state does end, and only the check of fair runs ([check](check.md#fair-runs)) notices it.
- L1, L2 and L3, in scopes with "no clocks": something ends only by a timer. There, nothing takes as long as any timer,
  so no timer may be needed. In other scopes, L1 means that a request waits for a P that has refused D, or that a lease
  or a stall timer runs while P computes the prompt.
- L6: a peer that fails delays the requests of another peer. L8: at rest something is left.
- L9: after repairable faults, a request fails, or only a timer ends it. Where the scope says "L9", this is judged when
  nothing else is found. L10: a request ends because of a restart that it did not meet. L11: a request that waits is
  overtaken. L12: something is repeated later than its longest period allows.
- crash: an endpoint raises an exception.

*Scope* lists what differs from the smallest scope. In a scope with clocks, a timer fires when it is due, and ticks
count as steps. In a scope with "no clocks", no timer fires. In all other scopes, an armed timer may fire at any moment.

*Source* names a mutant of the [first list of mutants](spec.md#74-mutants-that-must-be-caught-m1-to-m18) (M1 to M18), or
sections, rules and races of the [spec](spec.md).
"""

SURVIVORS = """\
## Mutants that survive

No invariant notices these mutants in these scopes. Either another rule covers for the rule that is dropped, or the loss
needs something that the scopes do not model. The checker searches for them all the same: a test fails on the day that
one of them is caught.

Three of the C-rules have no mutant. Tests of other packages cover them: C8 (no input stops a loop) is a rule of the
parsers, C11 (handle inputs before deadlines) of the drivers, and C12 (unequal blocks) of the layout.

| mutant | rule that is dropped | source | scope | why it survives |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Hunt every mutant, and return the page; takes some seconds. Raises CannotMutate where pdflow is compiled."""
    sections = [HEAD]
    for title, mutants in GROUPS.items():
        rows = [row(mutant) for mutant in mutants if mutant.breaks]
        sections.append(f"## {title}\n\n{TABLE}{''.join(rows)}")
    survivors = "".join(
        f"| {m.name} | {m.drops} | {m.source} | {described(m.scope)} | {m.survives} |\n"
        for m in MUTANTS.values()
        if not m.breaks
    )
    return "\n".join([*sections, SURVIVORS + survivors])


TABLE = (
    "| mutant | rule that is dropped, and what goes wrong | source | scope | caught by | states | steps |\n"
    "| --- | --- | --- | --- | --- | ---: | ---: |\n"
)


def row(mutant: Mutant) -> str:
    kill = hunt(mutant, lambda: 0.0)
    caught = kill.invariant or "nothing"
    fair = "; L9" if mutant.needless else "" if mutant.repeats is None else "; fair runs"
    return (
        f"| {mutant.name} | {mutant.drops} | {mutant.source} | {described(mutant.scope)}{fair} "
        f"| {caught} | {kill.states:,} | {kill.steps} |\n"
    )


def described(scope: Scope) -> str:
    """Return the fields in which a scope differs from the smallest one, such as "drop=1 dup=1"."""
    return " ".join(_differences(scope)) or "the smallest"


def _differences(scope: Scope) -> Iterator[str]:
    smallest = Scope()
    if scope.dialect is not smallest.dialect:
        yield scope.dialect.name
    for field in attrs.fields(Scope):
        value = getattr(scope, field.name)
        if field.name != "dialect" and value != getattr(smallest, field.name):
            if field.name == "horizon":
                yield "clocks" if value == ENDLESS else f"clocks for {value} ticks"
            elif value is True:
                yield field.name
            elif value is False:
                yield f"no {field.name}"
            else:
                yield f"{field.name}={value}"
