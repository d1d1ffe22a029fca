"""Bugs can still be drawn, written and found; docs/bugs.md says what the whole lot came to."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutate import CORE, FILE_PATTERNS, ROOT, Bug, by_hand, copied, hunted, shuffled, sites, well_typed


def test_every_change_is_python() -> None:
    for file in sorted({file for pattern in FILE_PATTERNS for file in (ROOT / CORE).glob(pattern)}):
        found = list(sites(file))
        for bug in found[:: max(1, len(found) // 20)]:
            changed = bug.apply(file.read_bytes())
            assert changed != file.read_bytes()
            compile(changed, file.name, "exec")


def test_a_seed_is_a_draw() -> None:
    assert shuffled(1)[:10] == shuffled(1)[:10] != shuffled(2)[:10]


@pytest.mark.nightly
def test_what_mypy_refuses_is_not_drawn(tmp_path: Path) -> None:
    copied(tmp_path)
    source = (tmp_path / CORE / "producer/lease.py").read_bytes()
    untyped = Bug("producer/lease.py", len(source), len(source), "answer: int = None\n", "not an int")
    typed = Bug("producer/lease.py", len(source), len(source), "answer: int = 42\n", "an int")
    assert [well_typed(bug, tmp_path) for bug in (typed, untyped, typed)] == [True, False, True]
    assert (tmp_path / CORE / "producer/lease.py").read_bytes() == source


def test_a_bug_is_found_in_a_copy() -> None:
    bug = by_hand()[0]
    before = (ROOT / CORE / bug.file).read_bytes()
    found = hunted(bug, 60)
    assert found["caught"] == "L"
    assert (ROOT / CORE / bug.file).read_bytes() == before
