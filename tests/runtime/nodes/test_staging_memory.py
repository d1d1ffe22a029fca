"""Methods whose KV leaves from, or lands in, memory beside the blocks: in turn, early, and nothing is left there."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import trio
from rich.console import Console

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.methods.staging import KvSize, RingStaging
from pdflow.protocol.events import PrefillBegun, SourceWithdrawn
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.serving.decode_request import DecodeStage
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.decode_node import DecodeLeg
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg
from pdflow_runtime.nodes.staged_decode_node import LiveStagedDecodeNode
from pdflow_runtime.nodes.staging_memory import RoomState, room_state
from pdflow_runtime.observe.event_log import TOKEN, Passed
from pdflow_runtime.observe.state import state_of
from pdflow_runtime.observe.top import view
from tests.runtime.nodes.test_hand_over import prompt, same_tokens
from tests.runtime.support.live_pair import ANSWER_TIMEOUT_S, Answer, LivePair, answer_of, cluster, live_pair

TOKEN_BYTES = 4096
"""Of the tiny model's KV."""
CAPACITY_KEYS = {
    "cpu-staged": ("transfer.host_buffer_bytes={}",),
    "p2p-nccl-put": ("transfer.kv_buffer_size={}", "transfer.mem_pool_size_gb=0"),
    "p2p-nccl-put-async": ("transfer.kv_buffer_size={}", "transfer.mem_pool_size_gb=0"),
    "p2p-nccl-get": ("transfer.kv_buffer_size={}",),
    "mooncake-v0": ("transfer.kv_buffer_size={}",),
}
GREEDY = Sampling(max_tokens=6, ignore_eos=True)


def with_room(method: str, tokens: int) -> tuple[str, ...]:
    """The method, with room for so many tokens beside the blocks."""
    if method == "by layer":
        return *with_room("cpu-staged", tokens), "transfer.load_by_layer=true"
    if method == "progressive":
        return ("transfer.progressive=true",)
    return f"transfer.method={method}", *(key.format(tokens * TOKEN_BYTES) for key in CAPACITY_KEYS[method])


async def empty(home: LivePair) -> None:
    """Nothing is kept beside the blocks, by either."""
    await home.quiet()
    with trio.fail_after(10):
        for node in (home.p, home.d):
            while node.staging is not None and (node.staging.held or node.staging.waiting):
                await trio.sleep(0.01)
    home.p.prefilling.assert_empty("P")
    assert not home.p.legs
    for node in (home.p, home.d):
        for rank in node.ranks.values():
            assert not rank.staged
            assert not len(rank.transfers)


@pytest.mark.parametrize(("p_tp", "d_tp", "p_block", "d_block"), [(2, 1, 16, 16), (1, 2, 32, 16), (2, 2, 16, 32)])
@pytest.mark.parametrize("method", ["cpu-staged", "mooncake-v0"])
@pytest.mark.trio
async def test_engines_may_shard_their_kv_differently(
    method: str, p_tp: int, d_tp: int, p_block: int, d_block: int, model: TorchModel
) -> None:
    tps = (f"pool.prefill.tp={p_tp}", f"pool.decode.tp={d_tp}")
    blocks = (f"pool.prefill.block_size={p_block}", f"pool.decode.block_size={d_block}")
    async with live_pair(cluster(f"transfer.method={method}", *tps, *blocks), model) as home:
        await same_tokens(home)
        await empty(home)


@pytest.mark.parametrize("method", ["cpu-staged", "p2p-nccl-put", "p2p-nccl-put-async", "mooncake-v0"])
@pytest.mark.trio
async def test_prompts_wait_in_turn_for_room(method: str, model: TorchModel) -> None:
    """There is room for the longest, and for few others beside it."""
    async with live_pair(cluster(*with_room(method, 768)), model) as home:
        await same_tokens(home)
        await empty(home)


@pytest.mark.parametrize("method", ["cpu-staged", "p2p-nccl-get", "mooncake-v0"])
@pytest.mark.trio
async def test_a_prompt_that_never_fits_there_is_refused_at_once(method: str, model: TorchModel) -> None:
    async with live_pair(cluster(*with_room(method, 128)), model) as home:
        leg = home.p.begin("r", "x-r", prompt(700))
        await leg.answered.wait()
        assert leg.code is Code.REJECTED
        assert "700 tokens is too long for a" in leg.why
        assert (await home.ask("s", prompt(100), GREEDY)).code is Code.NONE
        await empty(home)


@pytest.mark.parametrize("method", ["cpu-staged", "p2p-nccl-get", "mooncake-v0"])
@pytest.mark.trio
async def test_an_engine_is_not_drained_while_a_prompt_lies_in_staging_memory(method: str, model: TorchModel) -> None:
    async with live_pair(cluster(*with_room(method, 768)), model) as home:
        leg = home.p.begin("r", "x-r", prompt(100))
        await leg.answered.wait()
        assert not home.p.is_drained()
        home.p.put(home.p.scheduler, SourceWithdrawn("x-r"))
        await empty(home)


