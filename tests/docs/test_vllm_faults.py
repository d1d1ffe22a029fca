"""The table of faults in docs/vllm.md is the one that the results in the repository make."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.vllm.cases import CASES
from benchmarks.vllm.faults import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "vllm_faults.json"


def test_the_page_has_the_table_of_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    assert table(results) in (ROOT / "docs" / "vllm.md").read_text(), (
        f"python -m benchmarks.vllm.faults --json {RESULTS}"
    )


def test_every_fault_has_been_done_to_pdflow() -> None:
    assert {key for key, case in CASES.items() if "pdflow" in case.origins} <= set(
        json.loads(RESULTS.read_text())["pdflow"]
    )
