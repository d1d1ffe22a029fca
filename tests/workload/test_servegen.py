"""ServeGen's clients: what is drawn has the windows' rates, the gaps' shape and the windows' lengths."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.scenario.schema.workload import Trace, Workload
from pdflow.workload import Request
from pdflow.workload.build import requests
from pdflow.workload.servegen import read_lengths, read_windows
from pdflow.workload.traces.complaints import TraceError
from pdflow.workload.traces.readers import check_trace, read_clients, read_trace

TRACES = Path(__file__).resolve().parents[2] / "../shared/data/traces"
DATASET = """{
    "0": {"input_tokens": "{}", "output_tokens": "{}"},
    "1000": {"input_tokens": "{7: 0.25, 9: 0.75}", "output_tokens": "{3: 1e0}"},
    "3000": {"input_tokens": "{5: 1}", "output_tokens": "{0: 1}"}
}"""


def write(folder: Path, windows: str, dataset: str = DATASET, number: int = 0) -> Trace:
    name = f"chunk-{number}-trace.csv"
    (folder / name).write_text(windows)
    (folder / f"chunk-{number}-dataset.json").write_text(dataset)
    return Trace(path=name, format="servegen")


def draw(trace: Trace, folder: Path, seed: int = 1) -> list[Request]:
    return list(read_trace(trace, folder, seed))


def test_rates_gaps_and_lengths_are_the_windows(tmp_path: Path) -> None:
    trace = write(tmp_path, "0,8,2,Gamma,0.25,9\n1000,0,0,,0,0\n2000,4,1,Weibull,0.5,9\n4000,16,1,Weibull,1,9\n")
    drawn = draw(trace, tmp_path)
    at = np.array([request.arrival_ns for request in drawn]) / 1e9
    assert at.max() < 6000
    counts = np.histogram(at, bins=[0, 1000, 2000, 4000, 6000])[0]
    assert counts == pytest.approx([8000, 0, 8000, 32000], rel=0.08)
    for low, high, cv in ((0, 1000, 2.0), (2000, 4000, math.sqrt(5)), (4000, 6000, 1.0)):
        gaps = np.diff(at[(at >= low) & (at < high)])
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    first = [request for request in drawn if request.arrival_ns < 3000 * 10**9]
    assert {request.input_tokens for request in first} == {7, 9}
    assert sum(request.input_tokens == 9 for request in first) / len(first) == pytest.approx(0.75, abs=0.02)
    assert {(r.input_tokens, r.output_tokens) for r in drawn if r.arrival_ns >= 3000 * 10**9} == {(5, 1)}
    assert draw(trace, tmp_path) == drawn
    assert draw(trace, tmp_path, 2) != drawn


def test_a_folder_is_all_its_clients(tmp_path: Path) -> None:
    alone = [draw(write(tmp_path, f"0,{rate},1,Gamma,1,1\n", number=rate), tmp_path) for rate in (2, 5)]
    together = draw(Trace(path=".", format="servegen"), tmp_path)
    assert [request.index for request in together] == list(range(len(together)))
    assert [request.arrival_ns for request in together] == sorted(request.arrival_ns for request in together)
    assert len(together) == pytest.approx(sum(map(len, alone)), rel=0.15)


def test_a_scenario_slices_and_counts_it(tmp_path: Path) -> None:
    trace = write(tmp_path, "0,5,1,Gamma,1,1\n600,5,1,Gamma,1,1\n")
    sliced = Trace(path=trace.path, format="servegen", start_s=100, end_s=200, time_scale=2.0)
    drawn = list(requests(Workload(trace=sliced), 1, tmp_path))
    whole = [r for r in draw(trace, tmp_path) if 100 * 10**9 <= r.arrival_ns < 200 * 10**9]
    assert [r.arrival_ns for r in drawn] == [2 * (r.arrival_ns - 100 * 10**9) for r in whole]
    assert len(list(requests(Workload(trace=sliced, requests=7), 1, tmp_path))) == 7


def test_every_wrong_file_and_line_is_reported(tmp_path: Path) -> None:
    write(
        tmp_path,
        "0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n600,1,1,Normal,1,1\n1200,-1,1,Gamma,1,1\n1800,1,1,Gamma,nan,1\n2400,1\n",
    )
    write(tmp_path, "0,0,0,,0,0\n", number=1)
    write(
        tmp_path, "0,1,1,Gamma,1,1\n", dataset='{"0": {"input_tokens": "{1: -1}", "output_tokens": "{1: 1}"}}', number=2
    )
    (tmp_path / "chunk-3-trace.csv").write_text("0,1,1,Gamma,1,1\n")
    with pytest.raises(TraceError) as caught:
        check_trace(Trace(path=".", format="servegen"), tmp_path)
    locations = [
        problem.location.removeprefix(f"{tmp_path}/").removeprefix("chunk-") for problem in caught.value.problems
    ]
    assert locations == [
        *(f"0-trace.csv:{n}" for n in range(2, 7)),
        "1-trace.csv:1",
        "2-dataset.json:1",
        "3-dataset.json",
    ]


@given(st.text(max_size=60))
def test_arbitrary_text_is_windows_or_complaints(text: str) -> None:
    for read in (lambda: read_windows([text], "t"), lambda: read_lengths(text, "t")):
        with suppress(TraceError):
            assert read()


def test_a_published_client() -> None:
    """Its own lengths are not here, another client's are."""
    names = "servegen_m-large_chunk0_trace_first2000.csv", "servegen_m-large_chunk1_dataset.json"
    if not all((TRACES / name).exists() for name in names):
        pytest.skip("needs ServeGen's m-large in ../shared/data/traces")
    trace = Trace(path=names[0], dataset=names[1], format="servegen")
    [client] = read_clients(trace, TRACES)
    assert len(client.windows) == 2000
    until_s = 216_000
    drawn = list(takewhile(lambda r: r.arrival_ns < until_s * 10**9, read_trace(trace, TRACES, 1)))
    expected = sum(window.rate_rps * 600 for window in client.windows if window.start_s < until_s)
    assert len(drawn) == pytest.approx(expected, rel=0.05)
    busy = next(one for one in client.lengths if one.start_s >= 150_000)
    tokens, shares = np.array(busy.input_tokens)
    ours = [r.input_tokens for r in drawn if 0 <= r.arrival_ns / 1e9 - busy.start_s < 21_600]
    assert np.mean(ours) == pytest.approx(float((tokens * shares).sum() / shares.sum()), rel=0.1)
