"""A store as processes of a cluster: answers are those of one engine alone, and go on when a node of it dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.scenario.reading.load import load
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.models import TorchModel
from pdflow_sim.check.counterexamples.trace import follow
from tests.runtime.process.test_cluster import QUICKSTART, prompt
from tests.runtime.process.test_roles import ComponentProcesses
from tests.runtime.support.live_pair import live_pair
from tests.runtime.support.served import Completion, Served, served
from tests.runtime.support.value_server import KINDS, KeptServer, kept_server, program

pytestmark = pytest.mark.slow
STORE = (
    "transfer.method=kv-store",
    "transfer.store_granularity=block",
    "transfer.store_nodes=2",
    "transfer.store_lease_s=2",
    "pool.prefill.enable_prefix_caching=false",
    "pool.decode.replicas=1",
    "router.on_failure=recompute",
)
PROMPTS = [[*prompt(256, number % 8), *prompt(30 + number, number)] for number in range(24)]
"""Of eight beginnings: the node that has one follows from its hash, so that three may all be at one node."""
OUTPUT = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), QUICKSTART, *STORE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one engine alone says to each prompt."""
    found: list[list[int]] = []

    async def ask() -> None:
        async with live_pair(scenario, TorchModel(scenario)) as home:
            sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True)
            for number, tokens in enumerate(PROMPTS):
                found.append((await home.ask_alone(f"r{number}", tokens, sampling)).tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        scenario = load(QUICKSTART)
        trio.run(ask)
    return found


async def answers(cluster: Served) -> list[Completion]:
    """To all prompts, at once."""
    found: dict[int, Completion] = {}

    async def ask(number: int) -> None:
        found[number] = await cluster.ask(prompt=PROMPTS[number], max_tokens=OUTPUT, ignore_eos=True)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(len(PROMPTS)):
                nursery.start_soon(ask, number)
    return [found[number] for number in range(len(PROMPTS))]


async def computed(cluster: Served) -> float:
    """Tokens of prompts, by both prefill engines."""
    found = 0.0
    for name in ("prefill-0", "prefill-1"):
        (port,) = re.findall(rf"component={name} .*HTTP on [\d.]+:(\d+)", cluster.log.read_text())
        engine = Served(cluster.process, f"http://127.0.0.1:{port}", cluster.log)
        _, text = await engine.exchange("GET", "/metrics")
        (count,) = re.findall(rb"^pdflow_prompt_tokens_computed_total (\S+)$", text, re.MULTILINE)
        found += float(count)
    return found


async def states(cluster: Served) -> dict[str, dict[str, Any] | None]:
    _, body = await cluster.exchange("GET", "/admin/state")
    engines: dict[str, dict[str, Any] | None] = msgspec.json.decode(body)["engines"]
    return engines


async def quiet(cluster: Served) -> None:
    """Until no engine holds anything, nor a store for anybody."""
    with trio.fail_after(40):
        while True:
            held = [
                state is None or (state["open"] if state["role"] == "store" else state["blocks"] != state["free"])
                for state in (await states(cluster)).values()
            ]
            if not any(held):
                return
            await trio.sleep(0.1)


@pytest.mark.trio
async def test_the_tokens_are_those_of_one_engine_and_no_beginning_is_computed_twice(
    cluster: Served, right: list[list[int]]
) -> None:
    assert [answer.tokens for answer in await answers(cluster)] == right
    before = await computed(cluster)
    assert [answer.tokens for answer in await answers(cluster)] == right
    rests = sum((len(tokens) - 1) % 16 + 1 for tokens in PROMPTS)
    assert await computed(cluster) - before == rests
    await quiet(cluster)


@pytest.mark.trio
async def test_a_killed_node_is_done_without_until_it_is_back(cluster: Served, right: list[list[int]]) -> None:
    """What cannot be put or got is computed by D, as [router] says."""

    async def kill() -> None:
        await trio.sleep(0.15)
        os.kill(cluster.pid_of("store-0"), signal.SIGKILL)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        found = await answers(cluster)
    assert [answer.tokens for answer in found] == right
    with trio.fail_after(30):
        while (state := (await states(cluster))["store-0"]) is None or state["free"] == state["blocks"]:
            assert [answer.tokens for answer in await answers(cluster)] == right
    await quiet(cluster)
    assert "Traceback" not in cluster.log.read_text()


def test_what_is_checked_answers_as_the_cluster_has(tmp_path: Path) -> None:
    """Each event of each endpoint, those of the store among them, told again to the machine that is checked."""
    few = (*STORE, "pool.prefill.replicas=1")
    with served(tmp_path, QUICKSTART, *few, events=tmp_path / "run") as cluster:
        assert {answer.status for answer in trio.run(answers, cluster)} == {200}
    followed = follow(load(QUICKSTART, overrides=few), tmp_path / "run/events.jsonl")
    assert followed.events > len(PROMPTS) * 20


@pytest.fixture
def components(tmp_path: Path) -> Iterator[ComponentProcesses]:
    made = ComponentProcesses(tmp_path)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.trio
async def test_a_node_is_started_by_itself_as_an_engine_is(components: ComponentProcesses) -> None:
    """Synthetic engines, which know a secret, and say of each token whether its KV is what P made."""
    names = ("decode-0", "prefill-0", "router", "store-0")
    for name in names:
        components.start(name, "transfer.method=kv-store", "router.on_failure=recompute")
    await components.healthy()
    await components.answers()
    await components.kill("store-0")
    await components.healthy(False)
    await components.answers()
    components.start("store-0", "transfer.method=kv-store", "router.on_failure=recompute")
    await components.healthy()
    await components.answers()
    for name in names:
        components.signal(name, signal.SIGTERM)
    assert [await components.ended(name) for name in names] == [0, 0, 0, 0]
    assert "Traceback" not in components.logs()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptServer]:
    """Of whichever kind there is; `test_store_outlived.py` has both."""
    kind = next((kind for kind in KINDS if program(kind) is not None), KINDS[0])
    with kept_server(kind, tmp_path_factory.mktemp("kept")) as server:
        yield server


