"""What a fault did to requests: TTFT around it, failures, and when it was as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import msgspec
import pytest

import pdflow
from pdflow.results.figures.aftermath import Aftermath, aftermaths
from pdflow.results.records import Records
from pdflow.results.totals import FaultTotals

S = 1_000_000_000
CRASH = FaultTotals(name="crash", engine="d-0", begin_ns=50 * S, end_ns=60 * S)


@attrs.frozen
class Bounds:
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    itl_percentile: float = 99
    e2e_ms: float | None = None


def judged(
    ttft_s: Callable[[float], float],
    fails: Callable[[float], bool] = lambda _: False,
    slo: Bounds | None = None,
    faults: tuple[FaultTotals, ...] = (CRASH,),
) -> list[Aftermath]:
    """Ten requests a second for 100 s, whose TTFT and failure are functions of their arrival."""
    records = Records()
    for number in range(1000):
        at = number / 10
        request = records.add(int(at * S), 10, 2)
        records.outcome[request] = "failed" if fails(at) else "completed"
        records.first_token_ns[request] = -1 if fails(at) else int((at + ttft_s(at)) * S)
        records.last_token_ns[request] = records.first_token_ns[request]
    return aftermaths(records, faults, slo, 0)


def usual(at: float) -> float:
    """0.1 to 0.2 s."""
    return 0.1 + (at * 7 % 1) / 10


def test_a_fault_that_delays_nothing_needs_no_recovery() -> None:
    [found] = judged(usual)
    in_flight = found.ttft_after.count - 500
    assert in_flight in (1, 2)
    assert (found.affected, found.failed, found.recovered_ns) == (500 + in_flight, 0, 0)
    assert found.ttft_before.count == 500 - in_flight
    assert found.ttft_after.p99_ms == pytest.approx(found.ttft_before.p99_ms, rel=0.1)


def test_recovery_is_when_no_more_requests_are_late_than_before() -> None:
    """Late from 50 to 62.5 s; intervals are of 2 s."""
    [found] = judged(lambda at: 3.0 if 50 <= at < 62.5 else usual(at))
    assert found.recovered_ns == 14 * S
    assert found.ttft_after.p99_ms == pytest.approx(3000)
    assert found.ttft_before.p99_ms < 210


def test_failures_count_as_well() -> None:
    [found] = judged(usual, fails=lambda at: 50 <= at < 53)
    assert (found.failed, found.recovered_ns) == (30, 4 * S)


def test_requests_in_flight_are_affected_and_not_the_measure() -> None:
    """Those of the 4 s before the crash wait until it is over; half of them fail."""
    [found] = judged(lambda at: 60.5 - at if 46 <= at < 60 else usual(at), fails=lambda at: 46 <= at < 48)
    assert found.ttft_before.p99_ms < 210
    assert found.failed == 20
    assert found.affected in (540, 541, 542)
    assert found.recovered_ns == 10 * S


def test_a_burst_before_a_fault_makes_no_tiny_intervals() -> None:
    """30 requests within a microsecond, and the fault right after their first tokens: the run is 100 s long."""
    records = Records()
    for number in range(1000):
        at = number if number < 30 else number * S // 10
        request = records.add(at, 10, 2)
        records.outcome[request] = "completed"
        records.first_token_ns[request] = records.last_token_ns[request] = at + 100
    [found] = aftermaths(records, [attrs.evolve(CRASH, begin_ns=1000)], None, 0)
    assert found.recovered_ns == 0


def test_unfinished_and_cancelled_requests_are_not_judged() -> None:
    records = Records()
    for number in range(1000):
        request = records.add(number * S // 10, 10, 2)
        if number < 900:
            records.outcome[request] = "completed" if number % 5 else "cancelled"
            records.first_token_ns[request] = records.last_token_ns[request] = number * S // 10 + 1
    assert aftermaths(records, [CRASH], None, 0)[0].recovered_ns == 0


def test_nothing_can_be_said_without_requests_or_with_none_that_was_in_time() -> None:
    assert aftermaths(Records(), [CRASH], None, 0) == []
    assert judged(usual, slo=Bounds(ttft_ms=1))[0].recovered_ns is None
    assert judged(usual, faults=(attrs.evolve(CRASH, begin_ns=200 * S),))[0].recovered_ns is None


def test_an_slo_says_what_is_late() -> None:
    slow = judged(lambda at: 0.4 if at >= 50 else usual(at), slo=Bounds(ttft_ms=500))
    assert slow[0].recovered_ns == 0
    assert judged(lambda at: 0.6 if at >= 50 else usual(at), slo=Bounds(ttft_ms=500))[0].recovered_ns is None


def test_two_faults_are_judged_apart() -> None:
    other = FaultTotals(name="pause", engine="p-0", begin_ns=70 * S)
    bound = Bounds(ttft_ms=500)
    late = judged(lambda at: 3.0 if 50 <= at < 55 or at >= 70 else usual(at), slo=bound, faults=(CRASH, other))
    assert [each.recovered_ns for each in late] == [6 * S, None]


def test_too_few_requests_before_it_say_nothing() -> None:
    early = attrs.evolve(CRASH, begin_ns=S)
    assert judged(usual, faults=(early,))[0].recovered_ns is None


def test_reports_and_files_have_them(tmp_path: Path) -> None:
    """A prefill engine that crashes, and comes back."""
    file = Path(__file__).resolve().parents[2] / "examples/faults/prefill-crash.toml"
    result = pdflow.simulate(pdflow.Scenario.load(file))
    [crash] = result.aftermaths
    assert crash.fault.name == "crash"
    lines = [line for line in str(result.table()).splitlines() if line.startswith("fault")]
    assert len(lines) == 1
    assert crash.fault.engine in lines[0]
    result.save(tmp_path)
    [row] = msgspec.json.decode((tmp_path / "results.json").read_bytes())["pdflow"]["faults"]
    assert (row["engine"], row["requests"], row["failed"]) == (crash.fault.engine, crash.affected, crash.failed)


def test_runs_without_faults_have_none() -> None:
    file = Path(__file__).resolve().parents[1] / "sim/small.toml"
    result = pdflow.simulate(pdflow.Scenario.load(file))
    assert result.aftermaths == ()
    assert "\nfault" not in str(result.table())
