"""A router that dies: the supervisor starts it again at the same port, and the engines stay. Real processes."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from pdflow_runtime.http.errors import UpstreamError
from tests.runtime.process.test_orphans import is_there, left_of
from tests.runtime.support.live_pair import prompt
from tests.runtime.support.served import ROOT, Completion, Served, served

pytestmark = pytest.mark.slow

REFERENCE = ROOT / "examples/reference.toml"
SMALL = ("pool.prefill.replicas=2", "pool.decode.replicas=2", "serve.spare_engines=1")
FRONT = "pdflow_runtime.router.front"


async def state_of(cluster: Served) -> dict[str, dict[str, int]]:
    status, body = await cluster.exchange("GET", "/admin/state")
    assert status == 200, body
    engines: dict[str, dict[str, int]] = msgspec.json.decode(body)["engines"]
    return engines


def held(engine: dict[str, int]) -> bool:
    """True if the engine has an open request, or holds KV."""
    return engine["open"] > 0 or engine["free"] < engine["blocks"]


@pytest.mark.trio
async def test_a_router_that_is_killed_under_load_is_replaced_and_the_engines_stay(tmp_path: Path) -> None:
    with served(tmp_path, REFERENCE, *SMALL) as cluster:
        engines = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(2)]
        pids = {name: cluster.pid_of(name) for name in engines}
        right = {
            number: (await cluster.ask(prompt=prompt(300, number), max_tokens=40, ignore_eos=True)).tokens
            for number in range(4)
        }
        assert (await cluster.exchange("POST", "/admin/engines/prefill-1/drain"))[0] == 200
        answers: list[tuple[int, Completion | None]] = []

        async def ask(number: int) -> None:
            fields = {"prompt": prompt(300, number % 4), "max_tokens": 40, "ignore_eos": True}
            try:
                answers.append((number, await cluster.ask(**fields, stream=number % 2 == 0)))
            except (UpstreamError, AssertionError):
                answers.append((number, None))  # an error, or a stream that broke

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for number in range(48):
                    nursery.start_soon(ask, number)
                while not answers:
                    await trio.sleep(0.01)
                first = cluster.pid_of(FRONT)
                os.kill(first, signal.SIGKILL)
                while is_there(first):
                    await trio.sleep(0.01)
            # Clients that connect while no router runs wait for the next one.
            after = await cluster.ask(prompt=prompt(300, 0), max_tokens=40, ignore_eos=True)
        assert (after.status, after.tokens) == (200, right[0])
        assert len(answers) == 48
        assert None in [answer for _, answer in answers]
        for number, answer in answers:
            assert answer is None or answer.status != 200 or answer.tokens == right[number % 4]
        assert cluster.pid_of(FRONT) != first
        assert {name: cluster.pid_of(name) for name in engines} == pids

        _, body = await cluster.exchange("GET", "/admin/state")
        state = msgspec.json.decode(body)
        assert state["drained"] == ["prefill-1"]
        with trio.fail_after(60):
            while any(
                engine["open"] or engine["free"] < engine["blocks"] for engine in (await state_of(cluster)).values()
            ):
                await trio.sleep(0.1)
        assert (await cluster.exchange("POST", "/admin/engines/prefill-1/resume"))[0] == 200
    assert cluster.process.returncode == 0, cluster.log.read_text()
    assert "Traceback" not in cluster.log.read_text()
    assert left_of([first, *pids.values()]) == []


@pytest.mark.trio
async def test_the_next_router_knows_which_engines_were_added_ended_or_resumed(tmp_path: Path) -> None:
    with served(tmp_path, REFERENCE, *SMALL, "router.heartbeat_s=0.5") as cluster:

        async def until(expected: set[str]) -> None:
            with trio.fail_after(60):
                while {name for name, engine in (await state_of(cluster)).items() if engine is not None} != expected:
                    await trio.sleep(0.02)

        for what in ("drain", "resume"):
            assert (await cluster.exchange("POST", f"/admin/engines/prefill-0/{what}"))[0] == 200
        assert (await cluster.exchange("POST", "/admin/engines", b'{"pool": "decode"}'))[0] == 202
        await until({"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"})
        assert (await cluster.exchange("DELETE", "/admin/engines/decode-0"))[0] == 202
        await until({"prefill-0", "prefill-1", "decode-1", "decode-2"})
        with trio.fail_after(60):
            while "decode-0 exited, as ordered" not in cluster.log.read_text():
                await trio.sleep(0.02)
        os.kill(cluster.pid_of("decode-1"), signal.SIGKILL)
        router = cluster.pid_of(FRONT)
        os.kill(router, signal.SIGKILL)
        while is_there(router):
            await trio.sleep(0.01)
        await until({"prefill-0", "prefill-1", "decode-1", "decode-2"})
        state = msgspec.json.decode((await cluster.exchange("GET", "/admin/state"))[1])
        assert state["drained"] == []
        assert "decode-0" not in state["engines"], "it ended for good, and is not expected"
        assert (await cluster.exchange("POST", "/admin/engines", b'{"pool": "decode"}')) == (
            202,
            b'{"engine":"decode-0"}',
        )
        await until({"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"})
        assert (await cluster.ask(prompt=prompt(40), max_tokens=4)).status == 200


@pytest.mark.trio
async def test_a_removal_under_way_is_continued_by_the_next_router(tmp_path: Path) -> None:
    """The engine has an open request when its removal is ordered, and none after the router's death."""
    with served(tmp_path, REFERENCE, *SMALL) as cluster, trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with suppress(UpstreamError, AssertionError):
                    await cluster.ask(prompt=prompt(300), max_tokens=2000, ignore_eos=True, stream=True)

            for _ in range(4):
                nursery.start_soon(ask)
            while not held((await state_of(cluster))["decode-0"]):
                await trio.sleep(0.02)
            assert (await cluster.exchange("DELETE", "/admin/engines/decode-0"))[0] == 202
            assert "decode-0 exited" not in cluster.log.read_text()
            os.kill(cluster.pid_of(FRONT), signal.SIGKILL)
        while "decode-0 exited, as ordered" not in cluster.log.read_text():
            await trio.sleep(0.02)
        assert (await cluster.ask(prompt=prompt(40), max_tokens=4)).status == 200


