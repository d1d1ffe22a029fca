"""Pairs of faults: the generated scopes, the selection of CI, and the table of what is covered."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.named import DELIVERED, Named
from pdflow_sim.check.scopes.pair_cells import FAULTS, SETTINGS, SHAPES, PairCell, PairSetting, cells, cells_of
from pdflow_sim.check.scopes.pair_coverage import OPEN, covered, pair_lines, pair_rows
from pdflow_sim.check.scopes.pairs import IN_CI, LETTERS, NEVER, NIGHTLY, PAIRS, TRUNCATED, UNTOLERATED, WITHOUT_SCOPE
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import explore
from pdflow_sim.check.state.space import EVERY_FAULT
from pdflow_sim.check.suites import scopes as scopes_suite

PUSH, PULL = PairSetting(STRICT, False), PairSetting(STRICT, True)
COMPAT_PULL = PairSetting(VLLM_COMPAT, True)
DROP_DUP = PairCell(PUSH, "two requests", "drop", "dup")
COUNTS = {
    PairCell(PUSH, "1x2 ranks", "drop", "dup"): (29617, 137782),
    PairCell(PUSH, "2x1 ranks", "drop", "err"): (22327, 92828),
    PairCell(PULL, "2x2 ranks", "dup", "delay"): (1584, 4047),
    PairCell(PULL, "two requests", "orphan", "d_restart"): (20458, 60170),
    PairCell(PairSetting(VLLM_COMPAT, False), "two requests", "lose", "err"): (7042, 22976),
    PairCell(COMPAT_PULL, "1x2 ranks", "drop", "sync"): (457, 1499),
}


def test_every_pair_is_in_every_setting_and_shape() -> None:
    assert len(FAULTS) == 13
    assert len(LETTERS) == 90 * len(SETTINGS) * len(SHAPES)
    assert {str(cell) for cell in LETTERS} == {named.name for named in PAIRS} | {str(cell) for cell in WITHOUT_SCOPE}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_scope_covers_its_own_pair_and_needs_no_other_budget(setting: PairSetting) -> None:
    for cell in cells():
        if cell.setting == setting:
            found = set(cells_of(cell.scope))
            assert cell in found
            own = {"abort"} if "cancel" in (cell.first, cell.second) else set()
            own |= {"p_restart"} if "orphan" in (cell.first, cell.second) else set()
            assert {fault for other in found for fault in (other.first, other.second)} <= {
                cell.first,
                cell.second,
            } | own


def test_ci_covers_each_pair_and_each_fault_in_each_shape() -> None:
    """Of a strict push, every second pair at least: the others have too many states."""
    best = covered(SCOPES, {})
    in_ci = [cell for cell in best if best[cell][0] == IN_CI]
    by_pair = {(cell.setting, cell.first, cell.second) for cell in in_ci}
    by_shape = {(cell.setting, cell.shape, fault) for cell in in_ci for fault in faults(cell)}
    possible = [cell for cell in LETTERS if cell not in WITHOUT_SCOPE]
    left = {(cell.setting, *faults(cell)) for cell in possible} - by_pair
    assert {setting for setting, *_ in left} <= {PUSH}
    assert 2 * len(left) <= len({faults(cell) for cell in possible if cell.setting == PUSH})
    for cell in possible:
        if cell.setting != PUSH:
            assert all((cell.setting, cell.shape, fault) in by_shape for fault in faults(cell)), cell
        assert best[cell][0] in (LETTERS[cell], IN_CI, NIGHTLY)


def faults(cell: PairCell) -> tuple[str, str]:
    return cell.first, cell.second


@pytest.mark.slow
@pytest.mark.parametrize("cell", COUNTS, ids=str)
def test_the_states_of_a_few_are_counted(cell: PairCell) -> None:
    found = explore(relation(cell.scope))
    assert (found.states, found.transitions) == COUNTS[cell]


ABSENT = [(setting, fault) for setting in SETTINGS if setting != PUSH for fault in ("cancel", "stall")]


@pytest.mark.parametrize(("setting", "fault"), ABSENT, ids=str)
def test_only_a_strict_push_repeats_a_cancel_or_stalls(setting: PairSetting, fault: str) -> None:
    """A fault that is never there has no pairs."""
    cell = PairCell(setting, "two requests", fault, fault)
    alone = evolve(cell.scope, abort=0, **{fault: 1})
    assert EVERY_FAULT not in reached(alone)
    assert all(other in WITHOUT_SCOPE for other in LETTERS if other.setting == setting and fault in faults(other))


@pytest.mark.parametrize(
    "cell",
    [
        PairCell(PULL, "1x2 ranks", "abort", "deadline"),
        PairCell(PUSH, "1x2 ranks", "abort", "stall"),
        PairCell(COMPAT_PULL, "1x2 ranks", "drop", "dup"),
        PairCell(COMPAT_PULL, "two requests", "delay", "lose"),
    ],
    ids=str,
)
def test_some_faults_never_occur_together(cell: PairCell) -> None:
    assert LETTERS[cell] == NEVER
    assert EVERY_FAULT not in reached(cell.scope)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", [cell for cell, letter in WITHOUT_SCOPE.items() if letter == NEVER], ids=str)
def test_no_run_has_both_faults(cell: PairCell) -> None:
    assert EVERY_FAULT not in reached(cell.scope)


def test_only_a_compat_pull_does_not_tolerate_a_restart_of_p() -> None:
    found = [cell for cell, letter in WITHOUT_SCOPE.items() if letter == UNTOLERATED]
    assert {cell.setting for cell in found} == {COMPAT_PULL}
    assert all({"p_restart", "orphan"}.intersection(faults(cell)) for cell in found)


def reached(scope: Scope) -> set[str]:
    world = relation(scope)
    assert explore(world).complete
    return set(world.space.checker.seen)


# The table.


def test_a_scope_covers_what_its_budgets_allow() -> None:
    two = Named("by hand", Scope(requests=2, p_tp=2, drop=1, dup=2), frozenset())
    best = covered((two,), {})
    assert best[DROP_DUP] == (IN_CI, "by hand")
    assert PairCell(PUSH, "2x1 ranks", "dup", "dup") in best
    assert PairCell(PUSH, "2x1 ranks", "drop", "drop") not in best
    assert PairCell(PUSH, "2x1 ranks", "drop", "deadline") in best
    timed = evolve(two, scope=evolve(two.scope, horizon=4))
    assert PairCell(PUSH, "2x1 ranks", "drop", "deadline") not in covered((timed,), {})
    assert not covered((evolve(two, scope=Scope(drop=1, dup=1)),), {})


def test_the_best_coverage_counts() -> None:
    scope = DROP_DUP.scope
    truncated = Named("truncated", scope, frozenset(), nightly=True, truncated=True)
    night = Named("night", scope, frozenset(), nightly=True)
    day = Named("day", scope, frozenset())
    assert covered((truncated,), {})[DROP_DUP] == (TRUNCATED, "truncated")
    assert covered((truncated, night, day), {})[DROP_DUP] == (IN_CI, "day")
    assert covered((truncated, night, day), {"day": OPEN})[DROP_DUP] == (NIGHTLY, "night")
    assert DROP_DUP not in covered((day,), {"day": OPEN})


def test_lines_and_rows_agree() -> None:
    best = covered(SCOPES, {})
    rows = pair_rows(best)
    lines = list(pair_lines(best))
    assert max(map(len, lines)) <= 80
    assert len(rows) == len(LETTERS) - len(WITHOUT_SCOPE)
    assert all(row["coverage"] for row in rows)
    row = next(row for row in rows if row["faults"] == ["drop", "dup"] and row["shape"] == "two requests")
    assert (row["direction"], row["dialect"]) == ("push", "strict")
    assert row["coverage"]
    table = "\n".join(lines).partition("push, strict")[2]
    (dup,) = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("dup ")]
    assert dup.split()[1][0] == NIGHTLY


def test_a_search_that_is_cut_is_neither_a_pass_nor_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "pair drop + dup, pull, strict, 1x2 ranks"
    scope = next(named for named in PAIRS if named.name == name).scope
    monkeypatch.setattr(scopes_suite, "SCOPES", (Named(name, scope, DELIVERED, max_states=100),))
    ran = CliRunner().invoke(cli, ["check", "scopes", "--jobs", "1", "--json"])
    assert ran.exit_code == 0
    found = json.loads(ran.stdout)
    assert [row["truncated"] for row in found["scopes"]] == [True]
    (row,) = [row for row in found["pairs"] if row["scope"]]
    assert (row["faults"], row["coverage"]) == (["drop", "dup"], "truncated")
    assert "0 of 1 hold, 1 truncated" in ran.stderr
    assert "pull, strict: 0 C, 0 N, 1 n" in ran.stderr


def test_goals_count_where_a_search_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = PairCell(PULL, "1x2 ranks", "drop", "dup").scope
    monkeypatch.setattr(scopes_suite, "SCOPES", (Named("truncated", scope, frozenset({"never"}), max_states=100),))
    ran = CliRunner().invoke(cli, ["check", "scopes", "--jobs", "1"])
    assert ran.exit_code == 1
    assert "goals not reached: never" in " ".join(ran.stdout.split())
