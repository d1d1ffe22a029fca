"""What a store's node has is kept in a real Valkey or Redis: found again when the node has lost it, and done without
when the server is gone, full, slow or lies. The tokens are those of one engine alone, always."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.store.backing import Backing
from tests.runtime.store.test_store import BY_BLOCK, asked, prompt
from tests.runtime.support.live_pair import LivePair, cluster, live_pair
from tests.runtime.support.value_server import KINDS, KeptServer, kept_server

pytestmark = pytest.mark.slow
PROMPT = prompt(500)
KEPT = 31
"""Blocks of it that have keys: the last one has its end."""
LOADED = 500 - 16 * KEPT
"""What is computed of it when these are found."""


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeptServer]:
    with kept_server(request.param, tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def _long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a server that serves is waited for, however busy the machine is."""
    for name in ("backing.LOOKED_S", "server.ANSWER_S", "calls.LOOK_S"):
        monkeypatch.setattr(f"pdflow_runtime.store.{name}", 20.0)


def backing(home: LivePair) -> Backing:
    assert home.store is not None
    assert home.store.backing is not None
    return home.store.backing


def store_overrides(server: KeptServer, *overrides: str) -> tuple[str, ...]:
    return (*BY_BLOCK, f"serve.store_url={server.url}", *overrides)


async def put(model: TorchModel, *overrides: str) -> None:
    """The prompt, in a first life of everything but the server."""
    async with live_pair(cluster(*overrides), model) as home:
        assert await asked(home, "a", PROMPT) == len(PROMPT)
        await home.quiet()
        assert backing(home).counts["saved"] == KEPT


async def looked_for(model: TorchModel, computed: int, *overrides: str) -> dict[str, int]:
    """In another life, whose P computes so many tokens of it. What became of the objects."""
    async with live_pair(cluster(*overrides), model) as home:
        assert await asked(home, "b", PROMPT) == computed
        await home.quiet()
        return dict(backing(home).counts)


@pytest.mark.trio
async def test_a_restarted_node_finds_the_objects_of_its_former_incarnation(
    model: TorchModel, server: KeptServer
) -> None:
    overrides = store_overrides(server)
    await put(model, *overrides)
    async with live_pair(cluster(*overrides), model) as home:
        assert await asked(home, "b", PROMPT) == LOADED
        assert backing(home).counts["found"] == KEPT
        assert await asked(home, "c", [*prompt(320), *prompt(100, 1)]) == 100
        await home.quiet()
    with server.asked() as client:
        assert all(0 < client.ttl(name) <= 86_400 for name in client.scan_iter())


@pytest.mark.parametrize(("p_tp", "d_tp", "p_block", "d_block"), [(2, 1, 16, 16), (1, 2, 16, 32), (2, 2, 32, 16)])
@pytest.mark.trio
async def test_engines_may_shard_their_kv_differently(
    p_tp: int, d_tp: int, p_block: int, d_block: int, model: TorchModel, server: KeptServer
) -> None:
    tps = (f"pool.prefill.tp={p_tp}", f"pool.decode.tp={d_tp}")
    blocks = (f"pool.prefill.block_size={p_block}", f"pool.decode.block_size={d_block}")
    unit = max(p_block, d_block)
    kept = 499 // unit
    for computed in (500, 500 - kept * unit):
        async with live_pair(cluster(*store_overrides(server, *tps, *blocks)), model) as home:
            assert await asked(home, "a", PROMPT) == computed
            await home.quiet()


@pytest.mark.trio
async def test_another_layout_finds_nothing_and_harms_nothing(model: TorchModel, server: KeptServer) -> None:
    await put(model, *store_overrides(server))
    await put(model, *store_overrides(server, "pool.decode.tp=2", "pool.prefill.tp=2"))
    assert (await looked_for(model, LOADED, *store_overrides(server)))["bad"] == 0


