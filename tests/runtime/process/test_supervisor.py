"""The supervisor and the router's process: what it is told of engines."""

from __future__ import annotations

import subprocess
from contextlib import closing
from typing import Any

import msgspec
import pytest
import trio

from pdflow_runtime.http.sockets import listen
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.observe.record import Record
from pdflow_runtime.process.addresses import AllReported, EngineAddress, EngineGone, read_news
from pdflow_runtime.process.cluster import Cluster
from pdflow_runtime.process.router_pipe import RouterPipe
from pdflow_runtime.process.router_sockets import RouterSockets
from tests.runtime.support.live_pair import cluster


class YieldingStream(trio.abc.SendStream):
    """Lets other tasks run at each send."""

    def __init__(self) -> None:
        self.sent = b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.sleep(0)
        self.sent += data
        await trio.sleep(0)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.sleep(0)

    async def aclose(self) -> None:
        await trio.sleep(0)


@pytest.mark.trio
async def test_an_engine_that_ends_while_a_new_router_is_told_of_it() -> None:
    pipe, stream = RouterPipe(), YieldingStream()
    here = Coordinates("127.0.0.1", 1)
    for number in range(4):
        await pipe.report(EngineAddress(f"decode-{number}", here, here))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipe.connect, stream)
        while not stream.sent:
            await trio.sleep(0)
        nursery.start_soon(pipe.report, EngineGone("decode-3"))
        nursery.start_soon(pipe.report, EngineGone("decode-2", for_good=True))
    reports = [read_news(line) for line in stream.sent.splitlines()]
    assert reports[4] == AllReported()
    assert {news.engine: news for news in reports[5:] if isinstance(news, EngineGone)} == {
        "decode-2": EngineGone("decode-2", for_good=True),
        "decode-3": EngineGone("decode-3"),
    }


@pytest.mark.trio
async def test_engines_that_end_at_the_same_moment_are_reported_to_the_router() -> None:
    process = await trio.lowlevel.open_process(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    link = RouterPipe()
    await link.connect(process.stdin)
    gone = [EngineGone(name) for name in ("prefill-0", "decode-0", "decode-1")]
    async with trio.open_nursery() as nursery:
        for news in gone:
            nursery.start_soon(link.report, news)
    await process.stdin.aclose()
    output = b"".join([data async for data in process.stdout])
    await process.wait()
    first, *reported = map(read_news, output.splitlines())
    assert first == AllReported()
    assert sorted(reported, key=gone.index) == gone
    assert len(output) == sum(len(msgspec.json.encode(news)) + 1 for news in (first, *gone))


@pytest.mark.trio
async def test_each_process_is_started_with_the_environment_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    given = {"decode-0": {"CUDA_VISIBLE_DEVICES": "1,0"}}
    sockets = RouterSockets(listen("127.0.0.1", 0))
    supervisor = Cluster(cluster(), "cluster.toml", (), Record(), given, sockets)
    visible = []

    async def opened(command: list[str], **options: Any) -> None:
        visible.append(options["env"]["CUDA_VISIBLE_DEVICES"])
        raise FileNotFoundError

    monkeypatch.setattr(trio.lowlevel, "open_process", opened)
    with closing(sockets):
        for name in ("router", "decode-0"):
            with pytest.raises(FileNotFoundError):
                await supervisor._start(name, "a.module")
    assert visible == ["0,1", "1,0"]
