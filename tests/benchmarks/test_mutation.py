"""Bugs can be drawn, moved to a later revision, tried on recorded steps, and found; docs/bugs.md has the score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mutation.page import interval, load_reasons, load_results, score_text, section
from benchmarks.mutation.sample import ROOT, considered, diff, moved, type_checker
from benchmarks.mutation.score import INSIDE, Reach, hunted, python, span, working_copy
from benchmarks.mutation.sites import Bug, sites

OPERATORS = {
    *("comparison", "order of statements", "statement dropped", "arguments swapped", "off by one"),
    *("forgotten re-arm", "wrong rank", "wrong incarnation"),
    *("and/or", "condition negated", "constant", "not dropped", "operator"),
}


def test_every_change_is_python_and_every_operator_applies() -> None:
    bugs = considered(ROOT)
    assert {bug.operator for bug in bugs} == OPERATORS
    for bug in bugs[::20]:
        source = (ROOT / "pdflow" / bug.file).read_bytes()
        changed = bug.apply(source)
        assert changed != source
        compile(changed, bug.file, "exec")
        assert diff(bug, source)


def bug_of(source: str, operator: str, tmp_path: Path) -> Bug:
    path = tmp_path / "one.py"
    path.write_text(source)
    (found,) = (bug for bug in sites(path, "one.py") if bug.operator == operator)
    return found


def test_a_bug_moves_with_its_lines(tmp_path: Path) -> None:
    before = "def f(a):\n    b = 'é'\n    return a == b\n"
    bug = bug_of(before, "comparison", tmp_path)
    assert bug.apply(before.encode()).decode().endswith("return (a != b)\n")
    later = "# é\n" + before
    now = moved(bug, before.encode(), later.encode())
    assert now is not None
    assert now.apply(later.encode()).decode() == "# é\n" + bug.apply(before.encode()).decode()
    assert moved(bug, before.encode(), before.replace("return a", "return  a").encode()) is None


def test_the_lines_of_a_bug_are_those_of_its_statement(tmp_path: Path) -> None:
    source = """def f(a):
    if (
        a ==
        1
    ):
        return g(
            a,
            2,
        )
"""
    assert list(span(bug_of(source, "comparison", tmp_path), source.encode())) == [2, 3, 4, 5]
    assert list(span(bug_of(source, "arguments swapped", tmp_path), source.encode())) == [6, 7, 8, 9]


@pytest.mark.nightly
def test_what_mypy_refuses_is_not_drawn() -> None:
    source = (ROOT / "pdflow/protocol/producer/lease.py").read_bytes()
    end = len(source)

    def added(text: str) -> Bug:
        return Bug("protocol/producer/lease.py", end, end, text, "", "", (1, 1))

    with type_checker(ROOT) as accepts:
        bugs = added("answer: int = None\n"), added("answer: int = 4242\n")
        assert [accepts(bug) for bug in (*bugs, bugs[0])] == [False, True, False]


@pytest.fixture
def reach(tmp_path: Path) -> Reach:
    """Record one scope, with its steps."""
    copy = working_copy(ROOT, tmp_path / "recorded")
    script = f"""
import json, sys
sys.path.insert(0, {str(INSIDE.parent)!r})
import inside
from pathlib import Path
name = "scope compat, WRITE completes before it lands"
path = Path({str(tmp_path)!r}) / "one.json"
print(json.dumps({{name: inside._forked(inside.partial_of(inside.searches()[name], path)) | {{"path": str(path)}}}}))
"""
    (tmp_path / "index.json").write_text(python(copy, "-c", script))
    return Reach(tmp_path)


@pytest.mark.slow
def test_a_bug_is_searched_only_where_it_changes_a_step(tmp_path: Path, reach: Reach) -> None:
    copy = working_copy(ROOT, tmp_path / "copy")
    file = "protocol/producer/matching.py"
    source = (copy / "pdflow" / file).read_bytes()
    verdicts = []
    for bug in sites(copy / "pdflow" / file, file):
        if bug.operator in ("statement dropped", "condition negated"):
            verdicts.append(hunted(bug, copy, reach, ()))
            assert (copy / "pdflow" / file).read_bytes() == source
            if len(verdicts) == 6:
                break
    assert {verdict["caught"] == "" for verdict in verdicts} == {True, False}, json.dumps(verdicts)
    (recorded,) = reach.searches.values()
    line = min(set(recorded["inside"][file]) - set(recorded["outside"].get(file, ())))
    end = len(b"".join(source.splitlines(keepends=True)[:line])) - 1
    comment = Bug(file, end, end, "  # Nothing changes.", "", "", (line, line))
    verdict = hunted(comment, copy, reach, ())
    assert (verdict["caught"], verdict["tried"], verdict["made"]) == ("", 1, 0)


def test_a_score_has_an_interval() -> None:
    assert score_text(9, 10) == "9 of 10 (90 %, 60 % to 98 %)"
    low, high = interval(50, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert score_text(0, 0) == "-"


def test_the_page_counts_what_was_tried() -> None:
    def one(number: int, before: str | None, now: str | None, test: str = "") -> dict[str, object]:
        named = {"bug": number, "file": "protocol/peers.py", "function": "Peers.lost", "operator": "constant"}
        return {**named, "diff": "-    a\n+    b", "before": before, "now": now, "test": test}

    verdicts = [one(0, "S1", "S1"), one(1, "", "L"), one(2, "", ""), one(3, "", "", "tests/x.py"), one(4, None, None)]
    text = section(verdicts, {2: {"equivalent": "Nothing reads it."}})
    assert "| all | 5 | 1 | 1 of 3 (33 %, 6 % to 79 %) | 2 of 3 (67 %, 21 % to 94 %) | 1 |" in text
    assert "| 2 | Peers.lost (protocol/peers.py) | `a`: `b` | equivalent: Nothing reads it. |" in text
    assert "| 3 | Peers.lost (protocol/peers.py) | `a`: `b` | tests/x.py |" in text
    assert "| 0 |" not in text


def test_the_results_are_those_of_the_page() -> None:
    assert section(load_results(), load_reasons()) in (ROOT / "docs/bugs.md").read_text()
