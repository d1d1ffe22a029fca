"""The page on the architecture is enough to find, in one guess, the file that decides a question."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")

DECIDED: Final = {
    "When does a lease end, and what happens then?": "expired_in_flight",
    "Which registration belongs to which prompt?": "Matching",
    "Which pieces does a stop still cut?": "Lanes",
    "Who retries a failed attempt, and when is it not retried?": "after_failure",
    "What does a full ring or pool of staging memory do?": "RingStaging",
    "Who ends an aborted request at D, the protocol or the engine?": "DecodeCore",
    "When are the blocks of a prompt at P free?": "Sending",
    "Which attempt streams the answer to the client?": "Answer",
    "In which order are the events of one turn handled?": "Core",
    "What differs between the dialects?": "Dialect",
    "What may a message from a peer contain?": "frame_problem",
    "What must never happen, in any driver?": "Oracle",
}
"""What the file that the page names for a question must define."""


def rows() -> dict[str, str]:
    """Question -> file, from the page's table."""
    table = PAGE.partition("| question | file |")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {question: file.strip("`") for question, file in cells}


@pytest.mark.parametrize("question", DECIDED)
def test_a_question_leads_to_the_file_that_decides_it(question: str) -> None:
    tree = ast.parse((ROOT / rows()[question]).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert DECIDED[question] in defined


def test_every_question_is_asked_here() -> None:
    assert rows().keys() == DECIDED.keys()
