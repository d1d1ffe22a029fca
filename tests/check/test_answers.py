"""What the command has answered stands for a search where it says that all was as it must be, and only there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from attrs import evolve
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import hunt
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.races.verdict import look
from pdflow_sim.check.scopes.catalogue import SCOPES
from tests.check import answers
from tests.check.answers import explored, hunted, looked, no_clock

SCOPE = next(named for named in SCOPES if named.name == "pull in two pieces")
NAMES = "no-tombstone", "tombstone-silent"
RACE = RACES["R24"]
SUITES = {"scopes": SCOPE.name, "mutants": "tombstone", "races": RACE.number}
SetAnswers: TypeAlias = Callable[[str], None]


@pytest.fixture
def set_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SetAnswers]:
    """Give the tests this for what the command said."""
    file = tmp_path / "said.json"
    monkeypatch.setenv("PDFLOW_CHECKED", str(file))

    def write_answers(text: str) -> None:
        file.write_text(text)
        for remembering in (answers.hunted, answers.looked, answers._rows):
            remembering.cache_clear()

    write_answers("")
    yield write_answers
    write_answers("")


@pytest.fixture(scope="module")
def output() -> str:
    rows: dict[str, Any] = {}
    for suite, only in SUITES.items():
        rows |= json.loads(CliRunner().invoke(cli, ["check", suite, "--only", only, "--json"]).stdout)
    return json.dumps(rows)


def all_three() -> list[Any]:
    return [explored(SCOPE), *map(hunted, NAMES), *(looked(RACE.number, dialect) for dialect in RACE.shown)]


def test_an_answer_is_what_a_search_finds(set_answers: SetAnswers, output: str) -> None:
    kills = [evolve(hunt(MUTANTS[name], no_clock), what="") for name in NAMES]
    searched = [explored(SCOPE), *kills, *(look(RACE, dialect) for dialect in RACE.shown)]
    set_answers(output)
    assert all_three() == searched


def test_it_is_read_and_not_searched_for(set_answers: SetAnswers, output: str) -> None:
    set_answers(with_seven_states(output))
    assert [one.states for one in all_three()] == [7] * (1 + len(NAMES) + len(RACE.shown))


def test_what_is_not_as_it_must_be_is_searched_for_again(set_answers: SetAnswers, output: str) -> None:
    searched = all_three()
    wrong = with_seven_states(output)
    for was, now in {
        'missed": []': 'missed": ["expired"]',
        'expected": true': 'expected": 0',
        'ok": true': 'ok": 0',
    }.items():
        assert was in wrong
        wrong = wrong.replace(was, now)
    set_answers(wrong)
    assert all_three() == searched


def with_seven_states(output: str) -> str:
    """Nothing has them."""
    return re.sub(r'"states": \d+', '"states": 7', output)
