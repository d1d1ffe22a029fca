"""KV by way of a store: what is put is found, by others too; what fails does so for its request alone, and nothing is
left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.methods.store.memory import blocks_of
from pdflow.protocol.effects import PostRead
from pdflow.protocol.events import ReadEnded
from pdflow.protocol.messages import Code
from pdflow_runtime.build import LiveBuilder
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg
from pdflow_runtime.store.keys import StoreKeys
from pdflow_runtime.store.prefill_node import LiveStorePrefillNode
from pdflow_runtime.transports.named import transport_named
from tests.runtime.support.live_pair import LOCAL, LivePair, cluster, live_pair, prompt

STORE = ("transfer.method=kv-store", "pool.prefill.enable_prefix_caching=false")
BY_BLOCK = (*STORE, "transfer.store_granularity=block")
SAMPLING = Sampling(max_tokens=8, ignore_eos=True)


def putting(home: LivePair) -> LiveStorePrefillNode:
    assert isinstance(home.p, LiveStorePrefillNode)
    return home.p


async def asked(home: LivePair, name: str, tokens: list[int]) -> int:
    """The answer is that of one engine alone. How many tokens P has computed for it."""
    before = home.p.engine.prompt_tokens_computed
    assert await home.ask(name, tokens, SAMPLING) == await home.ask_alone(f"alone-{name}", tokens, SAMPLING)
    return home.p.engine.prompt_tokens_computed - before


@pytest.mark.trio
async def test_a_prompt_that_begins_as_another_is_loaded_as_far_as_it_does(model: TorchModel) -> None:
    async with live_pair(cluster(*BY_BLOCK), model) as home:
        assert await asked(home, "a", prompt(500)) == 500
        assert await asked(home, "b", [*prompt(320), *prompt(100, 1)]) == 100
        assert await asked(home, "c", prompt(500)) == 500 - 31 * 16
        assert await asked(home, "d", prompt(500, 2)) == 500
        await home.quiet()
        assert home.store is not None
        assert home.store.memory.used > 0


@pytest.mark.trio
async def test_by_the_prompt_nothing_is_loaded(model: TorchModel) -> None:
    async with live_pair(cluster(*STORE), model) as home:
        assert await asked(home, "a", prompt(100)) == 100
        assert await asked(home, "b", prompt(100)) == 100
        await home.quiet()
        assert home.store is not None
        assert home.store.notes["store: tokens not put again"] == 100


@pytest.mark.trio
async def test_what_is_kept_for_nobody_goes_when_it_is_read(model: TorchModel) -> None:
    async with live_pair(cluster(*BY_BLOCK, "transfer.store_keep=false"), model) as home:
        for name in ("a", "b"):
            assert await asked(home, name, prompt(100)) == 100
        await home.quiet()
        assert home.store is not None
        assert home.store.memory.used == 0


@asynccontextmanager
async def another_engine(home: LivePair, model: TorchModel, *overrides: str) -> AsyncIterator[LiveStorePrefillNode]:
    """A second one that puts there, in the place of the first."""
    builder = LiveBuilder(cluster("pool.prefill.replicas=2", *overrides), transport_named("shm"))
    node = builder.prefill_node("prefill-1", model)
    assert isinstance(node, LiveStorePrefillNode)
    node.stores = putting(home).stores
    node.observe = home.observe
    async with trio.open_nursery() as nursery:
        await nursery.start(node.serve, (await trio.open_tcp_listeners(0, host=LOCAL))[0])
        home.p = node
        yield node
        nursery.cancel_scope.cancel()
    await node.aclose()


@pytest.mark.trio
async def test_engines_find_what_others_have_put(model: TorchModel) -> None:
    async with live_pair(cluster(*BY_BLOCK), model) as home:
        assert await asked(home, "a", prompt(500)) == 500
        async with another_engine(home, model, *BY_BLOCK):
            assert await asked(home, "b", prompt(500)) == 500 - 31 * 16
            await home.quiet()


@pytest.mark.parametrize(("p_tp", "d_tp", "p_block", "d_block"), [(2, 1, 16, 16), (1, 2, 16, 32), (2, 2, 32, 16)])
@pytest.mark.trio
async def test_engines_may_shard_their_kv_differently(
    p_tp: int, d_tp: int, p_block: int, d_block: int, model: TorchModel
) -> None:
    tps = (f"pool.prefill.tp={p_tp}", f"pool.decode.tp={d_tp}")
    blocks = (f"pool.prefill.block_size={p_block}", f"pool.decode.block_size={d_block}")
    unit = max(p_block, d_block)
    async with live_pair(cluster(*BY_BLOCK, *tps, *blocks), model) as home:
        assert await asked(home, "a", prompt(200)) == 200
        assert await asked(home, "b", [*prompt(150), *prompt(50, 1)]) == 200 - 150 // unit * unit
        await home.quiet()


@pytest.mark.trio
async def test_what_cannot_be_loaded_is_computed(model: TorchModel) -> None:
    async with live_pair(cluster(*BY_BLOCK), model) as home:
        assert await asked(home, "a", prompt(100)) == 100
        node = putting(home)

        def fails(port: Any, effect: PostRead) -> None:
            node.put(port, ReadEnded(effect.op, False))

        node.do[PostRead] = fails
        assert await asked(home, "b", prompt(100)) == 100
        assert node.notes["store: prompts not loaded"] == 1
        await home.quiet()


@pytest.mark.trio
async def test_who_hangs_up_leaves_nothing_behind(model: TorchModel) -> None:
    """Before the store has said what is there, while it is loaded, computed and put, and when all of it is."""
    async with live_pair(cluster(*BY_BLOCK, "transfer.store_lease_s=1"), model) as home:
        assert await asked(home, "a", prompt(400)) == 400
        for step in range(24):
            leg = home.send(f"b{step}", [*prompt(320), *prompt(300, step)], SAMPLING)
            assert isinstance(leg, LivePrefillLeg)
            await trio.sleep(0.004 * step)
            if leg.answered.is_set():
                break
            home.p.abort(leg)
        assert step > 3
        # What was put when nobody waited for it any more stays for as long as its lease.
        await home.quiet(15)


@pytest.mark.trio
async def test_prompts_wait_for_room(model: TorchModel) -> None:
    """Of twelve at once, each of which takes a quarter of the store."""
    answers: dict[int, int] = {}
    scenario = cluster(*STORE, "transfer.store_bytes=1_000_000")
    async with live_pair(scenario, model) as home:
        room = home.store.memory.pool.num_blocks * 16  # type: ignore[union-attr]

        async def ask(number: int) -> None:
            answers[number] = await asked(home, f"r{number}", prompt(room // 4, number))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, number)
        assert len(answers) == 12
        leg = home.p.begin("long", "x-long", prompt(room + 1))
        await leg.answered.wait()
        assert leg.code is Code.REJECTED
        assert "too long for a store node" in leg.why
        await home.quiet()


@pytest.mark.trio
async def test_a_store_that_is_not_there_fails_the_request_alone(model: TorchModel) -> None:
    async with live_pair(cluster(*BY_BLOCK), model) as home:
        there = putting(home).stores
        for nowhere in ((), (type(there[0])(LOCAL, 0),), (type(there[0])(LOCAL, 1),)):
            putting(home).stores = nowhere
            assert await home.ask(f"r{len(nowhere)}{nowhere}", prompt(100), SAMPLING) == ([], Code.UNREACHABLE)
        await home.quiet()
        putting(home).stores = there
        assert await asked(home, "b", prompt(100)) == 100


def keys(weights: int, **of: Any) -> StoreKeys:
    return StoreKeys(**{"start": f"{weights}", "block_size": 16, "blocks": 100, "unit_tokens": 32, "nodes": 4, **of})


def test_keys_are_of_the_content_and_of_the_weights() -> None:
    items = keys(1).objects(prompt(100))
    assert [item.blocks for item in items] == [2, 2, 2, 1]
    assert blocks_of(items) == 7
    assert items == keys(1).objects(prompt(100))
    assert items[:2] == keys(1).objects([*prompt(64), 3])[:2]
    assert not {item.key for item in items} & {item.key for item in keys(2).objects(prompt(100))}
    assert len(keys(1, unit_tokens=0).objects(prompt(100))) == 1
    homes = {keys(1).home(keys(1).objects(prompt(100, seed))) for seed in range(50)}
    assert homes == {0, 1, 2, 3}


@pytest.mark.trio
async def test_a_node_that_stands_still_is_not_waited_for_before_a_prompt_is_computed(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdflow_runtime.store.calls.LOOK_S", 0.05)
    async with live_pair(cluster(*BY_BLOCK), model) as home:
        assert await asked(home, "a", prompt(100)) == 100
        there = putting(home).stores
        async with trio.open_nursery() as nursery:
            # It takes connections, and answers none.
            (still,) = await trio.open_tcp_listeners(0, host=LOCAL)
            nursery.start_soon(trio.serve_listeners, wait_for_ever, [still])
            putting(home).stores = (type(there[0])(LOCAL, still.socket.getsockname()[1]),)
            leg = home.send("b", prompt(100), SAMPLING)
            assert isinstance(leg, LivePrefillLeg)
            with trio.fail_after(30):
                while home.p.engine.prompt_tokens_computed < 200:
                    await trio.sleep(0.01)
            home.p.abort(leg)
            nursery.cancel_scope.cancel()
        await home.quiet()


async def wait_for_ever(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()
