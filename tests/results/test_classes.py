"""Classes: each is held against its own bounds, and a run without classes says nothing of them."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from pdflow.results.figures.metrics import Metrics, measure
from pdflow.results.records import Records
from pdflow.results.result import Result
from pdflow.results.totals import Totals
from pdflow.scenario.schema.scenario import Slo

MS = 1_000_000


def records_of(*rows: tuple[str, int, int, int]) -> Records:
    """Each a class, TTFT and time after it in ms, and output tokens; a TTFT below 0 is a request that failed."""
    records = Records()
    for index, (name, ttft_ms, rest_ms, tokens) in enumerate(rows):
        assert records.add(0, 10, tokens) == index
        if name:
            records.classify(index, name)
        records.outcome[index] = "failed" if ttft_ms < 0 else "completed"
        if ttft_ms >= 0:
            records.first_token_ns[index] = ttft_ms * MS
            records.last_token_ns[index] = (ttft_ms + rest_ms) * MS
    return records


ROWS = (
    ("chat", 10, 40, 5),
    ("chat", 30, 40, 5),
    ("chat", -1, 0, 5),
    ("batch", 900, 400, 5),
    ("", 100, 40, 5),
    ("", 300, 0, 1),
)
BOUNDS = {"chat": Slo(ttft_ms=20, tpot_ms=10), "batch": Slo(e2e_ms=1300)}


def measured(slo: Slo | None = None, **classes: Slo) -> Metrics:
    return measure(records_of(*ROWS), [], 2_000 * MS, slo, classes)


def test_each_class_has_its_own_bounds_and_the_others_those_of_slo() -> None:
    metrics = measured(Slo(ttft_ms=200), **BOUNDS)
    assert metrics.slo is not None
    assert (metrics.slo.good, metrics.slo.attainment, metrics.slo.goodput_rps) == (3, 3 / 6, 1.5)
    # A metric of which nothing is demanded is met.
    assert metrics.slo.by_metric == {"ttft": 3 / 6, "tpot": 5 / 6, "e2e": 5 / 6}
    assert list(metrics.classes) == ["", "batch", "chat"]
    chat, batch, other = (metrics.classes[name] for name in ("chat", "batch", ""))
    assert (chat.requests, chat.completed, batch.requests, other.requests) == (3, 2, 1, 2)
    assert chat.slo is not None
    assert (chat.slo.good, chat.slo.attainment, chat.slo.by_metric) == (1, 1 / 3, {"ttft": 1 / 3, "tpot": 2 / 3})
    assert batch.slo is not None
    assert batch.slo.by_metric == {"e2e": 1.0}
    assert other.slo is not None
    assert (other.slo.good, other.slo.attainment) == (1, 0.5)
    assert (chat.ttft.p50_ms, chat.tpot.mean_ms, batch.e2e.p99_ms) == (20.0, 10.0, 1300.0)


def test_bounds_for_one_class_demand_nothing_of_the_others() -> None:
    metrics = measured(batch=Slo(e2e_ms=1299.9))
    assert metrics.slo is not None
    assert (metrics.slo.good, metrics.slo.by_metric) == (4, {"e2e": 4 / 6})
    assert (metrics.classes["chat"].slo, metrics.classes[""].slo) == (None, None)


def test_classes_without_bounds_are_still_distinguished() -> None:
    metrics = measured()
    assert metrics.slo is None
    assert [row.completed for row in metrics.classes.values()] == [2, 1, 2]


def test_the_goods_of_the_classes_are_the_goods_of_the_run() -> None:
    metrics = measured(Slo(ttft_ms=200), **BOUNDS)
    assert metrics.slo is not None
    assert sum(row.slo.good for row in metrics.classes.values() if row.slo) == metrics.slo.good


def test_a_run_reports_figures_of_each_class(result: Result, tmp_path: Path) -> None:
    header = attrs.evolve(result.header, slo=Slo(ttft_ms=200), class_slos=BOUNDS)
    classed = Result.of(header, records_of(*ROWS), {}, Totals(duration_ns=2_000 * MS))
    classed.save(tmp_path)
    classes = json.loads((tmp_path / "results.json").read_text())["pdflow"]["classes"]
    assert {name: row["requests"] for name, row in classes.items()} == {"": 2, "batch": 1, "chat": 3}
    assert (classes["batch"]["slo"]["e2e_ms"], classes["batch"]["slo"]["attainment"]) == (1300, 1.0)
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["class"] for line in lines] == ["chat", "chat", "chat", "batch", "", ""]
    text = str(classed.table())
    assert all(len(line) <= 80 for line in text.splitlines())
    [row] = [line for line in text.splitlines() if line.startswith("chat")]
    assert row.split()[:5] == ["chat", "3", "0.500", "33.3", "%"]
    summary = classed.summary["classes"]["chat"]
    assert (summary["completed"], summary["goodput_rps"], summary["ttft_p50_ms"]) == (2, 0.5, 20.0)
    assert "SLO met by   50.0 % of requests · TTFT 50.0 %" in text


def test_a_run_without_classes_does_not_mention_them(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    assert "class" not in (tmp_path / "results.json").read_text()
    assert "class" not in (tmp_path / "requests.jsonl").read_text()
    assert "class" not in str(result.table())


def test_estimates_are_labelled(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    assert "workload_note" not in (tmp_path / "results.json").read_text()
    noted = attrs.evolve(result, header=attrs.evolve(result.header, workload_note="lengths are estimates"))
    noted.save(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["pdflow"]["workload_note"] == "lengths are estimates"
    assert "workload     lengths are estimates" in str(noted.table())


@pytest.mark.parametrize("last", [True, False])
def test_requests_before_and_after_a_class_may_have_none(last: bool) -> None:
    records = records_of(("", 1, 1, 1), ("a", 1, 1, 1), ("b" if last else "", 1, 1, 1))
    assert [records.class_of(index) for index in range(3)] == ["", "a", "b" if last else ""]
