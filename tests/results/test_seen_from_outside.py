"""A live run, as its client sees it: no stages, nothing of what is inside, and nothing made up in their place."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pdflow.results.comparison.compare import Comparisons
from pdflow.results.figures.metrics import measure
from pdflow.results.figures.quoted import Quoted
from pdflow.results.figures.spread import of_ints
from pdflow.results.files.bench_json import ClientMeasurements, RunHeader, bench_json
from pdflow.results.files.read import read_runs
from pdflow.results.files.write import write_requests, write_results
from pdflow.results.records import FIRST_DECODE, Records
from pdflow.results.table import Report
from pdflow.results.totals import Totals

MS = 1_000_000
INSIDE = {"posting_busy_share", "transfers", "links", "engines", "gpu_busy_share", "cost", "notes", "world_events"}
HEADER = RunHeader(scenario_name="x", scenario_sha256="", seed=1, version="")


def records(*, stamped: bool) -> Records:
    found = Records()
    for number in range(40):
        request = found.add(number * MS, 10, 3)
        found.outcome[request] = "completed"
        found.first_token_ns[request] = (number + 5) * MS
        found.last_token_ns[request] = (number + 9) * MS
        if stamped:
            found.ends[FIRST_DECODE][request] = found.first_token_ns[request]
    return found


def written(folder: Path, *, live: bool) -> dict[str, Any]:
    seen = ClientMeasurements(
        queue_times_s=[0.25] * 40, texts=["hi"] * 40, figures={"p75_ttft_ms": 5.0}, late=of_ints(np.array([MS]))
    )
    rows = records(stamped=not live)
    metrics = measure(rows, [], 50 * MS)
    content = bench_json(
        HEADER, rows, metrics, None if live else Totals(), itls_s=[[0.002] * 2] * 40, seen=seen if live else None
    )
    write_results(folder / "results.json", content)
    write_requests(folder / "requests.jsonl", rows)
    read: dict[str, Any] = msgspec.json.decode((folder / "results.json").read_bytes())
    return read


def test_what_a_client_sees_is_there_and_what_it_cannot_see_is_not(tmp_path: Path) -> None:
    live, simulated = written(tmp_path / "live", live=True), written(tmp_path / "simulated", live=False)
    assert live["queue_times"] == [0.25] * 40
    assert live["generated_texts"] == ["hi"] * 40
    assert live["p75_ttft_ms"] == 5.0
    assert "p99_ttft_ms" not in live
    assert live["pdflow"]["stages"] == {}
    assert live["pdflow"]["sent_late"]["max_ms"] == 1.0
    assert set(simulated["pdflow"]) - set(live["pdflow"]) == INSIDE


def test_its_report_has_no_waterfall_and_no_links(tmp_path: Path) -> None:
    rows = records(stamped=False)
    text = Report(HEADER, measure(rows, [], 50 * MS), None, of_ints(np.array([MS, 3 * MS]))).text()
    assert "Where TTFT went" not in text
    assert not any(term in text for term in ("bytes moved", "in steps", "mean batch", "KV peak", "stranded", "link"))
    assert "sent late    mean 2.000 ms" in text


def test_compared_with_a_simulation_requests_are_paired_and_stages_left_out(tmp_path: Path) -> None:
    for name in ("simulated", "live"):
        written(tmp_path / name, live=name == "live")
    [one] = Comparisons.of([read_runs(tmp_path / "simulated"), read_runs(tmp_path / "live")]).against_first
    assert one.how == "paired requests"
    assert "ttft_p99_ms" in one.differences
    assert "first_decode_ms" not in one.differences


def test_percentiles_have_vllms_names_and_numpys_values() -> None:
    samples = np.arange(1, 101, dtype=np.int64) ** 2 * MS
    quoted = Quoted(("ttft", "e2el"), (Fraction(25), Fraction("99.9")))
    figures = quoted.figures({"ttft": samples, "e2el": np.empty(0, np.int64)})
    keys = [
        f"{statistic}_{name}_ms" for name in ("ttft", "e2el") for statistic in ("mean", "median", "std", "p25", "p99.9")
    ]
    assert list(figures) == keys
    ms = samples / MS
    expected = [ms.mean(), np.median(ms), ms.std(), np.percentile(ms, 25), np.percentile(ms, 99.9)]
    assert np.allclose([*figures.values()][:5], expected)
    assert [*figures.values()][5:] == [0.0] * 5