@pytest.mark.parametrize("method", ["mooncake-v0", "p2p-nccl-get"])
@pytest.mark.trio
async def test_operators_see_the_staging_memory(method: str, model: TorchModel) -> None:
    async with live_pair(cluster(*with_room(method, 256)), model) as home:

        def shown() -> tuple[RoomState, str]:
            state = state_of(home.p)
            assert state.staging is not None
            engines = {"prefill-0": msgspec.to_builtins(state), "decode-0": msgspec.to_builtins(state_of(home.alone))}
            console = Console(width=120)
            with console.capture() as drawn:
                console.print(view({"open": 2, "drained": [], "silent": [], "stalled": [], "engines": engines}))
            return state.staging, drawn.get()

        leg = home.p.begin("r", "x-r", prompt(250))
        await leg.answered.wait()
        assert home.p.staging is not None
        home.p.staging.enqueue("another", 100)
        staging, drawn = shown()
        assert (staging.prompts, staging.waiting) == (1, 1)
        assert 0 <= staging.free <= staging.bytes - 250 * TOKEN_BYTES
        assert staging.bytes <= 256 * TOKEN_BYTES
        assert "beside" in drawn
        assert "100% +1" in drawn
        home.p.staging.forget("another")
        home.p.put(home.p.scheduler, SourceWithdrawn("x-r"))
        await empty(home)
        staging, drawn = shown()
        assert (staging.prompts, staging.free) == (0, staging.bytes)
        assert state_of(home.alone).staging is None


def test_what_a_ring_holds_behind_its_oldest_allocation_is_not_free() -> None:
    staging = RingStaging.of_bytes(KvSize(2, 64), 4096, step_bytes=64)
    staged = []
    for number in range(2):
        staging.enqueue(f"x{number}", 8)
        admission = staging.admit_next()
        assert admission is not None
        staged.append(admission[1])
    staging.enqueue("large", 20)
    assert room_state(staging) == RoomState(4096, 2048, 2, 1)
    staging.release(staged[1])
    assert room_state(staging) == RoomState(4096, 2048, 1, 1)
    staging.release(staged[0])
    assert room_state(staging) == RoomState(4096, 4096, 0, 1)


@pytest.mark.trio
async def test_whoever_is_late_to_hang_up_takes_no_room_from_the_next_of_its_name(model: TorchModel) -> None:
    async with live_pair(cluster(*with_room("cpu-staged", 768)), model) as home:
        node = home.d
        assert isinstance(node, LiveStagedDecodeNode)
        params = KvParams(home.p.config.info, "x-r", "r", 0)
        home.p.begin("r", "x-r", prompt(100))
        before = node.begin("r", params, prompt(100), GREEDY)
        assert (await answer_of(before)).code is Code.NONE
        after = node.begin("r", msgspec.structs.replace(params, xid="x-s"), prompt(100), GREEDY)
        while node.decoding.stage_of("r") is not DecodeStage.ADMITTED:
            await trio.sleep(0.01)
        node.abort(before)
        assert node.decoding.stage_of("r") is DecodeStage.ADMITTED
        home.p.begin("r", "x-s", prompt(100))
        assert (await answer_of(after)).code is Code.NONE
        await empty(home)


@pytest.mark.trio
async def test_d_refuses_what_its_buffer_never_holds(model: TorchModel) -> None:
    async with live_pair(cluster(*with_room("p2p-nccl-put", 128)), model) as home:
        leg = home.send("r", prompt(700), GREEDY)
        assert isinstance(leg, DecodeLeg)
        assert await answer_of(leg) == ([], Code.REJECTED)


@pytest.mark.trio
async def test_a_store_that_is_full_lets_go_of_its_oldest_prompt(model: TorchModel) -> None:
    async with live_pair(cluster(*with_room("p2p-nccl-get", 256)), model) as home:
        legs = [home.send(f"r{number}", prompt(100, number), GREEDY) for number in range(3)]
        for leg in legs:
            assert isinstance(leg, LivePrefillLeg)
            await leg.answered.wait()
        answers: list[Answer] = []
        for number, leg in enumerate(legs):
            assert isinstance(leg, LivePrefillLeg)
            assert leg.params is not None
            answers.append(await answer_of(home.d.begin(f"r{number}", leg.params, prompt(100, number), GREEDY)))
        assert [answer.code for answer in answers] == [Code.STALE, Code.NONE, Code.NONE]
        for number in (1, 2):
            assert answers[number] == await home.ask_alone(f"a{number}", prompt(100, number), GREEDY)
        await empty(home)


