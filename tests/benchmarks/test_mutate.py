"""Bugs can still be drawn, written and found; docs/bugs.md says what the whole lot came to."""

from __future__ import annotations

from benchmarks.mutate import CORE, PLACES, ROOT, by_hand, drawn, hunted, sites


def test_every_change_is_python() -> None:
    for file in sorted({file for pattern in PLACES for file in (ROOT / CORE).glob(pattern)}):
        found = list(sites(file))
        for bug in found[:: max(1, len(found) // 20)]:
            changed = bug.apply(file.read_bytes())
            assert changed != file.read_bytes()
            compile(changed, file.name, "exec")


def test_a_seed_is_a_draw() -> None:
    assert drawn(1, 10) == drawn(1, 10) != drawn(2, 10)


def test_a_bug_is_found_in_a_copy() -> None:
    bug = by_hand()[0]
    before = (ROOT / CORE / bug.file).read_bytes()
    found = hunted(bug, 60)
    assert found["caught"] == "L"
    assert (ROOT / CORE / bug.file).read_bytes() == before
