"""What is written: vLLM's keys, simulate's folder, and the figures that the server's timings make."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
from trio.testing import MockClock

import pdflow_sim.run
from pdflow.results.comparison.compare import Comparisons
from pdflow.results.files.read import read_runs
from pdflow.scenario.reading.load import load
from pdflow_runtime.bench.asked import BenchOptions
from pdflow_runtime.bench.progress import BenchProgress
from pdflow_runtime.http.responder import Responder
from tests.runtime.bench.stub import refuse, run, stub

QUICKSTART = str(Path(__file__).resolve().parents[3] / "examples/serve-quickstart.toml")

pytestmark = pytest.mark.trio


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return content


def outside(content: Mapping[str, Any]) -> list[str]:
    return [key for key in content if key != "pdflow"]


async def test_its_folder_is_compared_with_a_simulations_request_by_request(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    few = ("workload.requests=40",)
    asked = BenchOptions(out=str(tmp_path / "live"), save_detailed=True)
    async with stub() as (_, port):
        ran = await run(port, scenario=QUICKSTART, overrides=few, out=asked.out, save_detailed=True)
    ran.save(asked)
    pdflow_sim.run.simulate(load(QUICKSTART, overrides=few), out=str(tmp_path / "sim"), quiet=True, save_detailed=True)
    live, simulated = read(tmp_path / "live/results.json"), read(tmp_path / "sim/results.json")
    assert outside(live) == outside(simulated)
    assert live["start_times"] == simulated["start_times"]
    assert live["pdflow"]["scenario"] == simulated["pdflow"]["scenario"]
    assert all(len(itls) == tokens - 1 for itls, tokens in zip(live["itls"], live["output_lens"], strict=True))
    assert live["generated_texts"][0].startswith("<0><1>")
    assert live["p99_ttft_ms"] == pytest.approx(100.0)
    assert live["mean_itl_ms"] == pytest.approx(10.0)
    [one] = Comparisons.of([read_runs(tmp_path / "sim"), read_runs(tmp_path / "live")]).against_first
    assert one.how == "paired requests"
    assert one.differences["ttft_p50_ms"].after == pytest.approx(100.0)
    assert "prefill_ms" not in one.differences


async def test_goodput_and_percentiles_are_those_that_were_asked_for(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with stub() as (_, port):
        flags: dict[str, Any] = {"num_prompts": 10, "random_output_len": 5, "max_concurrency": 5}
        ran = await run(port, goodput=("ttft:500", "tpot:50", "e2el:139"), **flags)
        good = await run(port, goodput=("ttft:100.001", "e2el:141"), **flags)
    asked = BenchOptions(percentile_metrics="ttft,e2el,client_queue_time", metric_percentiles="50,99.9")
    content = ran.content(asked)
    assert content["request_goodput"] == 0.0
    assert good.content(asked)["request_goodput"] == pytest.approx(10 / 0.28)
    latencies = [key for key in content if key.endswith("_ms")]
    names = ("ttft", "e2el", "client_queue_time")
    assert latencies == [
        f"{statistic}_{name}_ms" for name in names for statistic in ("mean", "median", "std", "p50", "p99.9")
    ]
    assert content["p99.9_e2el_ms"] == pytest.approx(140.0)
    assert content["mean_client_queue_time_ms"] == pytest.approx(70.0)
    assert sorted(content["queue_times"]) == pytest.approx([0.0] * 5 + [0.14] * 5)
    assert (content["max_concurrency"], content["request_rate"], content["backend"]) == (5, "inf", "openai")


async def test_a_client_judges_the_inter_token_latencies_of_each_answer(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """Tokens are 10 ms apart."""
    async with stub() as (_, port):
        flags: dict[str, Any] = {"num_prompts": 10, "random_output_len": 5, "out": str(tmp_path)}
        stalled = await run(port, goodput=("itl:9@p50",), **flags)
        good = await run(port, goodput=("itl:10.001@p100", "ttft:101"), **flags)
    assert (stalled.metrics.slo.good, stalled.metrics.stalled_share) == (0, 1.0)
    assert (good.metrics.slo.good, good.metrics.stalled_share) == (10, 0.0)
    assert good.metrics.request_itl.max_ms == pytest.approx(10.0)
    good.save(BenchOptions(out=str(tmp_path)))
    read_back = read_runs(tmp_path)
    assert read_back.good.all()
    assert "max ITL <= 10.001 ms" in str(good.table())


async def test_vllms_file_has_vllms_name_and_lines_are_appended(autojump_clock: MockClock, tmp_path: Path) -> None:
    folder = str(tmp_path / "results")
    async with stub() as (_, port):
        ran = await run(
            port, num_prompts=3, request_rate=20.0, max_concurrency=2, model="org/name", label="try", metadata=("tp=2",)
        )
    header = attrs.evolve(ran.header, source_date_epoch=0)
    [path] = attrs.evolve(ran, header=header).save(BenchOptions(save_result=True, result_dir=folder))
    assert path.name == "try-20.0qps-concurrency2-name-19700101-000000.json"
    assert "ttfts" not in read(path)
    assert read(path)["tp"] == "2"
    assert len(read(path)["latencies"]) == 3
    for _ in range(2):
        ran.save(BenchOptions(save_result=True, append_result=True, result_dir=folder, result_filename="all.jsonl"))
    lines = (tmp_path / "results/all.jsonl").read_text().splitlines()
    assert [msgspec.json.decode(line)["completed"] for line in lines] == [3, 3]


async def test_an_interruption_keeps_what_there_is(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with stub() as (_, port), trio.open_nursery() as nursery:

        async def interrupt() -> None:
            await trio.sleep(0.45)
            os.kill(os.getpid(), signal.SIGINT)

        nursery.start_soon(interrupt)
        even: dict[str, Any] = {"request_rate": 10.0, "burstiness": float("inf"), "random_output_len": 1}
        ran = await run(port, num_prompts=100, **even)
    assert ran.header.interrupted
    assert ran.metrics.outcomes == {"completed": 4, "failed": 0, "cancelled": 0, "unfinished": 1}
    ran.save(BenchOptions(out=str(tmp_path)))
    assert read(tmp_path / "results.json")["pdflow"]["interrupted"]
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 5
    assert "interrupted, partial" in ran.table().text()


async def test_while_it_runs_the_last_seconds_are_reported(autojump_clock: MockClock) -> None:
    async def odd(number: int, responder: Responder) -> bool:
        if number in (50, 150):
            await refuse(responder)
        return number in (50, 150)

    even: dict[str, Any] = {"request_rate": 10.0, "burstiness": float("inf"), "random_output_len": 3}
    async with stub(odd) as (_, port):
        ran = await run(port, num_prompts=200, **even)
    await trio.sleep(0.05)  # so that none ended just when the window begins
    done, last = BenchProgress(ran.ledger, "x", 400).look()
    assert done == "200 of 400 requests in 20.1 s, 0 open"
    expected = "last 10 s: 10.00/s ended, 1 without an answer, TTFT p50 100.0 ms p99 100.0 ms, TPOT p50 10.00 ms"
    assert last == expected


async def test_of_failures_every_figure_is_zero(autojump_clock: MockClock, tmp_path: Path) -> None:
    async def odd(number: int, responder: Responder) -> bool:
        await refuse(responder)
        return True

    async with stub(odd) as (_, port):
        ran = await run(port, num_prompts=3)
    ran.save(BenchOptions(out=str(tmp_path), save_detailed=True))
    content = read(tmp_path / "results.json")
    assert (content["completed"], content["failed"]) == (0, 3)
    assert content["errors"] == ["HTTP 503: nobody is up"] * 3
    assert (content["ttfts"], content["itls"], content["p99_ttft_ms"]) == ([0.0] * 3, [[], [], []], 0.0)
    assert "failed       3 · HTTP 503: nobody is up 3" in ran.table().text()


async def test_a_warm_up_of_the_scenario_is_sent_and_not_counted(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with stub() as (server, port):
        ran = await run(port, scenario=QUICKSTART, overrides=("workload.requests=40", "workload.warmup_s=4.0"))
    ran.save(BenchOptions(out=str(tmp_path), save_detailed=True))
    content = read(tmp_path / "results.json")
    assert len(server.asked) == 40
    assert content["pdflow"]["warmup"]["requests"] == 40 - content["num_prompts"] > 0
    for key in ("input_lens", "ttfts", "itls", "queue_times", "generated_texts", "start_times"):
        assert len(content[key]) == content["num_prompts"], key