@pytest.mark.parametrize("keys", [("transfer.method=cpu-staged",), ("transfer.progressive=true",)])
@pytest.mark.trio
async def test_layers_of_a_chunk_leave_while_the_next_are_computed(keys: tuple[str, ...], model: TorchModel) -> None:
    async with live_pair(cluster(*keys), model) as home:
        (rank,) = home.p.ranks.values()
        runner, write = home.p.engine._runner, rank.transport.write
        step = runner.step
        posted, steps = 0, 0

        def watched(*args: Any) -> None:
            nonlocal posted
            posted += 1
            write(*args)

        async def one_chunk_behind(*step_args: Any) -> Any:
            """The four layers of a chunk have left before the chunk after the next begins."""
            nonlocal steps
            while posted < 4 * (steps - 1):
                await trio.sleep(0.001)
            steps += 1
            return await step(*step_args)

        rank.transport.write = watched  # type: ignore[method-assign, assignment]
        runner.step = one_chunk_behind  # type: ignore[method-assign]
        leg = home.d.begin("r", KvParams(home.p.config.info, "x-r", "r", 0), prompt(700), GREEDY)
        home.p.begin("r", "x-r", prompt(700))
        with trio.fail_after(ANSWER_TIMEOUT_S):
            answer = await answer_of(leg)
        assert answer == await home.ask_alone("a", prompt(700), GREEDY)
        assert PrefillBegun in [type(event) for _, event in home.events]
        assert (steps, posted) == (3, 12)


@pytest.mark.trio
async def test_a_prefill_is_over_when_its_last_layer_is_there(model: TorchModel) -> None:
    """D may have answered, and P's leg been taken back, before P's step has ended: the stamp was late, or lacking."""
    async with live_pair(cluster("transfer.method=cpu-staged"), model) as home:
        runner, answered = home.p.engine._runner, trio.Event()
        step = runner.step

        async def slow(*step_args: Any) -> Any:
            results = await step(*step_args)
            await answered.wait()
            return results

        runner.step = slow  # type: ignore[method-assign]
        prompts = home.p.begin("r", "x-r", prompt(100))
        leg = home.d.begin("r", KvParams(home.p.config.info, "x-r", "r", 0), prompt(100), GREEDY)
        assert (await answer_of(leg)).code is Code.NONE
        home.p.abort(prompts)
        answered.set()
        await empty(home)
        stages = [noted for noted in home.p.event_log.kept if isinstance(noted, Passed)]
        ends = {noted.stage: noted.t for noted in stages}
        assert len(stages) == len(ends), "each once"
        (token,) = (noted.t for noted in home.d.event_log.kept if isinstance(noted, Passed) and noted.stage == TOKEN)
        assert ends["p_queue"] < ends["prefill"] < token


@pytest.mark.trio
async def test_with_put_the_engine_begins_no_step_before_all_has_gone(model: TorchModel) -> None:
    async with live_pair(cluster("transfer.method=p2p-nccl-put"), model) as home:
        node = home.p
        compose, held = node.engine._compose, []
        node.engine._compose = lambda: (held.append(bool(node.prefilling.requests.awaited)), compose())[1]  # type: ignore[method-assign, func-returns-value]
        waits: set[str] = set()

        def watch(address: str, event: object, effects: tuple[object, ...], now: int) -> None:
            home.observe(address, event, effects, now)
            waits.update(node.prefilling.requests.awaited)

        node.observe = watch
        await same_tokens(home)
        assert len(waits) == 8
        assert not any(held)
        await empty(home)


@pytest.mark.trio
async def test_from_blocks_that_are_still_filled(model: TorchModel) -> None:
    tps = ("pool.prefill.tp=2", "pool.decode.tp=1", "pool.decode.block_size=32")
    async with live_pair(cluster("transfer.progressive=true", *tps), model) as home:
        await same_tokens(home)
        await empty(home)


@pytest.mark.parametrize("method", [*CAPACITY_KEYS, "progressive", "by layer"])
@pytest.mark.trio
async def test_whoever_hangs_up_leaves_nothing_there(method: str, model: TorchModel) -> None:
    """At any moment, with room for a few prompts; those that stay get their tokens."""
    chance = random.Random(method)
    async with live_pair(cluster(*with_room(method, 512)), model) as home:
        alone = [await home.ask_alone(f"a{number}", prompt(300, number), GREEDY) for number in range(3)]
        codes: list[Code] = []

        async def one(number: int, hang_up_after_s: float) -> None:
            await trio.sleep(chance.random() * 0.3)
            leg = home.send(f"r{number}", prompt(300, number % 3), GREEDY)
            with trio.move_on_after(hang_up_after_s) as scope:
                if isinstance(leg, LivePrefillLeg):
                    await leg.answered.wait()
                    assert leg.params is not None
                    leg = home.d.begin(f"r{number}", leg.params, prompt(300, number % 3), GREEDY)
                answer = await answer_of(leg)
                codes.append(answer.code)
                assert answer.code is not Code.NONE or answer == alone[number % 3]
            if scope.cancelled_caught:
                if isinstance(leg, DecodeLeg):
                    home.d.abort(leg)
                for here in tuple(home.p.legs.values()):
                    if here.request_id == f"r{number}" and not here.answered.is_set():
                        home.p.abort(here)

        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(one, number, chance.choice((0.02, 0.1, 0.3, 30)))
        # A store that is full may let go of each before it is fetched.
        assert Code.NONE in codes or method == "p2p-nccl-get"
        # What nobody comes for is kept for its lease, from when there is room for it on.
        with trio.fail_after(30):
            while home.p.legs:
                for xid in home.p.legs:
                    home.p.put(home.p.scheduler, SourceWithdrawn(xid))
                await trio.sleep(0.05)
        await empty(home)