@pytest.mark.nightly
@pytest.mark.trio
async def test_a_router_that_dies_soon_after_each_start_ends_the_cluster(tmp_path: Path) -> None:
    with served(tmp_path, REFERENCE, *SMALL) as cluster, trio.fail_after(180):
        for number in range(5):
            while cluster.log.read_text().count("the router is up again") < number:
                await trio.sleep(0.02)
            os.kill(cluster.pid_of(FRONT), signal.SIGKILL)
        while cluster.process.poll() is None:
            await trio.sleep(0.05)
        assert cluster.process.returncode == 4
        assert "the router ended 5 times in a row within 10 s of its start" in cluster.log.read_text()


FAILS_AGAIN = """
import os, sys
from pathlib import Path
if "--listener" in sys.orig_argv:
    ran = Path({marker!r})
    if ran.exists():
        os._exit(9)
    ran.touch()
"""


@pytest.mark.trio
async def test_a_router_that_never_starts_again_ends_the_cluster_with_its_exit_code(tmp_path: Path) -> None:
    first = FAILS_AGAIN.format(marker=str(tmp_path / "ran"))
    with served(tmp_path, REFERENCE, *SMALL, first=first) as cluster:
        pids = [cluster.pid_of(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", FRONT)]
        os.kill(pids[-1], signal.SIGKILL)
        with trio.fail_after(120):
            while cluster.process.poll() is None:
                await trio.sleep(0.05)
        assert cluster.process.returncode == 4
        log = cluster.log.read_text()
        assert len(re.findall(r"router did not start: .* \(attempt \d of 5\)", log)) == 5
        assert "5 attempts to start it again failed: the cluster stops" in log
        assert "Traceback" not in log
        assert left_of([*pids, cluster.process.pid]) == []


@pytest.mark.trio
async def test_a_stop_while_no_router_runs_ends_the_engines(tmp_path: Path) -> None:
    first = FAILS_AGAIN.format(marker=str(tmp_path / "ran"))
    with served(tmp_path, REFERENCE, *SMALL, first=first) as cluster:
        pids = [cluster.pid_of(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", FRONT)]
        os.kill(pids[-1], signal.SIGKILL)
        with trio.fail_after(60):
            while "router did not start" not in cluster.log.read_text():
                await trio.sleep(0.02)
            cluster.process.send_signal(signal.SIGTERM)
            while cluster.process.poll() is None:
                await trio.sleep(0.02)
        assert cluster.process.returncode == 0, cluster.log.read_text()
        assert left_of([*pids, cluster.process.pid]) == []
