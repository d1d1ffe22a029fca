"""docs/phases.md and docs/dialects.md are what the tables say. UPDATE_DOCS=1 writes them again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdflow.protocol import diagrams, dialect, phases
from pdflow.protocol.phases import PRODUCER_PHASES

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "phases.md": (diagrams.phases_page, phases),
    "dialects.md": (diagrams.dialects_page, dialect),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_generated_from_the_tables(name: str) -> None:
    write, module = PAGES[name]
    page = write(Path(module.__file__).read_text(encoding="utf-8"))
    path = ROOT / "docs" / name
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(page, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == page, f"docs/{name} is old: UPDATE_DOCS=1 pytest {__file__}"


def test_every_phase_and_every_guard_is_described() -> None:
    for module, name in ((phases, "ProducerPhase"), (phases, "ConsumerPhase"), (dialect, "Dialect")):
        descriptions = diagrams.docstrings(Path(module.__file__).read_text(encoding="utf-8"), name)
        assert all(text for key, text in descriptions.items() if key not in ("name", "GONE")), descriptions


def test_every_legal_change_is_drawn_once() -> None:
    page = (ROOT / "docs" / "phases.md").read_text(encoding="utf-8")
    for phase, targets in PRODUCER_PHASES.items():
        for target in targets - {phase}:
            assert page.count(f"    {phase.name} --> {target.name}\n") == 1
