from __future__ import annotations

import math

import attrs
import pytest

from pdflow.results.figures.metrics import measure
from pdflow.results.records import STAGES, Records
from pdflow.results.result import Result
from pdflow.results.steps import Steps
from pdflow.results.totals import EngineTotals, LinkTotals, Totals
from pdflow.scenario.schema.scenario import Slo

MS = 1_000_000
S = 1_000 * MS


def one(ttft_ns: int, e2e_ns: int, output_tokens: int) -> Records:
    records = Records()
    records.add(0, 10, output_tokens)
    records.outcome[0] = "completed"
    records.first_token_ns[0], records.last_token_ns[0] = ttft_ns, e2e_ns
    return records


def test_figures_of_five_requests_by_hand(result: Result) -> None:
    metrics = result.metrics
    assert metrics.outcomes == {"completed": 2, "failed": 1, "cancelled": 1, "unfinished": 1}
    assert metrics.reasons == {"failed": {"lease_expired": 1}, "cancelled": {"client_gone": 1}}
    assert (metrics.input_tokens, metrics.output_tokens) == (300, 10)
    ttft = metrics.ttft  # 35 and 45 ms
    assert (ttft.mean_ms, ttft.std_ms, ttft.p50_ms, ttft.p90_ms, ttft.p99_ms) == (40.0, 5.0, 40.0, 44.0, 44.9)
    assert (metrics.tpot.mean_ms, metrics.tpot.std_ms) == (10.0, 0.0)
    assert (metrics.itl.count, metrics.itl.mean_ms, metrics.itl.p99_ms) == (8, 10.0, 10.0)
    assert metrics.e2e.mean_ms == 80.0
    assert metrics.per_second(metrics.completed) == 1.0
    means = {stage: spread.mean_ms for stage, spread in metrics.stages.items()}
    assert means == dict.fromkeys(STAGES, 0.0) | {
        "p_queue": 5.0,
        "prefill": 20.0,
        "xfer_wire": 5.0,
        "first_decode": 10.0,
    }
    assert metrics.slo is not None
    assert (metrics.slo.good, metrics.slo.goodput_rps, metrics.slo.attainment) == (1, 0.5, 0.25)
    assert metrics.slo.by_metric == {"ttft": 0.25, "tpot": 0.5}
    assert metrics.peak_output_tokens_per_s == 10
    assert metrics.peak_concurrent_requests == 1


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=100), 1),
        (Slo(ttft_ms=99.999999), 0),
        (Slo(tpot_ms=100), 1),
        (Slo(tpot_ms=99.999999), 0),
        (Slo(e2e_ms=400), 1),
        (Slo(e2e_ms=399.9), 0),
        (Slo(ttft_ms=100, tpot_ms=1), 0),
        (Slo(tpot_ms=1e12), 1),
    ],
)
def test_a_bound_itself_is_still_good(slo: Slo, good: int) -> None:
    metrics = measure(one(100 * MS, 400 * MS, 4), [], S, slo)
    assert metrics.slo is not None
    assert metrics.slo.good == good


def test_one_token_has_no_tpot_and_meets_any() -> None:
    metrics = measure(one(100, 100, 1), [], S, Slo(tpot_ms=0.001))
    assert metrics.tpot.count == 0
    assert metrics.slo is not None
    assert metrics.slo.attainment == 1.0


def test_no_slo_is_no_goodput() -> None:
    assert measure(one(1, 1, 1), [], S).slo is None
    assert measure(one(1, 1, 1), [], S, Slo()).slo is None


@pytest.mark.parametrize("outcome", [None, "failed", "cancelled"])
def test_where_nothing_completed_every_figure_is_zero(outcome: str | None) -> None:
    records = Records(3)
    records.outcome[:] = [outcome] * 3  # type: ignore[list-item]
    metrics = measure(records, [Steps()], 0, Slo(ttft_ms=1))
    numbers = [*attrs.astuple(metrics.ttft), *attrs.astuple(metrics.itl), *attrs.astuple(metrics.stages["prefill"])]
    assert metrics.slo is not None
    numbers += [metrics.slo.attainment, metrics.slo.goodput_rps, metrics.per_second(0)]
    assert numbers == [0] * len(numbers)
    assert not any(math.isnan(number) for number in numbers)


def test_tokens_are_counted_by_whole_seconds_from_the_first_arrival() -> None:
    """Arrival at 0.5 s; tokens at 1.0, 1.4 (bucket 0), 1.5 and 1.6 s (bucket 1, where the second is full)."""
    records = Records()
    for first in (1_000, 1_500):
        request = records.add(500 * MS, 1, 2)
        records.outcome[request] = "completed"
        records.first_token_ns[request], records.last_token_ns[request] = first * MS, (first + 400) * MS
    log = Steps()
    log.add(1_000 * 10**9, 400 * 10**9, 0, 1, 1)
    log.add(1_500 * 10**9, 100 * 10**9, 0, 1, 3)
    assert measure(records, [log], 2 * S).peak_output_tokens_per_s == 4


def test_a_request_that_ends_as_another_arrives_is_not_concurrent_with_it() -> None:
    records = Records()
    for arrival, end in ((0, 10), (10, 20), (12, 18), (18, 30)):
        request = records.add(arrival, 1, 1)
        records.outcome[request] = "completed"
        records.first_token_ns[request] = records.last_token_ns[request] = end
    assert measure(records, [], 30).peak_concurrent_requests == 2


def test_shares_of_links_and_gpus() -> None:
    link = LinkTotals(name="nic", bytes=500, busy_ns=S, capacity_bytes_per_s=1_000)
    assert (link.utilisation(2 * S), link.busy_share(2 * S)) == (0.25, 0.5)
    assert LinkTotals(name="ideal", bytes=500).utilisation(S) == 0.0
    engines = [
        EngineTotals(name="p", role="prefill", busy_ps=S * 1_000, gpus=1),
        EngineTotals(name="q", role="prefill", busy_ps=0, gpus=3),
        EngineTotals(name="d", role="decode", busy_ps=S * 1_000, gpus=4),
    ]
    totals = Totals(duration_ns=S, engines=engines)
    assert [totals.gpu_busy_share(role) for role in (*totals.roles(), None)] == [0.25, 1.0, 0.625]
    assert Totals(engines=engines).gpu_busy_share() == 0.0


def test_the_busiest_link_comes_first() -> None:
    links = [
        LinkTotals(name="idle", capacity_bytes_per_s=10),
        LinkTotals(name="wide", bytes=100, capacity_bytes_per_s=10_000),
        LinkTotals(name="full", bytes=50, capacity_bytes_per_s=100),
        LinkTotals(name="endless", bytes=70),
    ]
    totals = Totals(duration_ns=S, links=links)
    assert [link.name for link in totals.busiest_links(9)] == ["full", "wide", "endless"]
