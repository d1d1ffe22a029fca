"""docs/races.md: every race, its outcome in each dialect, and the scope or tests that show it."""

from __future__ import annotations

from collections.abc import Iterator

from pdflow_sim.check.races.catalogue import GROUPS
from pdflow_sim.check.races.race import SEARCHED, CoveredBy, Race, Unmodelled
from pdflow_sim.check.races.verdict import RaceOutcome, RaceRow, rows

HEAD = """\
# Races

The 52 races of PROTOCOL.md, section 5, by name: what becomes of each in vLLM 0.32.0 as it is (`vllm-stock`), with the
fixes that need no change on the wire (`vllm-compat`), and in `strict`. This page was written by
`python docs/generate.py`, which searched for all of them again, and a test holds it against that.

- *S2 in 7 steps*: the shortest story that goes through the race's dangerous point and breaks that invariant
  (PROTOCOL.md, section 6). L: it never ends, with faults over. L2: where nothing takes as long as any timer, P holds
  what nobody wants as if somebody did.
- *passes, 108 states*: all of that many states were seen, nothing breaks, everything ends, and the dangerous point was
  reached among them. *S1 holds*: the same of that invariant alone, where others break.
- *residual*: cannot be mended on our side alone.
- *test*: told by the test that is named below; it needs something that the explored world does not have.
- *not modelled*: nothing is claimed; why, is said below.

A scope is given by what is not as in the smallest: one request, one rank each, any timer at any moment; with `horizon`
engines have clocks, and ticks count as steps.
"""

TABLE = """\
| race | what happens | source | vllm-stock | vllm-compat | strict |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Search every race, and return the page; takes half a minute."""
    found = {row.race.number: row for row in rows()}
    sections = [HEAD]
    for title, races in GROUPS.items():
        lines = "".join(line(found[race.number]) for race in races)
        notes = "".join(f"- {note}\n" for race in races for note in shown_by(found[race.number]))
        sections.append(f"## {title}\n\n{TABLE}{lines}\n{notes}")
    return "\n".join(sections)


def line(row: RaceRow) -> str:
    race = row.race
    cells = [short(race, dialect, found) for dialect, found in row.found.items()]
    return f"| {race.number} {race.name} | {race.line} | {race.source} | {' | '.join(cells)} |\n"


def short(race: Race, dialect: str, found: RaceOutcome) -> str:
    """Return the text of a cell of the table."""
    shown = race.shown[dialect]
    if isinstance(shown, Unmodelled):
        return "not modelled"
    return "test" if isinstance(shown, CoveredBy) and found.ok else found.summary


def shown_by(row: RaceRow) -> Iterator[str]:
    """Yield the scope or tests that show the race, once for all dialects that share them."""
    by_text: dict[str, list[str]] = {}
    for dialect, found in row.found.items():
        by_text.setdefault(_outcome_text(row.race, dialect, found), []).append(dialect)
    who = {
        summary: "" if len(by_text) == 1 else f" in {' and '.join(dialects)}" for summary, dialects in by_text.items()
    }
    for summary in by_text:
        yield f"{row.race.number}{who[summary]}: {summary}."


def _outcome_text(race: Race, dialect: str, found: RaceOutcome) -> str:
    shown = race.shown[dialect]
    if isinstance(shown, Unmodelled):
        return f"not modelled, {shown.why}"
    if isinstance(shown, CoveredBy):
        tests = ", ".join(f"`{test}`" for test in shown.tests)
        return f"{shown.note}; {tests}" if shown.note else tests
    assert isinstance(shown, SEARCHED)
    why = getattr(shown, "why", "")
    if race.own_world:
        why = f"a world of its own, {race.own_world} of sim/pdflow_sim/check/races"
    return f"scope {found.where}{'; ' + why if why else ''}"
