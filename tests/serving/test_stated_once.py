"""What an engine does with a request is decided in `pdflow/serving`: drivers neither ask an engine's scheduler how far
a sequence is, nor tell the protocol of one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from pdflow.protocol import events

ROOT: Final = Path(__file__).resolve().parents[2]
OTHERS: Final = (
    "runtime/pdflow_runtime/engines/",
    "sim/pdflow_sim/observe/recording.py",
    "sim/pdflow_sim/check/mutants/",
)
"""Engines, which know their own phases and answers; and mutants, which break endpoints."""
ASKED: Final = {"Phase", "Dropped", "NeverFitsError"}
REPORTED_EVENTS: Final = {
    name for name in vars(events) if name.startswith(("Decode", "Prefill")) or name == "SourceWithdrawn"
}


def files() -> list[str]:
    found = [path.relative_to(ROOT).as_posix() for top in ("sim", "runtime") for path in (ROOT / top).rglob("*.py")]
    return sorted(path for path in found if not path.startswith(OTHERS))


def decides(source: str) -> list[str]:
    """What of a file's text is a rule's: names that it imports, and events that it makes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found += [f"imports {alias.name}" for alias in node.names if alias.name in ASKED]
        elif isinstance(node, ast.Attribute) and node.attr in ASKED:
            found.append(f"uses {node.attr}")
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in REPORTED_EVENTS:
                found.append(f"makes a {name}")
    return found


def test_drivers_decide_nothing_about_a_request() -> None:
    found = {path: decides((ROOT / path).read_text(encoding="utf-8")) for path in files()}
    assert {path: what for path, what in found.items() if what} == {}


def test_what_it_looks_for_is_found() -> None:
    assert {"DecodeQueued", "DecodeAborted", "PrefillBegun", "PrefillFinished", "SourceWithdrawn"} <= REPORTED_EVENTS
    source = (ROOT / "pdflow/serving/storing.py").read_text(encoding="utf-8")
    assert "makes a DecodeQueued" in decides(source)
    assert decides("from pdflow.engine.sequence import Phase") == ["imports Phase"]
    assert decides("from pdflow.engine import sequence\nsequence.Dropped") == ["uses Dropped"]
    assert decides("events.PrefillAborted(xid, code)") == ["makes a PrefillAborted"]
