"""A prefill engine whose process is killed: its address refuses, and D's requests end in 2 s, not in 15 s of silence.

No router is asked, which would see P die and take the decode legs back: each leg goes to its engine directly.
"""

from __future__ import annotations

import re
import signal
from typing import Any

import msgspec
import pytest
import trio

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from tests.runtime.process.test_roles import ComponentProcesses, components

pytestmark = pytest.mark.slow
__all__ = ["components"]

RESOLVED_WITHIN_S = 2.0
WHERE = re.compile(r"HTTP on [\d.]+:(\d+); rank port (\d+)")


class Engines:
    """One prefill and one decode engine, each a process of its own."""

    def __init__(self, components: ComponentProcesses) -> None:
        self.components = components
        self.ports: dict[str, tuple[int, int]] = {}
        """Of each engine, where it takes requests, and where its ranks listen."""

    async def start(self, *overrides: str) -> None:
        for name in ("decode-0", "prefill-0"):
            self.components.start(name, *overrides, secret=None)
        with trio.fail_after(60):
            for name in ("decode-0", "prefill-0"):
                log = self.components.log(name)
                while (found := WHERE.search(log.read_text() if log.exists() else "")) is None:
                    await trio.sleep(0.05)
                self.ports[name] = int(found[1]), int(found[2])

    async def leg(self, name: str, request_id: str, tokens: int, params: dict[str, Any]) -> tuple[int, str, float]:
        """(status, code of the error, when it ended) of one leg. Status 0: its engine has died."""
        body = {"prompt": list(range(5, 5 + tokens)), "max_tokens": 2, "ignore_eos": True, "kv_transfer_params": params}
        headers = ((b"Content-Type", b"application/json"), (b"X-Request-Id", request_id.encode()))
        client = HttpClient()
        try:
            data = msgspec.json.encode(body)
            async with client.request(
                "POST", "127.0.0.1", self.ports[name][0], "/v1/completions", headers, data
            ) as answer:
                result = msgspec.json.decode(await answer.read())
                return answer.status, result.get("error", {}).get("code") or "", trio.current_time()
        except UpstreamError:
            return 0, "", trio.current_time()
        finally:
            client.close()

    async def prefill(self, xid: str, tokens: int) -> tuple[int, str, float]:
        return await self.leg("prefill-0", xid, tokens, {"do_remote_decode": True, "pdflow": {"xid": xid}})

    async def decode(self, xid: str, tokens: int) -> tuple[int, str, float]:
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "prefill-0",
            "remote_request_id": xid,
            "remote_host": "127.0.0.1",
            "remote_port": self.ports["prefill-0"][1],
            "tp_size": 1,
            "pp_size": 1,
            "pdflow": {"xid": xid, "block_size": 16},
        }
        return await self.leg("decode-0", f"d-{xid}", tokens, params)


@pytest.mark.parametrize("stopped_first", [False, True], ids=["running", "stopped"])
@pytest.mark.trio
async def test_a_request_that_waits_for_a_killed_p_is_resolved(
    components: ComponentProcesses, stopped_first: bool
) -> None:
    """Before its WRITE: P has not been asked for the prompt. One that is only stopped refuses nobody."""
    engines = Engines(components)
    await engines.start()
    ended: list[tuple[int, str, float]] = []

    async def ask() -> None:
        ended.append(await engines.decode("x", 200))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1.5)
        if stopped_first:
            components.signal("prefill-0", signal.SIGSTOP)
            await trio.sleep(2.5)
        assert ended == []
        killed_at = trio.current_time()
        components.signal("prefill-0", signal.SIGKILL)
    ((status, code, at),) = ended
    assert (status, code) == (503, "PEER_DEAD")
    assert at - killed_at < RESOLVED_WITHIN_S
    assert "Traceback" not in components.logs()


@pytest.mark.parametrize("landed", [0, 1, 8])
@pytest.mark.trio
async def test_no_request_outlives_a_killed_p_by_more_than_2_s(components: ComponentProcesses, landed: int) -> None:
    """Many prompts at once, before, during and behind their WRITEs; P is killed when so many have been decoded."""
    engines = Engines(components)
    await engines.start()
    assert (await engines.prefill("warm", 100))[0] == 200
    assert (await engines.decode("warm", 100))[0] == 200
    ended: list[tuple[int, str, float]] = []

    async def ask(number: int) -> None:
        ended.append(await engines.decode(f"x{number}", 1000))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(ask, number)
                nursery.start_soon(engines.prefill, f"x{number}", 1000)
            await trio.sleep(0.05)
            while len(ended) < landed:
                await trio.sleep(0.001)
            killed_at = trio.current_time()
            components.signal("prefill-0", signal.SIGKILL)
    assert len(ended) == 24
    assert max(at for *_, at in ended) - killed_at < RESOLVED_WITHIN_S
    assert {(status, code) for status, code, _ in ended} <= {(200, ""), (503, "PEER_DEAD"), (503, "UNREACHABLE")}
    assert "Traceback" not in components.logs()
