"""The supervisor and the router's process: what it is told of engines."""

from __future__ import annotations

import subprocess
from typing import Any

import msgspec
import pytest
import trio

from pdflow_runtime.observe.record import Record
from pdflow_runtime.process.addresses import EngineGone, read_news
from pdflow_runtime.process.cluster import Cluster, ComponentProcess
from tests.runtime.support.live_pair import cluster


@pytest.mark.trio
async def test_engines_that_end_at_the_same_moment_are_reported_to_the_router() -> None:
    process = await trio.lowlevel.open_process(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    supervisor = Cluster(cluster(), "cluster.toml", (), Record(), {})
    supervisor.router = ComponentProcess("router", process, b"")
    gone = [EngineGone(name) for name in ("prefill-0", "decode-0", "decode-1")]
    async with trio.open_nursery() as nursery:
        for news in gone:
            nursery.start_soon(supervisor._send_to_router, news)
    await process.stdin.aclose()
    output = b"".join([data async for data in process.stdout])
    await process.wait()
    assert sorted(map(read_news, output.splitlines()), key=gone.index) == gone
    assert len(output) == sum(len(msgspec.json.encode(news)) + 1 for news in gone)


@pytest.mark.trio
async def test_each_process_is_started_with_the_environment_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    given = {"decode-0": {"CUDA_VISIBLE_DEVICES": "1,0"}}
    supervisor = Cluster(cluster(), "cluster.toml", (), Record(), given)
    visible = []

    async def opened(command: list[str], **options: Any) -> None:
        visible.append(options["env"]["CUDA_VISIBLE_DEVICES"])
        raise FileNotFoundError

    monkeypatch.setattr(trio.lowlevel, "open_process", opened)
    for name in ("router", "decode-0"):
        with pytest.raises(FileNotFoundError):
            await supervisor._start(name, "a.module")
    assert visible == ["0,1", "1,0"]
