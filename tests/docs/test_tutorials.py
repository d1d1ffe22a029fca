"""The tutorials (docs/tutorials) as a reader types them: their files, their commands, and what these print."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.version import compiled
from tests.docs.pages import ROOT, all_blocks, commands, matches, run_page

TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
MUTANTS = ("add-a-rule", "lease-expiry")
"""These search for mutants, which patch functions."""


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled() and path.stem in MUTANTS:
        pytest.skip("a compiled machine cannot be patched")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    page = path.read_text(encoding="utf-8")
    assert [command for command, _ in run_page(page)] == commands(page)
    assert any(block.language == "text" for block in all_blocks(page))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb\n", "a  \nb\n\n", True),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("...\nd\n", "a\nd\n", True),
        ("a\n...\n", "a\nb\n", True),
        ("took ... s\n", "took 1.5 s\n", True),
        ("took ... s\n", "took\n1.5 s\n", False),
        ("a\nc\n", "a\nb\nc\n", False),
        ("a\n...\nd\n", "a\nb\n", False),
        ("a.c\n", "abc\n", False),
        ("a\n", "a\nb\n", False),
    ],
)
def test_dots_stand_for_what_is_left_out(shown: str, printed: str, same: bool) -> None:
    assert matches(shown, printed) is same
