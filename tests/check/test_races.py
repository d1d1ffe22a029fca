"""Every race, established again: how it breaks in vLLM's dialect, and that its dangerous point is harmless in ours."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from pdflow.protocol.dialect import DIALECTS, STRICT, VLLM_COMPAT, VLLM_STOCK, Dialect
from pdflow_sim.check.counterexamples import names
from pdflow_sim.check.counterexamples.counterexample import CounterexampleError, decode, encode
from pdflow_sim.check.counterexamples.diagram import collect
from pdflow_sim.check.counterexamples.diagram_lines import Style
from pdflow_sim.check.counterexamples.diagram_text import text
from pdflow_sim.check.counterexamples.replay import strict
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.races.catalogue import GROUPS, RACES
from pdflow_sim.check.races.owners import poisoned, read_as_nothing
from pdflow_sim.check.races.page import line, shown_by
from pdflow_sim.check.races.race import (
    SEARCHED,
    Breaks,
    CoveredBy,
    InvariantHolds,
    Passes,
    Point,
    Race,
    Residual,
    Unmodelled,
)
from pdflow_sim.check.races.verdict import NoSuchRaceError, RaceRow, counterexample, known, look, rows, run
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State
from tests.check.answers import looked

CASES = [
    pytest.param(race, dialect, id=f"{race.number}-{dialect}")
    for race in RACES.values()
    for dialect, shown in race.shown.items()
    if not isinstance(shown, Unmodelled)
]
ROOT = Path(__file__).resolve().parents[2]
COVERED = [shown for race in RACES.values() for shown in race.shown.values() if isinstance(shown, CoveredBy)]
BROKEN = [race for race in RACES.values() if isinstance(race.stock, Breaks)]


@pytest.mark.slow
@pytest.mark.parametrize(("race", "dialect"), CASES)
def test_every_race_has_the_outcome_of_the_table(race: Race, dialect: str) -> None:
    found = looked(race.number, dialect)
    assert found.ok, found


def test_the_list_is_whole() -> None:
    assert sorted(RACES) == [f"R{number:02}" for number in range(1, 53)]
    assert sum(len(races) for races in GROUPS.values()) == 52
    assert len({race.name for race in RACES.values()}) == 52


@pytest.mark.parametrize("race", RACES.values(), ids=lambda race: race.number)
def test_strict_and_compat_have_no_race_but_known_residuals(race: Race) -> None:
    assert not isinstance(race.strict, (Breaks, InvariantHolds, Residual))
    assert not isinstance(race.compat, (Breaks, InvariantHolds))
    assert isinstance(race.compat, Residual) == (race.number in ("R12", "R39"))
    for shown in race.shown.values():
        assert not isinstance(shown, SEARCHED) or race.points


@pytest.mark.slow
@pytest.mark.parametrize("race", BROKEN, ids=lambda race: race.number)
def test_a_race_can_be_replayed_and_drawn(race: Race) -> None:
    recorded = counterexample(race.number, VLLM_STOCK.name)
    assert isinstance(race.stock, Breaks)
    assert recorded.verdict is not None
    assert recorded.verdict.invariant == race.stock.invariant
    assert len(recorded.steps) == race.stock.steps
    if recorded.scope.clocks:
        assert strict(recorded.world(), recorded).confirms(recorded)
    drawn = text(collect(recorded), 100)
    assert "D.r0" in drawn
    assert recorded.information.note.startswith(race.number)


def test_a_race_that_is_harmless_is_drawn_to_its_good_end() -> None:
    recorded = counterexample("lease_expires_write_inflight", STRICT.name)
    assert recorded.verdict is None
    assert any(move.startswith("timer LEASE") for move in recorded.moves)
    replayed = strict(relation(recorded.scope), recorded)
    assert replayed.confirms(recorded)
    assert relation(recorded.scope).space.scope.dialect is STRICT


def test_a_race_without_a_counterexample_names_the_dialects_that_have_one() -> None:
    with pytest.raises(NoSuchRaceError, match="shown by a test; it is searched in vllm-stock, strict"):
        counterexample("R04", VLLM_COMPAT.name)
    with pytest.raises(NoSuchRaceError, match="not modelled"):
        counterexample("r03", STRICT.name)
    with pytest.raises(NoSuchRaceError, match="R99: there is no such race; they are R01 to R52"):
        known("R99")
    with pytest.raises(NoSuchRaceError, match="vllm: there is no such dialect; they are vllm-stock"):
        counterexample("R01", "vllm")


@pytest.mark.parametrize("number", ["R34", "R47"])
def test_a_race_of_threads_loses_another_request(number: str) -> None:
    """What the race names itself has ended well: it is the other request that waits for ever."""
    recorded = decode(encode(counterexample(number, VLLM_STOCK.name)))
    assert recorded.verdict is not None
    assert recorded.verdict.what.startswith("without further faults it never ends: u1-d0000001 is ")
    assert "u0" not in recorded.verdict.what
    assert strict(recorded.world(), recorded).confirms(recorded)
    replayed = strict(relation(recorded.scope), recorded)
    assert replayed.mismatch is not None
    assert replayed.mismatch.expected.startswith(("poison", "check", "the state before"))
    lost = [line.text for line in collect(recorded).lines if line.style is Style.LOST]
    assert lost == ["Register u1-d0000001"]


@pytest.mark.parametrize("dialect", [VLLM_COMPAT, STRICT], ids=lambda d: d.name)
def test_poison_takes_nothing_from_ours(dialect: Dialect) -> None:
    """Its bytes go through our decoders, and what waits behind them is still there."""
    world = poisoned(attrs.evolve(RACES["R34"].scope, dialect=dialect))
    state = world.turns.start()
    for name in ("finish x0", "decode u0-d0000000", "abort u0-d0000000", "finish x1", "decode u1-d0000001"):
        state = applied(world, state, name)
    for name in ("admit u1-d0000001", "handshake D.r0 -> P.r0"):
        state = applied(world, state, name)
    after = applied(world, state, "poison x0")
    assert after == world.space.put(state, world.space.budget + 1, 0)
    assert names.find(world, after, "poison x0") is None


def test_poison_that_is_read_as_something_is_a_violation() -> None:
    def raising(_: bytes) -> object:
        raise KeyError("decode_engine_id")

    with pytest.raises(Broken, match=r"S9.*raises KeyError"):
        read_as_nothing(raising, b"")
    with pytest.raises(Broken, match=r"S9.*is read as"):
        read_as_nothing(lambda raw: raw, b"poison")


def applied(world: Transitions, state: State, name: str) -> State:
    move = names.find(world, state, name)
    assert move is not None, name
    return world.apply(state, move)


def test_a_world_that_nobody_has_is_refused() -> None:
    encoded = encode(counterexample("R34", VLLM_STOCK.name)).replace('"Poisoned"', '"Poison"')
    with pytest.raises(CounterexampleError, match=r"own_world.*Poison.*did you mean Poisoned"):
        decode(encoded)


def test_a_budget_that_is_spent_is_no_verdict() -> None:
    ticks = iter(range(1_000_000))
    (row,) = run(0.5, only=["R01"], clock=lambda: float(next(ticks)))
    assert row.stopped
    assert not row.ok
    assert {found.summary for found in row.found.values()} == {"stopped"}


def test_rows_of_some_dialects() -> None:
    (row,) = rows(only=["R02"], dialects=[VLLM_STOCK.name])
    assert row.ok
    assert list(row.found) == [VLLM_STOCK.name]
    assert row.found[VLLM_STOCK.name].steps == 7


def test_what_has_changed_is_noticed() -> None:
    race = RACES["R01"]
    longer = attrs.evolve(race, stock=Breaks("S2", 8))
    assert not look(longer, VLLM_STOCK.name).ok
    another = attrs.evolve(race, stock=Breaks("S4", 7))
    assert look(another, VLLM_STOCK.name).summary == "nothing breaks S4"
    mended = attrs.evolve(race, stock=Passes())
    assert look(mended, VLLM_STOCK.name).summary.startswith("breaks S2")
    untouched = attrs.evolve(race, points=(Point("never", lambda *_: False),))
    assert look(untouched, STRICT.name).summary == "passes, but does not reach the point"
    assert not look(untouched, STRICT.name).ok
    held = attrs.evolve(race, stock=InvariantHolds("S2"))
    assert look(held, VLLM_STOCK.name).summary == "S2 in 7 steps"


@pytest.mark.parametrize("test", sorted({test for shown in COVERED for test in shown.tests}))
def test_tests_that_are_named_are_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_a_line_of_the_page() -> None:
    race = RACES["R01"]
    row = RaceRow(race, {dialect: looked(race.number, dialect) for dialect in DIALECTS}, 0.0)
    assert line(row).startswith("| R01 lease_expires_write_inflight | The lease ends while a WRITE is in flight.")
    assert len(list(shown_by(row))) == 1