@pytest.fixture(scope="module")
def backed(server: KeptServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("backed"), QUICKSTART, *STORE, f"serve.store_url={server.url}") as cluster:
        yield cluster


async def backings(cluster: Served) -> dict[str, Any]:
    """Of the nodes that are up."""
    return {
        name: state["backing"]
        for name, state in (await states(cluster)).items()
        if state is not None and state["role"] == "store"
    }


@pytest.mark.trio
async def test_killed_nodes_have_it_again_from_their_server(backed: Served, right: list[list[int]]) -> None:
    assert [answer.tokens for answer in await answers(backed)] == right
    await quiet(backed)
    before = await computed(backed)
    for name in ("store-0", "store-1"):
        os.kill(backed.pid_of(name), signal.SIGKILL)
    with trio.fail_after(120):
        while len(await backings(backed)) < 2:
            await trio.sleep(0.1)
    for tokens, expected in zip(PROMPTS, right, strict=True):
        assert (await backed.ask(prompt=tokens, max_tokens=OUTPUT, ignore_eos=True)).tokens == expected
    # How much is there in time depends on the machine.
    assert await computed(backed) - before < before / 2
    assert sum(state["objects"]["found"] for state in (await backings(backed)).values()) > 0
    await quiet(backed)
    assert "Traceback" not in backed.log.read_text()


@pytest.mark.trio
async def test_no_request_fails_by_a_server_that_dies_and_comes_back(
    backed: Served, server: KeptServer, right: list[list[int]]
) -> None:
    async def restart() -> None:
        await trio.sleep(0.2)
        server.kill()
        await trio.sleep(1)
        await trio.to_thread.run_sync(server.start)

    for _ in range(2):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(restart)
            found = await answers(backed)
        assert [answer.tokens for answer in found] == right
    with trio.fail_after(30):
        while not all(state["up"] for state in (await backings(backed)).values()):
            await trio.sleep(0.1)
    await quiet(backed)
    assert "Traceback" not in backed.log.read_text()


@pytest.mark.trio
async def test_with_retries_a_dead_store_fails_no_request(tmp_path: Path, right: list[list[int]]) -> None:
    """Each retry would need the node that its prompt's key names; the last attempt is D's alone."""
    overrides = (*STORE, "router.on_failure=retry", "transfer.store_nodes=1")
    with served(tmp_path, QUICKSTART, *overrides) as cluster:
        store = cluster.pid_of("store-0")
        os.kill(store, signal.SIGKILL)
        for _ in range(3):
            found = await answers(cluster)
            assert [answer.status for answer in found] == [200] * len(PROMPTS)
            assert [answer.tokens for answer in found] == right
        await quiet(cluster)
