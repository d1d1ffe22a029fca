"""The synthetic engine: as slow as the simulated one, and its tokens tell right KV from wrong."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from pdflow.cost import LinearTime, StepCost
from pdflow.engine import Engine, Finished, Limits, Sequence
from pdflow.layout.descriptors import RankMemory, rank_memory
from pdflow.layout.shapes import KvShape
from pdflow.memory.paged import PagedPool
from pdflow_runtime.engines.config import ModelError
from pdflow_runtime.engines.job import GREEDY, Job, Sampled, Sampling, TokenRequest, Work
from pdflow_runtime.engines.loop import EngineOutput, LiveEngine
from pdflow_runtime.engines.step_load import StepLoad
from pdflow_runtime.engines.synthetic import SyntheticRunner

SHAPE = KvShape(num_layers=3, num_kv_heads=4, head_dim=8, bytes_per_value=2, block_size=4)
COST = StepCost(h0=2 * 10**9, c1=10**8, c2=10**6, a2=10**5, linear=LinearTime(slope_ps=10**8, floor_ps=10**9))
BLOCKS = 40


class Bench:
    def __init__(self, tp: int = 1) -> None:
        self.memory: RankMemory = rank_memory(SHAPE, BLOCKS, tp)
        self.regions = [bytearray(SHAPE.rank_block_bytes(tp) * BLOCKS) for _ in range(tp)]
        views = [memoryview(region) for region in self.regions]
        self.runner = SyntheticRunner(StepCost(), SHAPE, [self.memory] * tp, views, 512)

    async def token(
        self, tokens: list[int], start: int, blocks: range, sampling: Sampling = GREEDY, **how: bool
    ) -> int:
        work = Work(tuple(tokens[start:]), start, tuple(blocks), TokenRequest(sampling, 0), **how)
        (sampled,) = await self.runner.step([work])
        assert isinstance(sampled, Sampled)
        return sampled.token


PROMPT = [random.Random(1).randrange(512) for _ in range(30)]


@pytest.mark.trio
async def test_steps_end_when_the_simulated_engines_do(autojump_clock: trio.testing.MockClock) -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, block_size=4)
    # Prompts of many chunks, more sequences than seats, blocks for fewer than want them.
    lengths = [(30, 20), (5, 40), (17, 12), (3, 30), (40, 25), (1, 5)]
    simulated = Engine(limits, COST, PagedPool(22), exact=True)
    expected = {}
    for index, (prompt, output) in enumerate(lengths):
        simulated.submit(Sequence(index, prompt, output), 0)
    while (wake := simulated.wake_at()) is not None:
        expected |= {outcome.seq.index: outcome.at_ns for outcome in simulated.advance(wake)}  # type: ignore[union-attr]
    ended: dict[int, int] = {}

    def on_output(outcome: EngineOutput) -> None:
        if isinstance(outcome, Finished):
            ended[outcome.seq.index] = outcome.at_ns - began

    memory = rank_memory(SHAPE, BLOCKS, 1)
    region = memoryview(bytearray(SHAPE.rank_block_bytes(1) * BLOCKS))
    live = LiveEngine(SyntheticRunner(COST, SHAPE, [memory], [region], 512), limits, PagedPool(22), on_output)
    began = int(trio.current_time() * 1e9)
    for index, (prompt, output) in enumerate(lengths):
        live.submit(Job(Sequence(index, prompt, output), [index] * prompt))
    with trio.move_on_after(60):
        await live.run()
    assert live.preemptions == simulated.preemptions > 0
    assert set(ended) == set(expected)
    for index, at in expected.items():
        assert ended[index] == pytest.approx(at, abs=1000)


@pytest.mark.parametrize(("copy_ms", "step_ms"), [(1, 31), (20, 70)], ids=["faster", "slower"])
@pytest.mark.trio
async def test_a_step_that_waits_for_copies_ends_when_the_simulated_one_does(
    copy_ms: int, step_ms: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Three layers of 10 ms. Their KV is there when all has been copied, and not before."""
    p, d = Bench(), Bench()
    expected = await p.token(PROMPT, 0, range(8))
    memory = rank_memory(SHAPE, BLOCKS, 1)
    runner = SyntheticRunner(StepCost(h0=30 * 10**9), SHAPE, [memory], [memoryview(d.regions[0])], 512)

    def copy(layer: int) -> None:
        trio.from_thread.run_sync(autojump_clock.jump, copy_ms / 1000)
        if layer == SHAPE.num_layers - 1:
            copied(p, d, [*range(8)])

    load = StepLoad(SHAPE.num_layers)
    load.add(copy, lambda: None)
    begun = trio.current_time()
    work = Work((PROMPT[29],), 29, tuple(range(8)), TokenRequest(GREEDY, 0), True, (0, 1, 2, 3), True)
    assert await runner.step([work], None, load) == [Sampled(expected)]
    assert trio.current_time() - begun == pytest.approx(step_ms / 1000, abs=1e-6)
    assert runner.wrong == 0


