"""Streams whose decode engine is killed continue on another one: with the tokens, text and logprobs of an undisturbed
answer, and under its name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from benchmarks.live_chaos import QUICKSTART
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import JSON
from tests.runtime.support.served import Served, served

pytestmark = pytest.mark.slow

TOKENS = 250
PROMPTS = ("A prefill engine", "The router sends", "KV blocks of a request are", "What a lease is:")
GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 7}
LOGPROBS: dict[str, Any] = {"temperature": 0, "logprobs": 1}
ECHO: dict[str, Any] = {"temperature": 0, "echo": True, "frequency_penalty": 0.4, "presence_penalty": 0.2}


class Stream:
    """One streamed answer."""

    def __init__(self, cluster: Served, path: str, fields: dict[str, Any]) -> None:
        self.cluster = cluster
        self.path = path
        self.fields = {"stream": True, "max_tokens": TOKENS, "ignore_eos": True, **fields}
        self.answer = b""
        self.halfway = trio.Event()

    async def run(self) -> None:
        client = HttpClient()
        try:
            body = msgspec.json.encode(self.fields)
            async with client.request(
                "POST", self.cluster.host, self.cluster.port, self.path, (JSON,), body
            ) as response:
                async for data in response.pieces():
                    self.answer += data
                    if self.answer.count(b"data: ") > 20:
                        self.halfway.set()
        finally:
            client.close()

    def events(self) -> list[dict[str, Any]]:
        *lines, done, rest = self.answer.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b""), self.answer[-500:]
        return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]

    def choices(self) -> list[dict[str, Any]]:
        """What the client reads, without the name of the answer, which must be one."""
        events = self.events()
        assert len({(event["id"], event["created"]) for event in events}) == 1
        return [choice for event in events for choice in event["choices"]]


def asked(cluster: Served) -> list[Stream]:
    streams = [
        Stream(cluster, "/v1/completions", {"prompt": prompt, **options})
        for prompt in PROMPTS
        for options in (GREEDY, DRAWN, LOGPROBS, ECHO)
    ]
    chat = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "stream_options": {"include_usage": True}}
    return [*streams, Stream(cluster, "/v1/chat/completions", {**chat, **GREEDY})]


async def run_all(streams: list[Stream]) -> None:
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.run)


async def kill_halfway(cluster: Served, streams: list[Stream], by: signal.Signals = signal.SIGKILL) -> None:
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.run)
        with trio.fail_after(60):
            for stream in streams:
                await stream.halfway.wait()
        os.kill(cluster.pid_of("decode-0"), by)


@pytest.mark.parametrize(
    "overrides",
    [
        ("router.first_token=decode",),
        ("router.first_token=prefill", "transfer.method=nixl-pull"),
        ("router.on_failure=recompute",),
    ],
    ids=["D's first token", "P's first token, pull", "recomputed"],
)
def test_streams_of_a_killed_engine_continue(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with served(tmp_path, QUICKSTART, *overrides) as cluster:
        undisturbed, disturbed = asked(cluster), asked(cluster)
        trio.run(run_all, undisturbed)
        trio.run(kill_halfway, cluster, disturbed)
        for before, after in zip(undisturbed, disturbed, strict=True):
            assert after.choices() == before.choices()
            assert after.events()[-1].get("usage") == before.events()[-1].get("usage")
        metrics = trio.run(cluster.exchange, "GET", "/metrics")[1].decode()
        resumed = next(line for line in metrics.splitlines() if line.startswith("pdflow_router_answers_resumed_total"))
        assert float(resumed.split()[1]) >= len(disturbed) // 3


@pytest.mark.parametrize("override", ["router.heartbeat_s=0.6", "router.stalled_after_s=1"])
def test_streams_of_an_engine_that_stands_still_continue(tmp_path: Path, override: str) -> None:
    """A stopped process keeps its connections: that it sends nothing is all that the router sees, neither reports nor
    tokens."""
    with served(tmp_path, QUICKSTART, override) as cluster:
        undisturbed, disturbed = asked(cluster), asked(cluster)
        trio.run(run_all, undisturbed)
        stopped = cluster.pid_of("decode-0")
        try:
            trio.run(stop_halfway, cluster, disturbed)
        finally:
            os.kill(stopped, signal.SIGCONT)
        for before, after in zip(undisturbed, disturbed, strict=True):
            assert after.choices() == before.choices()


async def stop_halfway(cluster: Served, streams: list[Stream]) -> None:
    """Return when all answers are whole, with an engine that stands still."""
    with trio.fail_after(30):
        await kill_halfway(cluster, streams, signal.SIGSTOP)


def test_without_resume_the_streams_break_off(tmp_path: Path) -> None:
    with served(tmp_path, QUICKSTART, "router.resume=false") as cluster:
        streams = asked(cluster)
        trio.run(kill_halfway, cluster, streams)
        broken = [stream for stream in streams if b'"error"' in stream.answer]
        assert broken
        assert all(b"token_ids" not in stream.answer for stream in streams)
