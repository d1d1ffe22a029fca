"""The outcome of every race, searched again; and the counterexample of any race, for its diagram."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import attrs
import msgspec

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.protocol.dialect import DIALECTS
from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile, Information, Verdict
from pdflow_sim.check.counterexamples.replay import named, record
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.races.look import OutOfTime, SearchOutcome, Stop, through, well_ended, whole
from pdflow_sim.check.races.race import (
    SEARCHED,
    Breaks,
    CoveredBy,
    InvariantHolds,
    Passes,
    Point,
    Race,
    Residual,
    Shown,
    Unmodelled,
)
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.state.shadow_state import Broken


class NoSuchRaceError(PdflowError):
    """There is no race of this name, or none in this dialect that a search can show."""

    exit_code = EXIT_BAD_INPUT


@attrs.frozen(kw_only=True)
class RaceOutcome:
    """The outcome of a race in one dialect."""

    summary: str
    """A summary such as "S2 in 7 steps" or "passes, 108 states"."""
    ok: bool
    """Whether the outcome is the expected one."""
    stopped: bool = False
    """Whether the time ran out first: the outcome is neither ok nor wrong."""
    where: str = ""
    """The scope that was searched, or the tests."""
    invariant: str = ""
    steps: int = 0
    states: int = 0


@attrs.frozen
class RaceRow:
    """The outcomes of one race, by dialect in the table's order."""

    race: Race
    found: dict[str, RaceOutcome]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(found.ok for found in self.found.values())

    @property
    def stopped(self) -> bool:
        return any(found.stopped for found in self.found.values())


def timeless() -> float:
    """A clock that stands still, by which a budget never ends."""
    return 0.0


def run(
    budget_s: float = float("inf"),
    only: Collection[str] = (),
    dialects: Collection[str] = (),
    clock: Callable[[], float] = timeless,
) -> list[RaceRow]:
    """Return every row of the table, or only those of these races and dialects."""
    return list(rows(budget_s, only, dialects, clock))


def rows(
    budget_s: float = float("inf"),
    only: Collection[str] = (),
    dialects: Collection[str] = (),
    clock: Callable[[], float] = timeless,
) -> Iterator[RaceRow]:
    """Yield the rows that `run` returns, each as soon as it is known. When the budget is spent, the remaining outcomes
    are `stopped`."""
    until = clock() + budget_s
    for race in [known(number) for number in only] if only else RACES.values():
        began = clock()
        selected = [name for name in race.shown if not dialects or name in dialects]
        found = {name: look(race, name, lambda: clock() > until) for name in selected}
        yield RaceRow(race, found, clock() - began)


def known(name: str) -> Race:
    """Return a race by its number, in either case, or by its name. Raises NoSuchRaceError."""
    race = RACES.get(name.upper()) or next((race for race in RACES.values() if race.name == name), None)
    if race is None:
        raise NoSuchRaceError(f"{name}: there is no such race; they are R01 to R{len(RACES)}")
    return race


def never() -> bool:
    return False


def look(race: Race, dialect: str, stop: Stop = never) -> RaceOutcome:
    """Return the outcome of a race in this dialect, by the search that it calls for."""
    shown = race.shown[dialect]
    if isinstance(shown, Unmodelled):
        return RaceOutcome(summary=f"not modelled: {shown.why}", ok=True)
    if isinstance(shown, CoveredBy):
        return _tested(shown)
    scope = race.scope_in(DIALECTS[dialect])
    where = described(scope)
    try:
        if isinstance(shown, Passes):
            return _whole(race, scope, stop)
        if stop():
            raise OutOfTime
        if isinstance(shown, InvariantHolds):
            return _holds(race, shown, scope, stop)
        return _breaks(race, shown, scope, stop)
    except OutOfTime:
        return RaceOutcome(summary="stopped", ok=False, stopped=True, where=where)


def _tested(shown: CoveredBy) -> RaceOutcome:
    """Return the outcome of a race that tests show. The tests are not run here."""
    note = f"{shown.note}; " if shown.note else ""
    return RaceOutcome(summary=f"{note}shown by a test", ok=True, where=" ".join(shown.tests))


