"""What arrives during the warm-up is in no figure; what is left is what a run of the rest alone would say."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from pdflow.results.figures.metrics import measure
from pdflow.results.files.read import UnreadableRunError, read_runs
from pdflow.results.records import EngineTokens, Records
from pdflow.results.result import Result
from pdflow.results.steps import Steps

MS = 1_000_000
PS_PER_MS = 1_000_000_000


def warm(result: Result, warmup_ms: int) -> Result:
    header = attrs.evolve(result.header, warmup_ns=warmup_ms * MS)
    return Result.of(header, result.records, result.steps, result.totals)


def test_requests_before_it_are_in_no_figure(result: Result) -> None:
    """Request 0 arrives at instant 0, request 1 at 100 ms: with TTFT 35 and 45 ms."""
    after = warm(result, 100).metrics
    assert (after.requests, after.warming, after.completed) == (4, 1, 1)
    assert (after.ttft.count, after.ttft.mean_ms) == (1, 45.0)
    assert sum(spread.mean_ms for spread in after.stages.values()) == pytest.approx(45.0)
    assert after.itl.count == 4
    assert after.duration_ns == 1_900 * MS
    assert after.input_tokens == 200
    assert after.attempts == 4
    assert after.slo is not None
    assert after.slo.attainment == 0


def test_none_changes_nothing(result: Result) -> None:
    assert warm(result, 0).metrics == result.metrics
    assert result.metrics.warming == 0
    assert "warm-up" not in str(result.table())


def test_one_that_outlasts_the_run_leaves_nothing(result: Result) -> None:
    after = warm(result, 10_000).metrics
    assert (after.requests, after.warming, after.duration_ns) == (0, 5, 0)
    assert after.ttft.mean_ms == after.itl.mean_ms == after.per_second(after.completed) == 0


def test_classes_stay_with_their_requests() -> None:
    records = Records()
    for request, name in enumerate(("chat", "batch", "")):
        records.add(request * MS, 1, 1)
        records.classify(request, name)
    assert records.arriving_from(MS).classes == ["batch", ""]
    assert records.arriving_from(0) is records
    assert list(measure(records, [], 5 * MS, warmup_ns=MS).classes) == ["", "batch"]


def test_the_report_and_the_file_show_the_warm_up(result: Result, tmp_path: Path) -> None:
    after = warm(result, 100)
    assert "1 requests served, not counted" in " ".join(str(after.table()).split())
    after.save(tmp_path, detailed=True)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["pdflow"]["warmup"] == {"s": 0.1, "requests": 1}
    assert written["num_prompts"] == len(written["ttfts"]) == len(written["itls"]) == len(written["latencies"]) == 4
    assert written["ttfts"][0] == 0.045
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 5


def test_a_comparison_leaves_them_out_too(result: Result, tmp_path: Path) -> None:
    warm(result, 100).save(tmp_path / "some")
    assert len(read_runs(tmp_path / "some").records) == 4
    warm(result, 10_000).save(tmp_path / "none")
    with pytest.raises(UnreadableRunError, match="warm-up"):
        read_runs(tmp_path / "none")


def test_a_row_of_steps_is_split_where_the_instant_falls() -> None:
    """Steps of 10, 12, 14 and 16 ms: they end at 10, 22, 36 and 52."""
    log = Steps()
    log.add(0, 10 * PS_PER_MS, 2 * PS_PER_MS, 4, 3)
    for instant_ms, left in ((0, 4), (10, 4), (11, 3), (22, 3), (36, 2), (52, 1), (53, 0)):
        trimmed = log.ending_from(instant_ms * PS_PER_MS)
        ends = [end // PS_PER_MS for times, _ in trimmed.ends() for end in times.tolist()]
        assert ends == [10, 22, 36, 52][4 - left :], instant_ms
        waits = [wait // PS_PER_MS for times, _ in trimmed.chunks() for wait in times.tolist()]
        assert waits == [10, 12, 14, 16][4 - left :]


def test_every_column_is_split() -> None:
    records = Records()
    for at in range(4):
        records.add(at, 1, 1)
        records.classify(at, "chat")
        records.sessions.append((0, at + 1))
        for column in (records.itl_ns, records.itl_max_ns, records.stalled_ns):
            column.append(at)
    records.wrong_kv = {0, 3}
    records.earlier = {1: [], 2: [EngineTokens("d-0", (3, 5), (9,))]}
    later = records.arriving_from(2)
    columns = [getattr(later, name) for name in Records.__slots__ if name not in ("earlier", "ends", "wrong_kv")]
    assert {len(column) for column in (*columns, *later.ends)} == {2}
    assert later.wrong_kv == {1}
    assert later.earlier == {0: records.earlier[2]}
