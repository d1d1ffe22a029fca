"""From a [workload] table to requests."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from attrs import evolve

from pdflow.scenario.schema.distributions import EmpiricalLength, FixedLength, Length, LognormalLength, UniformLength
from pdflow.scenario.schema.workload import (
    Arrival,
    ClosedArrival,
    ConstantArrival,
    DiurnalArrival,
    GammaArrival,
    PoissonArrival,
    RampArrival,
    Trace,
    Workload,
)
from pdflow.workload import WHEN_ONE_ENDS, Request
from pdflow.workload.build import requests
from pdflow.workload.traces.readers import load_model

HERE = Path()


def synthetic(arrival: Arrival, count: int | None = 3) -> Workload:
    return Workload(
        requests=count,
        arrival=arrival,
        input_tokens=FixedLength(tokens=512),
        output_tokens=UniformLength(low=1, high=4),
    )


def test_synthetic_requests() -> None:
    assert [r.arrival_ns for r in requests(synthetic(ConstantArrival(rate_rps=4.0)), 1, HERE)] == [
        0,
        250000000,
        500000000,
    ]
    closed = list(requests(synthetic(ClosedArrival(concurrency=2)), 1, HERE))
    assert [r.arrival_ns for r in closed] == [0, 0, WHEN_ONE_ENDS]
    poisson = list(requests(synthetic(PoissonArrival(rate_rps=4.0), 500), 1, HERE))
    assert [r.index for r in poisson] == list(range(500))
    assert {r.input_tokens for r in poisson} == {512}
    assert {r.output_tokens for r in poisson} == {1, 2, 3, 4}
    assert not any(r.prefix for r in poisson)


@pytest.mark.parametrize(
    ("arrival", "prompt"),
    [
        (GammaArrival(rate_rps=5.0, burstiness=0.5), LognormalLength(median=50.0, sigma=1.0, low=10, high=90)),
        (RampArrival(from_rps=1.0, to_rps=9.0, over_s=60.0), EmpiricalLength(tokens=(10, 90), weights=(1.0, 2.0))),
        (DiurnalArrival(rate_rps=5.0), EmpiricalLength(tokens=(10, 90))),
    ],
)
def test_every_kind_of_arrival_and_length(arrival: Arrival, prompt: Length) -> None:
    workload = Workload(requests=400, arrival=arrival, input_tokens=prompt, output_tokens=FixedLength(tokens=1))
    drawn = list(requests(workload, 3, HERE))
    assert [r.arrival_ns for r in drawn] == sorted(r.arrival_ns for r in drawn)
    assert 400 / drawn[-1].arrival_ns * 1e9 == pytest.approx(5.0, rel=0.3)
    assert (prompt.low, prompt.high) == (10, 90)
    assert {10, 90} <= {r.input_tokens for r in drawn} <= set(range(10, 91))


def test_a_seed_is_all_that_matters() -> None:
    workload = synthetic(PoissonArrival(rate_rps=4.0), 50)
    assert list(requests(workload, 5, HERE)) == list(requests(workload, 5, HERE))
    assert list(requests(workload, 5, HERE)) != list(requests(workload, 6, HERE))
    assert list(requests(workload, 5, HERE)) == list(
        islice(requests(synthetic(PoissonArrival(rate_rps=4.0), None), 5, HERE), 50)
    )


def test_lengths_do_not_move_arrivals() -> None:
    one = requests(synthetic(PoissonArrival(rate_rps=4.0), 50), 5, HERE)
    other = requests(
        Workload(
            requests=50,
            arrival=PoissonArrival(rate_rps=4.0),
            input_tokens=UniformLength(low=1, high=99),
            output_tokens=FixedLength(tokens=9),
        ),
        5,
        HERE,
    )
    assert [r.arrival_ns for r in one] == [r.arrival_ns for r in other]


def test_traces_start_at_the_scenarios_folder_and_can_be_stretched(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 00:00:00,5,6\n2023-11-16 00:00:01,7,8\n?,1,1\n"
    )
    trace = Trace(path="t.csv", format="azure", time_scale=0.5)
    got = list(requests(Workload(trace=trace, requests=2), 0, tmp_path))
    assert got == [Request(0, 0, 5, 6), Request(1, 500_000_000, 7, 8)]


def test_a_trace_can_be_sliced(tmp_path: Path) -> None:
    lines = "".join(f"{second},{second + 1},1\n" for second in range(10))
    (tmp_path / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + lines)

    def sliced(count: int | None = None, **keys: float) -> list[tuple[int, float, int]]:
        trace = evolve(Trace(path="t.csv", format="vidur"), **keys)
        return [
            (r.index, r.arrival_ns / 10**9, r.input_tokens)
            for r in requests(Workload(trace=trace, requests=count), 0, tmp_path)
        ]

    assert sliced(skip=8) == [(0, 0.0, 9), (1, 1.0, 10)]
    assert sliced(start_s=6.5, end_s=9.0) == [(0, 0.5, 8), (1, 1.5, 9)]
    assert sliced(start_s=6.5, end_s=9.0, time_scale=4.0) == [(0, 2.0, 8), (1, 6.0, 9)]
    assert sliced(1, skip=3, start_s=2.0) == [(0, 1.0, 4)]
    assert sliced(start_s=99.0) == []


def test_an_arrival_process_replaces_a_traces_times(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n9,1\n")
    trace = Trace(path="t.csv", format="vidur", skip=1)
    got = list(requests(Workload(trace=trace, arrival=ConstantArrival(rate_rps=2.0)), 0, tmp_path))
    assert got == [Request(0, 0, 7, 8), Request(1, 500_000_000, 9, 1)]
    closed = list(requests(Workload(trace=trace, arrival=ClosedArrival(concurrency=1)), 0, tmp_path))
    assert [request.arrival_ns for request in closed] == [0, WHEN_ONE_ENDS]


def test_a_model_runs_at_its_traces_rate_or_another() -> None:
    def rate(workload: Workload) -> float:
        *_, last = requests(workload, 3, HERE)
        return (last.index + 1) / (last.arrival_ns / 10**9)

    own = load_model("azure-conv").rate_rps
    assert rate(Workload(like="azure-conv", requests=40_000)) == pytest.approx(own, rel=0.15)
    assert rate(Workload(like="azure-conv", requests=40_000, rate_rps=1.0)) == pytest.approx(1.0, rel=0.15)
    assert rate(Workload(like="azure-conv", requests=40_000, rate_scale=2.0)) == pytest.approx(2 * own, rel=0.15)
