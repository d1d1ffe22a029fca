"""Two routers in front of the same engines, of separately started components and of a cluster on one host: requests
sent to one of them go on while the other one is killed. Real processes, synthetic engines."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import trio

from pdflow_runtime.http.sockets import listen
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.signed import Signer
from tests.runtime.process.test_orphans import is_there
from tests.runtime.process.test_roles import REFERENCE, SECRET, ComponentProcesses
from tests.runtime.support.served import served

pytestmark = pytest.mark.slow

REQUESTS = 16
TOKENS = 60


def free_port() -> int:
    with closing(listen("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class TwoRouters(ComponentProcesses):
    """The first router is at `port`, the other one at `other`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.other = free_port()

    async def state(self, port: int) -> dict[str, object]:
        signed = Signer(Secret(SECRET.encode())).sign("router", "GET", "/admin/state", b"")
        status, body = await self.exchange("GET", "/admin/state", headers=signed, port=port)
        assert status == 200, body
        found: dict[str, object] = msgspec.json.decode(body)
        return found

    async def both_healthy(self) -> None:
        with trio.fail_after(60):
            for port in (self.port, self.other):
                while (await self.exchange("GET", "/health", port=port))[0] != 200:
                    await trio.sleep(0.05)

    async def tokens(self, number: int, port: int) -> tuple[int, list[int]]:
        fields = {"prompt": list(range(5, 105 + number)), "max_tokens": TOKENS, "temperature": 0}
        body = msgspec.json.encode({**fields, "ignore_eos": True, "return_token_ids": True})
        status, answer = await self.exchange("POST", "/v1/completions", body, port=port)
        return status, msgspec.json.decode(answer)["choices"][0]["token_ids"] if status == 200 else []

    async def all_of_one_survive(self, survivor: int, victim: int) -> int:
        """Send requests to both routers, and kill the victim's process; return how many of the survivor's went on."""
        right = [(await self.tokens(number, survivor))[1] for number in range(REQUESTS)]
        answers: dict[int, tuple[int, list[int]]] = {}
        lost: list[int] = []

        async def ask(number: int) -> None:
            answers[number] = await self.tokens(number, survivor)

        async def ask_other(number: int) -> None:
            status, tokens = await self.tokens(number, self.other if survivor == self.port else self.port)
            assert status != 200 or tokens == right[number]
            lost.append(status)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(REQUESTS):
                    nursery.start_soon(ask, number)
                    nursery.start_soon(ask_other, number)
                await trio.sleep(0.1)
                os.kill(victim, signal.SIGKILL)
        assert answers == {number: (200, tokens) for number, tokens in enumerate(right)}
        assert len(lost) == REQUESTS
        return len([status for status in lost if status != 200])


@pytest.mark.trio
async def test_requests_of_one_router_go_on_when_the_other_is_killed(tmp_path: Path) -> None:
    components = TwoRouters(tmp_path)
    both = f"serve.router=127.0.0.1:{components.port},127.0.0.1:{components.other}"
    try:
        for name in ("decode-0", "prefill-0", "router"):
            components.start(name, both)
        components.start("router-b", both, port=components.other)
        await components.both_healthy()

        path = "/admin/engines/prefill-0/drain"
        signed = Signer(Secret(SECRET.encode())).sign("router", "POST", path, b"")
        assert (await components.exchange("POST", path, headers=signed, port=components.other))[0] == 200
        assert (await components.state(components.other))["drained"] == ["prefill-0"]
        assert (await components.state(components.port))["drained"] == []
        path = "/admin/engines/prefill-0/resume"
        signed = Signer(Secret(SECRET.encode())).sign("router", "POST", path, b"")
        assert (await components.exchange("POST", path, headers=signed, port=components.other))[0] == 200

        pids = {name: components.processes[name].pid for name in ("router", "router-b")}
        lost = await components.all_of_one_survive(components.port, pids["router-b"])
        assert lost > 0, "the killed router had open requests"
        await components.ended("router-b")
        components.start("router-b", both, port=components.other)
        await components.both_healthy()
        assert await components.all_of_one_survive(components.other, pids["router"]) > 0
        assert "Traceback" not in components.logs()
    finally:
        for process in components.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.mark.trio
async def test_a_second_router_beside_a_cluster_of_one_host(tmp_path: Path) -> None:
    components = TwoRouters(tmp_path)
    settings = (
        "pool.prefill.replicas=1",
        "pool.decode.replicas=1",
        "serve.transport=tcp",
        f"serve.secret_file={tmp_path / 'secret'}",
        f"serve.router=127.0.0.1:{components.other}",
    )
    try:
        with served(tmp_path, REFERENCE, *settings) as cluster:
            components.port = cluster.port
            components.start("router-b", "router.heartbeat_s=3", "router.silent_after_s=10", port=components.other)
            await components.both_healthy()
            router = cluster.pid_of("pdflow_runtime.router.front")
            assert await components.all_of_one_survive(components.other, router) > 0
            while is_there(router):
                await trio.sleep(0.01)
            await components.both_healthy()
            lost = await components.all_of_one_survive(components.port, components.processes["router-b"].pid)
            assert lost > 0
        assert "Traceback" not in components.logs()
    finally:
        for process in components.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
