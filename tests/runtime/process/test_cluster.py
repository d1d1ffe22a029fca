"""Real clusters of real processes on loopback: right answers, deaths, and a stop in the middle of everything."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.results.comparison.runs import OneRun
from pdflow.results.files.read import read_runs
from pdflow.results.records import stage_durations_ns
from pdflow.scenario.reading.load import load
from pdflow_runtime.security.signed import operators_signer
from pdflow_sim.check.counterexamples.trace import follow
from tests.runtime.support.live_pair import prompt
from tests.runtime.support.served import Completion, Served, served

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).resolve().parents[3] / "examples/serve-quickstart.toml"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), QUICKSTART, "router.on_failure=retry") as cluster:
        yield cluster


@pytest.mark.trio
async def test_a_stream_has_the_tokens_of_a_whole_answer(quickstart: Served) -> None:
    whole = await quickstart.ask(prompt="Once upon a time", max_tokens=20, ignore_eos=True)
    stream = await quickstart.ask(prompt="Once upon a time", max_tokens=20, ignore_eos=True, stream=True)
    assert whole.status == stream.status == 200
    assert len(whole.tokens) == 20
    assert (stream.tokens, stream.text) == (whole.tokens, whole.text)


@pytest.mark.trio
async def test_answers_do_not_depend_on_who_else_asks(quickstart: Served) -> None:
    prompts = [prompt(length, length) for length in (1, 5, 16, 40, 100, 300, 700, 1500)]
    alone = [await quickstart.ask(prompt=tokens, max_tokens=16, ignore_eos=True) for tokens in prompts]
    together: dict[int, Completion] = {}

    async def ask(number: int) -> None:
        text = prompts[number % len(prompts)]
        together[number] = await quickstart.ask(prompt=text, max_tokens=16, ignore_eos=True, stream=number % 2 == 0)

    async with trio.open_nursery() as nursery:
        for number in range(4 * len(prompts)):
            nursery.start_soon(ask, number)
    for number, answer in together.items():
        assert answer.tokens == alone[number % len(prompts)].tokens


@pytest.mark.trio
async def test_several_answers_are_put_together(quickstart: Served) -> None:
    """n answers to each prompt, in order; greedy ones are all alike, drawn ones are not."""
    prompts = [prompt(20, 1), prompt(30, 2)]
    alone = [await quickstart.ask(prompt=tokens, max_tokens=6, ignore_eos=True) for tokens in prompts]
    body = {"prompt": prompts, "n": 2, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    status, whole = await quickstart.exchange(
        "POST", "/v1/completions", msgspec.json.encode({**body, "temperature": 0})
    )
    assert status == 200, whole
    answer = msgspec.json.decode(whole)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [alone[k].tokens for k in (0, 0, 1, 1)]
    assert answer["usage"]["completion_tokens"] == 24
    drawn = msgspec.json.encode({**body, "temperature": 1.5, "seed": 3, "stream": True})
    status, stream = await quickstart.exchange("POST", "/v1/completions", drawn)
    assert status == 200, stream
    texts = ["", "", "", ""]
    events = stream.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        (choice,) = msgspec.json.decode(event[6:])["choices"]
        texts[choice["index"]] += choice["text"]
    assert len(set(texts)) == 4


@pytest.mark.trio
async def test_bad_requests_are_refused_by_status(quickstart: Served) -> None:
    for fields, status in (
        ({"prompt": "x", "model": "gpt-5"}, 404),
        ({"prompt": "x", "max_tokens": -1}, 400),
        ({"prompt": [100_000]}, 400),
        ({"prompt": prompt(9000)}, 400),
        ({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}, "max_tokens": 1}, 200),
    ):
        answer = await quickstart.ask(**fields)
        assert answer.status == status, answer.body


def test_the_quickstart_of_the_readme_answers_curl(quickstart: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    readme = (QUICKSTART.parents[1] / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^curl .*$", readme, re.MULTILINE)
    there = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{quickstart.port}")
    answer = subprocess.run(shlex.split(there), capture_output=True, text=True, check=True).stdout
    assert answer.count("text_completion") >= 2
    assert answer.endswith("data: [DONE]\n\n")


@pytest.mark.trio
async def test_the_quickstart_answers_in_sentences(quickstart: Served) -> None:
    """Its model was trained on the documents; greedily it repeats what it has seen most often."""
    chat = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 80, "temperature": 0}
    status, answer = await quickstart.exchange("POST", "/v1/chat/completions", msgspec.json.encode(chat))
    assert status == 200
    text = msgspec.json.decode(answer)["choices"][0]["message"]["content"]
    assert "keys and values of all tokens" in text
    assert text.rstrip().endswith(".")


def test_the_log_says_what_a_start_waits_for(quickstart: Served) -> None:
    log = quickstart.log.read_text(encoding="utf-8")
    names = ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")
    begun = log.index(f"starting 5 processes: {', '.join(names)}")
    assert log.index("importing torch") > begun
    for name in names:
        [number] = re.findall(rf'msg="{name} is ready \((\d) of 5\), after [\d.]+ s"', log)
        assert 1 <= int(number) <= 5
    assert log.index("(5 of 5)") < log.index("serving model ")


async def blocks_in_use(cluster: Served) -> dict[str, int]:
    status, body = await cluster.exchange("GET", "/admin/state")
    assert status == 200
    engines = msgspec.json.decode(body)["engines"]
    return {name: engine["blocks"] - engine["free"] for name, engine in engines.items()}


@pytest.mark.trio
async def test_who_hangs_up_leaves_nothing_behind(quickstart: Served) -> None:
    """Before P has computed, while KV is on its way, and in the middle of the answer."""
    for pause_s in (0.0, 0.02, 0.1, 0.4):
        async with trio.open_nursery() as nursery:
            for number in range(8):
                fields = {"prompt": prompt(1500, number), "max_tokens": 500, "ignore_eos": True}
                nursery.start_soon(partial(quickstart.ask, **fields))
            await trio.sleep(pause_s)
            nursery.cancel_scope.cancel()
    with trio.fail_after(60):
        while sum((await blocks_in_use(quickstart)).values()):
            await trio.sleep(0.1)


@pytest.mark.trio
async def test_an_engine_that_is_drained_gets_nothing_new(quickstart: Served) -> None:
    async def prompts_of(engine: str) -> int:
        status, body = await quickstart.exchange("GET", "/admin/state")
        assert status == 200
        return int(msgspec.json.decode(body)["engines"][engine]["steps"])

    assert (await quickstart.exchange("POST", "/admin/engines/prefill-1/drain"))[0] == 200
    before = await prompts_of("prefill-1")
    for number in range(4):
        assert (await quickstart.ask(prompt=prompt(20, 50 + number), max_tokens=2)).status == 200
    assert await prompts_of("prefill-1") == before
    assert (await quickstart.exchange("POST", "/admin/engines/prefill-1/resume"))[0] == 200
    for number in range(4):
        assert (await quickstart.ask(prompt=prompt(20, 60 + number), max_tokens=2)).status == 200
    assert await prompts_of("prefill-1") > before
    assert (await quickstart.exchange("POST", "/admin/engines/nobody-1/drain"))[0] == 404


@pytest.mark.trio
async def test_metrics_have_the_names_of_the_field(quickstart: Served) -> None:
    await quickstart.ask(prompt=prompt(40), max_tokens=4)
    status, text = await quickstart.exchange("GET", "/metrics")
    assert status == 200
    assert b"vllm:time_to_first_token_seconds_count" in text
    assert b'pdflow_router_requests_total{code="none",outcome="completed"}' in text


@pytest.mark.trio
async def test_a_killed_engine_is_replaced_and_nobody_waits_for_it(quickstart: Served) -> None:
    before = await quickstart.ask(prompt=prompt(200), max_tokens=8, ignore_eos=True)
    answers: list[Completion] = []

    async def ask(number: int) -> None:
        answers.append(await quickstart.ask(prompt=prompt(200, number), max_tokens=64, ignore_eos=True))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(ask, number)
            await trio.sleep(0.2)
            for engine in ("prefill-0", "decode-1"):
                os.kill(quickstart.pid_of(engine), signal.SIGKILL)
    assert len(answers) == 24
    assert {answer.status for answer in answers} <= {200, 502, 503}
    assert all(len(answer.tokens) == 64 for answer in answers if answer.status == 200)
    with trio.fail_after(60):
        for _ in range(4):
            while (after := await quickstart.ask(prompt=prompt(200), max_tokens=8, ignore_eos=True)).status != 200:
                await trio.sleep(0.2)
            assert after.tokens == before.tokens


@pytest.mark.trio
async def test_a_stop_in_the_middle_of_streams_loses_none(tmp_path: Path) -> None:
    reports = ("router.heartbeat_s=2", "router.silent_after_s=30")
    small = ("pool.prefill.replicas=1", "pool.decode.replicas=1", *reports)
    with served(tmp_path, QUICKSTART, *small, events=tmp_path / "run") as cluster:
        for what in ("drain", "resume"):
            assert (await cluster.exchange("POST", f"/admin/engines/decode-0/{what}"))[0] == 200
        answers: list[Completion] = []

        async def open_streams() -> int:
            _, state = await cluster.exchange("GET", "/admin/state")
            return int(msgspec.json.decode(state)["open"])

        async def ask(number: int) -> None:
            fields = {"prompt": prompt(50, number), "max_tokens": 100, "ignore_eos": True, "stream": True}
            answers.append(await cluster.ask(**fields))

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(ask, number)
            while len(answers) + await open_streams() < 100:
                await trio.sleep(0.1)
            assert len(answers) < 50, "it is in their middle"
            cluster.process.send_signal(signal.SIGTERM)
        assert [len(answer.tokens) for answer in answers] == [100] * 100
        with trio.fail_after(30):
            while cluster.process.poll() is None:
                await trio.sleep(0.05)
        assert cluster.process.returncode == 0, cluster.log.read_text()
    # The code that is checked is the code that serves: told again to it, each event is answered as it was live.
    followed = follow(load(QUICKSTART, overrides=small), tmp_path / "run/events.jsonl")
    assert followed.events > 100 * 15
    # And what it left behind is a run as any other: stages add up, and each request has passed all of them.
    run = read_runs(tmp_path / "run")
    assert isinstance(run, OneRun)
    assert run.records.outcome == ["completed"] * 100
    assert run.records.output_tokens == [100] * 100
    durations = stage_durations_ns(run.records)
    assert (durations.sum(axis=0) == np.array(run.records.first_token_ns) - np.array(run.records.arrival_ns)).all()
    assert all(min(column) > 0 for column in run.records.ends)
    with gzip.open(tmp_path / "run/timeline.json.gz") as packed:
        shown = {event["name"] for event in msgspec.json.decode(packed.read())["traceEvents"] if event["ph"] == "X"}
    assert {"r0", "r99", "post", "load"} <= shown


@pytest.mark.trio
async def test_a_stop_waits_for_no_lease_of_kv_that_nobody_is_left_to_fetch(tmp_path: Path) -> None:
    with served(tmp_path, QUICKSTART, "pool.prefill.replicas=1", "pool.decode.replicas=1") as cluster:
        where = re.compile(r"component=prefill-0 .*HTTP on [\d.]+:(\d+)")
        with trio.fail_after(5):
            while not (match := where.search(cluster.log.read_text())):
                await trio.sleep(0.01)
        params = {"do_remote_decode": True, "pdflow": {"xid": "x"}}
        body = msgspec.json.encode({"prompt": prompt(50), "max_tokens": 1, "kv_transfer_params": params})
        engine = Served(cluster.process, f"http://127.0.0.1:{match[1]}", cluster.log)
        signed = operators_signer(cluster.host, cluster.port).sign("prefill-0", "POST", "/v1/completions", body)
        assert (await engine.exchange("POST", "/v1/completions", body))[0] == 401
        status, answer = await engine.exchange("POST", "/v1/completions", body, signed)
        assert status == 200, answer
        assert (await blocks_in_use(cluster))["prefill-0"]
        cluster.process.send_signal(signal.SIGTERM)
        with trio.fail_after(20):  # a lease is 30 s
            while cluster.process.poll() is None:
                await trio.sleep(0.05)
        assert cluster.process.returncode == 0, cluster.log.read_text()
        assert "level=error" not in cluster.log.read_text()
