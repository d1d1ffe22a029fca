"""What peers recommend is read as they mean it, and docs/planning.md shows what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning.peer_cases import CASES
from benchmarks.planning.peer_commands import aiconfigurator_pick, aisimulate_pick

ROOT = Path(__file__).parents[2]
CASE = next(case for case in CASES if case.name == "70b-8")
FIGURES = {"ttft": "300.5", "tpot": "40.25"}


def test_a_replica_of_aiconfigurator_is_multiplied_until_all_gpus_are_used() -> None:
    row = {**FIGURES, "seq/s": "5.5", "concurrency": "64", "num_total_gpus": "2", "tp": "2"}
    pick = aiconfigurator_pick(CASE, row, aggregated=True)
    assert pick.design.text == "4x TP2"
    assert pick.claimed == {"rate": 22.0, "ttft_ms": 300.5, "tpot_ms": 40.25}
    assert pick.clients == 256


def test_prefill_and_decode_workers_of_aiconfigurator_are_multiplied_too() -> None:
    sides = {"(p)tp": "1", "(p)workers": "2", "(d)tp": "2", "(d)workers": "1"}
    row = {**FIGURES, "seq/s": "9.5", "concurrency": "128", "num_total_gpus": "4", **sides}
    pick = aiconfigurator_pick(CASE, row, aggregated=False)
    assert pick.design.text == "4P TP1 + 2D TP2"
    assert pick.claimed["rate"] == 19.0
    assert pick.clients == 256


@pytest.mark.parametrize(
    ("mode", "text"), [("aggregated", "2x TP4"), ("disaggregated", "3P TP2 + 1D TP2")], ids=["aggregated", "apart"]
)
def test_the_mode_of_aisimulate_says_which_workers_count(mode: str, text: str) -> None:
    def workers(replicas: int, tensor: int) -> dict[str, Any]:
        return {"parallelism": {"replicas": replicas, "tensor": tensor}}

    roles = {"aggregated": workers(2, 4), "prefill": workers(3, 2), "decode": workers(1, 2)}
    load = {"load": {"requests_per_second": 12.5}}
    pick = aisimulate_pick(CASE, {"engine": {"mode": mode, "workers": roles}, "traffic": load})
    assert (pick.design.text, pick.claimed, pick.clients) == (text, {"rate": 12.5}, None)


def test_the_page_shows_the_figures_that_were_found() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "peer_picks.json").read_text(encoding="utf-8"))
    assert {row["case"] for row in rows} == {case.name for case in CASES}
    for row in rows:
        closed = f"{row['clients']}: {row['closed']['rate']:.2f}" if row["closed"] else ""
        cells = [row["source"], row["design"], f"{row['claimed']['rate']:.2f}", closed]
        cells += [f"{row['mean_rate']:.2f}", f"{row['tail_rate']:.2f}"]
        assert f"| {' | '.join(cells)} |" in page, row