@pytest.mark.trio
async def test_tokens_depend_on_tokens_not_on_chunks_ranks_or_blocks() -> None:
    whole, chunked, split = Bench(), Bench(), Bench(tp=2)
    expected = await whole.token(PROMPT, 0, range(8))
    await chunked.token(PROMPT[:13], 0, range(20, 28))
    await chunked.token(PROMPT[:29], 13, range(20, 28))
    assert await chunked.token(PROMPT, 29, range(20, 28), decodes=True) == expected
    assert await split.token(PROMPT, 0, range(3, 11)) == expected
    assert await Bench().token([PROMPT[0] + 1, *PROMPT[1:]], 0, range(8)) != expected
    drawn = {await whole.token(PROMPT, 29, range(8), Sampling(temperature=1, seed=seed)) for seed in range(5)}
    assert len(drawn) > 1
    assert whole.runner.wrong == chunked.runner.wrong == split.runner.wrong == 0


def copied(p: Bench, d: Bench, blocks: list[int]) -> None:
    """P's blocks into D's first ones, in this order."""
    memory = p.memory
    for to, block in enumerate(blocks):
        for layer in range(memory.num_layers):
            for tensor in range(2):
                source, target = (memory.plane_address(layer, tensor, at) for at in (block, to))
                d.regions[0][target : target + memory.plane_bytes] = p.regions[0][source : source + memory.plane_bytes]


@pytest.mark.trio
async def test_wrong_kv_gives_other_tokens() -> None:
    p = Bench()
    expected = await p.token(PROMPT, 0, range(8))
    other = [*PROMPT[:9], 3, *PROMPT[10:]]
    await p.token(other, 0, range(8, 16))

    async def there(blocks: list[int], corrupt_at: int | None = None) -> int:
        d = Bench()
        copied(p, d, blocks)
        if corrupt_at is not None:
            d.regions[0][corrupt_at] ^= 1
        token = await d.token(PROMPT, 29, range(8), decodes=True, loaded=(0, 1, 2, 3))
        assert d.runner.wrong == (token != expected)
        return token

    assert await there([*range(8)]) == expected
    cells = p.memory.cell_bytes
    wrong = {
        "two blocks for each other": await there([0, 2, 1, *range(3, 8)]),
        "one block of another prompt": await there([0, 1, 10, *range(3, 8)]),
        "the other prompt's end": await there([*range(5), *range(13, 16)]),
        "a block that never came": await there([*range(6), 30, 7]),
        "one bit, in the first layer": await there([*range(8)], corrupt_at=cells * 5),
        "one bit, in the last": await there([*range(8)], corrupt_at=p.memory.plane_address(2, 1, 3) + 9 * cells + 8),
    }
    assert all(token != expected for token in wrong.values()), wrong
    d = Bench()
    copied(p, d, [*range(8, 16)])
    assert await d.token(PROMPT, 29, range(8), decodes=True, loaded=(0, 1, 2, 3)) != expected, (
        "whole, and another prompt's"
    )


def test_a_cell_has_room_for_its_words() -> None:
    shape = KvShape(1, 1, head_dim=4, bytes_per_value=2, block_size=4)
    with pytest.raises(ModelError, match="8 bytes per head and token"):
        SyntheticRunner(COST, shape, [], [], 512)