@pytest.mark.trio
async def test_values_that_are_not_what_was_put_are_misses(model: TorchModel, server: KeptServer) -> None:
    """Others have been at the server: no token is wrong by it, and what was right before the first is used."""
    overrides = store_overrides(server)
    await put(model, *overrides)
    with server.asked() as client:
        names = sorted(client.keys())
        for at, name in enumerate(names):
            match at % 5:
                case 0:
                    client.setrange(name, 100, b"\x7f")
                case 1:
                    client.set(name, client.get(name)[:-1])
                case 2:
                    client.append(name, b"x" * 1_000_000)
                case 3:
                    client.delete(name)
                    client.lpush(name, "a list")
                case 4:
                    client.rename(name, f"{name}x")
    counts = await looked_for(model, len(PROMPT), *overrides)
    assert counts["found"] == 0
    assert counts["bad"] + counts["missed"] == 1
    assert counts["saved"] == KEPT
    # What was computed instead stands there now.
    assert (await looked_for(model, LOADED, *overrides))["found"] == KEPT


@pytest.mark.trio
async def test_a_server_that_is_started_again_is_used_again(model: TorchModel, server: KeptServer) -> None:
    """Requests go on while it is away; what the node has it gets again when that is put again."""
    async with live_pair(cluster(*store_overrides(server)), model) as home:
        assert await asked(home, "a", PROMPT) == len(PROMPT)
        await home.quiet()
        server.kill()
        assert await asked(home, "b", PROMPT) == LOADED
        assert await asked(home, "c", prompt(100, 3)) == 100
        await home.quiet()
        assert not backing(home).up
        await trio.to_thread.run_sync(server.start)
        with trio.fail_after(20):
            while not backing(home).up:
                await trio.sleep(0.05)
        assert await asked(home, "d", PROMPT) == LOADED
        await home.quiet()
    assert (await looked_for(model, LOADED, *store_overrides(server)))["found"] == KEPT


@pytest.mark.trio
async def test_a_server_that_stands_still_is_done_without(
    model: TorchModel, server: KeptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdflow_runtime.store.server.ANSWER_S", 0.1)
    async with live_pair(cluster(*store_overrides(server)), model) as home:
        server.pause()
        assert await asked(home, "a", PROMPT) == len(PROMPT)
        assert await asked(home, "b", prompt(100, 3)) == 100
        await home.quiet()
        assert not backing(home).up
        assert backing(home).counts["saved"] == 0
        server.pause(over=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.trio
async def test_a_full_server_is_done_without(kind: str, model: TorchModel, tmp_path: Path) -> None:
    with kept_server(kind, tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as server:
        async with live_pair(cluster(*store_overrides(server)), model) as home:
            assert await asked(home, "a", PROMPT) == len(PROMPT)
            await home.quiet()
            assert await asked(home, "b", PROMPT) == LOADED, "the node has it"
            counts = backing(home).counts
            assert counts["saved"] == 0
            assert counts["refused"] >= KEPT
            assert backing(home).up


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.trio
async def test_a_server_that_asks_for_a_password(
    kind: str, model: TorchModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From a file or the environment; who has none, or another, goes on without the server."""
    file = tmp_path / "password"
    file.write_text("hunter2 of the tests\n")
    file.chmod(0o600)
    with kept_server(kind, tmp_path, "--requirepass", "hunter2 of the tests") as server:
        await put(model, *store_overrides(server, f"serve.store_password_file={file}"))
        monkeypatch.setenv("PDFLOW_STORE_PASSWORD", "hunter2 of the tests")
        assert (await looked_for(model, LOADED, *store_overrides(server)))["found"] == KEPT
        for wrong in (None, "hunter3"):
            monkeypatch.delenv("PDFLOW_STORE_PASSWORD")
            if wrong is not None:
                monkeypatch.setenv("PDFLOW_STORE_PASSWORD", wrong)
            assert (await looked_for(model, len(PROMPT), *store_overrides(server)))["found"] == 0
            monkeypatch.setenv("PDFLOW_STORE_PASSWORD", "")
    assert "hunter" not in caplog.text
    assert "requests continue without it" in caplog.text
