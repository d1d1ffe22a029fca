"""Random worlds of P and D on synthetic engines: whatever is preempted, shared, cut, dropped or handed over, each
answer's tokens are a function of its prompt, no KV is wrong, and at the end all blocks are free.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from pdflow.cost import LinearTime, StepCost
from pdflow.engine import Admitted, Dropped, Finished, Limits, Prefilled, Sequence
from pdflow.layout.descriptors import descriptors, rank_memory
from pdflow.layout.pairing import runs
from pdflow.layout.ranks import writers
from pdflow.layout.shapes import KvShape
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow_runtime.engines.job import Job, Token
from pdflow_runtime.engines.loop import EngineOutput, LiveEngine
from pdflow_runtime.engines.synthetic import SyntheticRunner

COST = StepCost(h0=10**9, c1=10**8, linear=LinearTime(slope_ps=10**8))


class Bench:
    """An engine of random size."""

    def __init__(self, draw: random.Random, block_size: int, tp: int, blocks: int, pp: int = 1) -> None:
        self.shape = KvShape(3, 2, head_dim=8, bytes_per_value=2, block_size=block_size)
        self.tp, self.pp, self.block_size = tp, pp, block_size
        stages = [stage for stage in range(pp) for _ in range(tp)]
        self.memories = [rank_memory(self.shape, blocks, tp, pp, stage) for stage in stages]
        sizes = [self.shape.rank_block_bytes(tp, pp, stage) * blocks for stage in stages]
        self.regions = [memoryview(bytearray(size)) for size in sizes]
        self.runner = SyntheticRunner(COST, self.shape, self.memories, self.regions, 512)
        self.pool = CachingPool(blocks, draw.choice((1, 2))) if draw.random() < 0.6 else PagedPool(blocks)
        budget = draw.choice((7, 16, 64))
        limits = Limits(max_num_seqs=draw.randint(1, 7), max_num_batched_tokens=budget, block_size=block_size)
        self.engine = LiveEngine(self.runner, limits, self.pool, self.on_engine_output)
        self.answers: dict[Sequence, list[int]] = {}
        self.events: dict[Sequence, trio.Event] = {}

    def on_engine_output(self, outcome: EngineOutput) -> None:
        assert outcome.seq in self.answers, "of what was dropped, nothing is told"
        match outcome:
            case Token(seq=seq):
                self.answers[seq].append(outcome.token)
            case Admitted(seq=seq) | Finished(seq=seq) | Prefilled(seq=seq):
                self.events[seq].set()
                self.events[seq] = trio.Event()

    def ask(self, tokens: list[int], output: int, **flags: Any) -> Sequence:
        seq = Sequence(0, len(tokens), output, prefix=self.engine.names(tokens), **flags)
        self.engine.submit(Job(seq, tokens))
        self.answers[seq], self.events[seq] = [], trio.Event()
        return seq

    def drop(self, seq: Sequence) -> None:
        dropped = self.engine.drop(seq)
        if dropped is Dropped.BLOCKS_ARE_YOURS:
            assert seq.allocation is not None
            self.engine.release(seq.allocation)
        if dropped is not Dropped.NOT_HERE:
            del self.answers[seq]

    def table(self, seq: Sequence) -> tuple[int, ...]:
        assert seq.allocation is not None
        return self.pool.table(seq.allocation) if isinstance(self.pool, CachingPool) else seq.allocation.blocks


@attrs.frozen
class Asked:
    tokens: list[int]
    output: int
    at_s: float
    alone: bool
    given_up_s: float | None
    """How long after it was asked for its client goes."""


def asked(draw: random.Random) -> list[Asked]:
    roots = [[draw.randrange(512) for _ in range(60)] for _ in range(3)]

    def tokens() -> list[int]:
        if draw.random() < 0.5:
            return [draw.randrange(512) for _ in range(draw.randint(1, 60))]
        return draw.choice(roots)[: draw.randint(1, 60)] + [draw.randrange(512) for _ in range(draw.randint(0, 9))]

    return [
        Asked(
            tokens(), draw.randint(1, 20), draw.uniform(0, 0.2), draw.random() < 0.3,
            draw.uniform(0, 0.2) if draw.random() < 0.2 else None,
        )
        for _ in range(40)
    ]  # fmt: skip


async def disaggregated(p: Bench, d: Bench, what: Asked) -> list[int] | None:
    """As the nodes do it: P computes, D admits, what D lacks is copied, D decodes."""
    decode = d.ask(what.tokens, what.output, remote_kv=True)
    prefill = p.ask(what.tokens, 1, prefill_only=True)
    admitted = d.events[decode]
    try:
        await p.events[prefill].wait()
        await admitted.wait()
        # The transfer takes its time, and D's blocks may by then be all but P's last hold on them.
        await trio.sleep(0.003)
        here = decode.cached_tokens
        assert decode.allocation is not None
        for pair in writers(p.shape, p.tp, p.pp, d.tp):
            pieces = runs(
                p.table(prefill), p.block_size, decode.allocation.blocks, d.block_size, here, len(what.tokens) - here
            )
            for piece in descriptors(pair, p.memories[pair.p_rank], d.memories[pair.d_rank], pieces):
                end = piece.source_address + piece.length
                data = p.regions[pair.p_rank][piece.source_address : end]
                d.regions[pair.d_rank][piece.target_address : piece.target_address + piece.length] = data
        d.engine.loaded(decode)
        await d.events[decode].wait()
        return d.answers[decode]
    finally:
        d.drop(decode)
        if p.engine.drop(prefill) is Dropped.NOT_HERE:
            assert prefill.allocation is not None
            p.engine.release(prefill.allocation)
        else:
            del p.answers[prefill]


async def client(p: Bench, d: Bench, what: Asked, answers: dict[int, list[int]]) -> None:
    await trio.sleep(what.at_s)
    with trio.move_on_after(60 if what.given_up_s is None else what.given_up_s):
        if what.alone:
            seq = d.ask(what.tokens, what.output)
            try:
                await d.events[seq].wait()
                answers[id(what)] = d.answers[seq]
            finally:
                d.drop(seq)
        else:
            answer = await disaggregated(p, d, what)
            assert answer is not None
            answers[id(what)] = answer


async def reference(what: Asked) -> list[int]:
    """The answer of one engine, alone."""
    one = Bench(random.Random(0), 16, 1, 20)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.engine.run)
        seq = one.ask(what.tokens, what.output)
        await one.events[seq].wait()
        nursery.cancel_scope.cancel()
    return one.answers[seq]


@pytest.mark.trio
@pytest.mark.parametrize("seed", range(12))
async def test_tokens_are_those_of_one_engine_alone(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    draw = random.Random(seed)
    p_block, d_block = draw.choice(((4, 4), (8, 4), (4, 8), (16, 16)))
    p = Bench(draw, p_block, draw.choice((1, 2, 4)), draw.randint(160, 400) // p_block, draw.choice((1, 1, 2)))
    d = Bench(draw, d_block, draw.choice((1, 2)), draw.randint(96, 250) // d_block)
    requests = asked(draw)
    answers: dict[int, list[int]] = {}
    async with trio.open_nursery() as engines:
        engines.start_soon(p.engine.run)
        engines.start_soon(d.engine.run)
        async with trio.open_nursery() as clients:
            for what in requests:
                clients.start_soon(client, p, d, what, answers)
        await trio.sleep(1)
        engines.cancel_scope.cancel()
    assert p.runner.wrong == d.runner.wrong == 0
    for what in requests:
        if what.given_up_s is None or id(what) in answers:
            assert answers[id(what)] == await reference(what)
    for bench in (p, d):
        assert bench.pool.free == bench.pool.num_blocks
        assert bench.engine.waiting == bench.engine.running == bench.engine.loading == 0
        assert not bench.engine._answers
