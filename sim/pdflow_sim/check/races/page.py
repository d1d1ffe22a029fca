"""Section 8 of docs/spec.md: every race, its outcome in each dialect, and the scope or tests that show it."""

from __future__ import annotations

from collections.abc import Iterator

from pdflow_sim.check.races.catalogue import GROUPS
from pdflow_sim.check.races.race import SEARCHED, CoveredBy, Race, Unmodelled
from pdflow_sim.check.races.verdict import RaceOutcome, RaceRow, rows

SECTION = 8
"""The number of the section, whose parts are the groups of races."""

TABLE = """\
| race | what happens | source | vllm-stock | vllm-compat | strict |
| --- | --- | --- | --- | --- | --- |
"""


def races_part() -> str:
    """Search every race, and return one part of the section for each group of races; takes half a minute."""
    found = {row.race.number: row for row in rows()}
    groups = []
    for number, (title, races) in enumerate(GROUPS.items(), start=1):
        lines = "".join(line(found[race.number]) for race in races)
        notes = "".join(f"- {note}\n" for race in races for note in shown_by(found[race.number]))
        groups.append(f"### {SECTION}.{number} {title}\n\n{TABLE}{lines}\n{notes}")
    return "\n".join(groups)


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
        why = f"in the world {race.own_world} of `sim/pdflow_sim/check/races/owners.py`"
    return f"scope {found.where}{'; ' + why if why else ''}"
