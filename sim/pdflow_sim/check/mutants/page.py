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

Each line below is the protocol with one rule dropped, by a patch in `sim/pdflow_sim/check/mutants` that nothing else
knows of. A search that finds them is worth something: it went through the same scopes, with the rules in place, and
found nothing. The search is breadth first, so every story is a shortest one. `pdflow check mutants` hunts them again,
and a test holds this page against it; both were written by `python docs/generate.py`.

Invariants are those of PROTOCOL.md, section 6: S1 D's blocks, S2 P's blocks, S3 complete, S4 the right prompt, S6 one
outcome, S7 no false claim, L6 nobody pays for another's trouble. L: with faults over, it never ends, with nothing but
SYNC and repeated CANCELs to help. L1 to L3 stand for scopes with no clocks, where nothing takes as long as any timer:
there nothing may need one; and L1 that no request waits for a P that has refused D. Where a scope says neither, any
armed timer may fire at any moment; with clocks it fires when it is due, and ticks count as steps. *Source* names a
mutant of the list that this began with (M1 to M18), a rule of PROTOCOL.md, and races.
"""

SURVIVORS = """\
## What nothing here can show

A rule whose loss no invariant notices in these worlds: a second line behind another rule, or one that needs what is not
modelled. Each is searched all the same, so that the day on which it is found is noticed. Of the C-rules, C8 (no input
stops a loop) stands in the parsers, C11 (drain, then judge) in whoever drives an endpoint, and C12 (unequal blocks) in
the layout: their rooms test them.

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
        f"| {m.name} | {m.drops} | {source(m)} | {described(m.scope)} | {m.survives} |\n"
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
    return (
        f"| {mutant.name} | {mutant.drops} | {source(mutant)} | {described(mutant.scope)} "
        f"| {caught} | {kill.states:,} | {kill.steps} |\n"
    )


def source(mutant: Mutant) -> str:
    return mutant.source.replace("1.3(f) ", "M")


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
