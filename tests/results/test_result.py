from __future__ import annotations

from pathlib import Path

from pdflow.results.figures.itls import itls_s
from pdflow.results.records import Records
from pdflow.results.result import Result
from pdflow.results.steps import Steps


def test_summary_has_the_headline_figures(result: Result) -> None:
    summary = result.summary
    assert (summary["requests"], summary["completed"], summary["unfinished"]) == (5, 2, 1)
    assert (summary["ttft_mean_ms"], summary["e2e_p50_ms"]) == (40.0, 80.0)
    assert sum(summary["stages_mean_ms"].values()) == summary["ttft_mean_ms"]


def test_records_are_dicts_when_looked_at(result: Result) -> None:
    assert len(result.records) == 5
    assert [record["request"] for record in result.records] == [0, 1, 2, 3, 4]
    assert list(result.records)[2] == result.records.record(2)
    assert result.records.record(2)["reason"] == "lease_expired"


def test_repr_summarizes_the_run_in_a_few_lines(result: Result) -> None:
    assert repr(result) == (
        "<Result 'five' seed 7: 2 completed, 1 failed, 1 cancelled, 1 unfinished\n"
        "  2 s of simulated time, 1.000 requests/s, goodput 0.500 requests/s\n"
        "  TTFT mean 40.00 ms, p99 44.90 ms\n"
        "  TPOT mean 10.00 ms, p99 10.00 ms\n"
        "  ITL  mean 10.00 ms, p99 10.00 ms\n"
        "  E2E  mean 80.00 ms, p99 84.90 ms\n"
        "  step times prefill, decode: constant, as the scenario states; exact>"
    )


def test_save_writes_both_files(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["requests.jsonl", "results.json"]


def test_itls_are_the_waits_between_a_requests_tokens() -> None:
    """Steps of 3, 5, 7 and 9 us, then an idle gap, then 4 us; the client is 100 us away."""
    log = Steps()
    log.add(10_000_000, 3_000_000, 2_000_000, 4, 2)
    log.add(50_000_000, 4_000_000, 0, 1, 0)
    log.add(54_000_000, 500, 0, 2, 1)
    records = Records()
    for first, last, steps, tokens in (
        (13_000, 34_000, (0, 3), 4),
        (18_000, 25_000, (1, 2), 2),
        (2_000, 25_000, (1, 2), 3),  # its first token came from the prefill engine long before
        (13_000, 54_000, (0, 1, 4, 4), 3),  # preempted after two tokens
        (54_000, 54_001, (4, 6), 3),  # steps of half a nanosecond: rounded up as the records are
        (5, 5, (4, 4), 1),
    ):
        request = records.add(0, 1, tokens)
        records.outcome[request], records.decode_engine[request] = "completed", "d0"
        records.first_token_ns[request], records.last_token_ns[request] = first + 100_000, last + 100_000
        records.token_steps[request] = steps
    records.add(0, 1, 9)
    ns = [[round(wait * 1e9) for wait in waits] for waits in itls_s(records, {"d0": log})]
    assert ns == [[5000, 7000, 9000], [7000], [16000, 7000], [5000, 36000], [1, 0], [], []]