def _whole(race: Race, scope: Scope, stop: Stop) -> RaceOutcome:
    where = described(scope)
    try:
        coverage, reached = whole(race.world(scope), race.points[0], stop)
    except Broken as broken:
        return RaceOutcome(summary=f"breaks {broken}", ok=False, where=where, invariant=broken.name)
    if not reached:
        return RaceOutcome(
            summary="passes, but does not reach the point", ok=False, where=where, states=coverage.states
        )
    return RaceOutcome(summary=f"passes, {coverage.states:,} states", ok=True, where=where, states=coverage.states)


def _holds(race: Race, shown: InvariantHolds, scope: Scope, stop: Stop) -> RaceOutcome:
    seen = through(race.world(scope), race.points, shown.invariant, stop)
    if seen.counterexample is None:
        summary = f"{shown.invariant} holds, {seen.states:,} states" if seen.reached else "does not reach the point"
        return RaceOutcome(summary=summary, ok=seen.reached, where=described(scope), states=seen.states)
    return _outcome(seen, scope, ok=False)


def _breaks(race: Race, shown: Breaks | Residual, scope: Scope, stop: Stop) -> RaceOutcome:
    seen = through(race.world(scope), _points(race, shown), shown.invariant, stop)
    if seen.counterexample is None:
        return RaceOutcome(
            summary=f"nothing breaks {shown.invariant}", ok=False, where=described(scope), states=seen.states
        )
    found = _outcome(seen, scope, ok=len(seen.counterexample.moves) == shown.steps)
    return attrs.evolve(found, summary=f"residual: {found.summary}") if isinstance(shown, Residual) else found


def _points(race: Race, shown: Shown) -> tuple[Point, ...]:
    """Return the points that a counterexample must pass: none for a residual race, whose path need not be vLLM's."""
    return () if isinstance(shown, Residual) else race.points


def _outcome(seen: SearchOutcome, scope: Scope, ok: bool) -> RaceOutcome:
    assert seen.counterexample is not None
    name, steps = seen.counterexample.broken.name, len(seen.counterexample.moves)
    return RaceOutcome(
        summary=f"{name} in {steps} steps",
        ok=ok,
        where=described(scope),
        invariant=name,
        steps=steps,
        states=seen.states,
    )


def described(scope: Scope) -> str:
    """Return the fields in which a scope differs from the smallest one, as a counterexample file writes them."""
    smallest = Scope()
    terms = []
    for field in attrs.fields(Scope):
        value = getattr(scope, field.name)
        if field.name == "dialect" or value == getattr(smallest, field.name):
            continue
        terms.append(field.name if value is True else f"no {field.name}" if value is False else f"{field.name}={value}")
    return " ".join(terms) or "the smallest"


def counterexample(name: str, dialect: str, stop: Stop = never) -> CounterexampleFile:
    """Return the counterexample of a race in this dialect; or, where nothing breaks, the shortest sequence of moves
    through its dangerous point to a settled state. Raises NoSuchRaceError where no search shows the race."""
    race = known(name)
    if dialect not in race.shown:
        raise NoSuchRaceError(f"{dialect}: there is no such dialect; they are {', '.join(race.shown)}")
    shown = race.shown[dialect]
    if not isinstance(shown, SEARCHED):
        searched = [name for name, other in race.shown.items() if isinstance(other, SEARCHED)]
        others = f"; it is searched in {', '.join(searched)}" if searched else ""
        raise NoSuchRaceError(
            f"{race.number} has no counterexample in {dialect}: {look(race, dialect).summary}{others}"
        )
    world = race.world(race.scope_in(DIALECTS[dialect]))
    information = Information(note=f"{race.number} {race.name}: {race.line}", scheduler="breadth first")
    if isinstance(shown, (Breaks, Residual)):
        found = through(world, _points(race, shown), shown.invariant, stop).counterexample
        if found is None:
            raise NoSuchRaceError(f"{race.number}: the search in {dialect} no longer breaks {shown.invariant}")
        recorded = record(world, named(world, found.moves), information=information)
        # Only live.py judges states without timers; `record` does not.
        broken = Verdict(invariant=found.broken.name, what=found.broken.what)
        return msgspec.structs.replace(recorded, verdict=broken, own_world=race.own_world)
    recorded = record(world, named(world, well_ended(world, race.points[0], stop)), information=information)
    return msgspec.structs.replace(recorded, own_world=race.own_world)
