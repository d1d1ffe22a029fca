"""An engine whose process is stopped: requests that wait for it are sent to another one, and it gets requests again
when it goes on. No engine sends heartbeats. A decode engine that owes whole answers is asked whether it responds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import trio

from benchmarks.live_chaos import QUICKSTART
from tests.runtime.support.served import Served, served

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("engine", ["prefill-0", "decode-0"])
def test_requests_of_a_stopped_engine_are_served_by_another(tmp_path: Path, engine: str, stream: bool) -> None:
    with served(tmp_path, QUICKSTART, "router.stalled_after_s=1") as cluster:
        stopped = cluster.pid_of(engine)
        os.kill(stopped, signal.SIGSTOP)
        try:
            with_it = trio.run(ask, cluster, 8, stream)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert trio.run(counted, cluster, "pdflow_router_engines_stalled_total") >= 1
        trio.run(until_trusted, cluster)
        assert trio.run(ask, cluster, 8, stream) == with_it


async def ask(cluster: Served, requests: int, stream: bool) -> list[str]:
    """Send greedy requests at the same time, and return their texts."""
    texts = [""] * requests

    async def one(number: int) -> None:
        fields = {"prompt": f"Prompt {number}", "max_tokens": 8, "temperature": 0, "stream": stream}
        status, body = await cluster.exchange("POST", "/v1/completions", msgspec.json.encode(fields))
        assert status == 200, body
        events = body.split(b"\n\n")[:-2] if stream else [b"data: " + body]
        answers = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
        texts[number] = "".join(answer["choices"][0]["text"] for answer in answers)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for number in range(requests):
                nursery.start_soon(one, number)
    return texts


async def counted(cluster: Served, name: str) -> float:
    lines = (await cluster.exchange("GET", "/metrics"))[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name + " "))


async def until_trusted(cluster: Served) -> None:
    """Send requests until the engine that was stopped has answered one."""
    with trio.fail_after(60):
        while True:
            state = msgspec.json.decode((await cluster.exchange("GET", "/admin/state"))[1])
            if not state["stalled"]:
                return
            await ask(cluster, 2, False)
            await trio.sleep(0.2)
