"""The live engine: the tokens of a dense forward pass, whoever is beside, preempted, cut, shared or transferred."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.runtime.engines import support

torch = support.torch

from pdflow.engine import Dropped, Finished, NeverFitsError, Phase, Prefilled  # noqa: E402
from pdflow_runtime.engines.job import Sampling, Token  # noqa: E402
from tests.runtime.engines.support import Bench, dense_answer, load  # noqa: E402

pytestmark = pytest.mark.trio


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, 512) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_the_tokens_are_those_of_a_dense_forward_pass(tiny: Path, dtype: str, nursery: trio.Nursery) -> None:
    model = load(tiny, dtype)
    bench = Bench(model, dtype, max_num_batched_tokens=64, max_num_seqs=5)
    nursery.start_soon(bench.engine.run)
    asked = prompts(1, 2, 15, 16, 17, 90, 100)
    seqs = [bench.ask(tokens, 12) for tokens in asked]
    for tokens, seq in zip(asked, seqs, strict=True):
        assert await bench.answer(seq) == dense_answer(model, tokens, 12)
        assert [token.ending for token in bench.answers[seq]] == [None] * 11 + ["length"]
    assert bench.engine.pool.free == bench.engine.pool.num_blocks
    assert bench.engine.prompt_tokens_computed == sum(map(len, asked))
    nursery.cancel_scope.cancel()


async def test_preempted_sequences_get_the_same_tokens(tiny: Path, nursery: trio.Nursery) -> None:
    model = load(tiny)
    small = Bench(model, blocks=6)
    nursery.start_soon(small.engine.run)
    asked = prompts(30, 30, 30)
    seqs = [small.ask(tokens, 25) for tokens in asked]
    answers = [await small.answer(seq) for seq in seqs]
    assert small.engine.preemptions
    for tokens, answer in zip(asked, answers, strict=True):
        assert answer == dense_answer(model, tokens, 25)
    assert small.engine.pool.free == 6
    nursery.cancel_scope.cancel()


async def test_what_a_prompt_shares_is_not_computed_again(tiny: Path, nursery: trio.Nursery) -> None:
    model = load(tiny)
    bench = Bench(model, caching=True, blocks=60)
    nursery.start_soon(bench.engine.run)
    (common, *ends) = prompts(64, 1, 20, 33)
    for tokens in ([*common, *end] for end in ends):
        assert await bench.answer(bench.ask(tokens, 8)) == dense_answer(model, tokens, 8)
    # Both at once, and one that is nothing but what is there.
    seqs = [bench.ask(common, 8), bench.ask(common, 8)]
    for seq in seqs:
        assert await bench.answer(seq) == dense_answer(model, common, 8)
        assert seq.cached_tokens == 48
    assert bench.engine.prompt_tokens_computed == 65 + 20 + 33 + 16 + 16
    nursery.cancel_scope.cancel()


async def hand_over(p: Bench, d: Bench, tokens: list[int], output: int) -> list[int]:
    """P computes, D admits, blocks are copied, D decodes."""
    prefill = p.ask(tokens, prefill_only=True)
    decode = d.ask(tokens, output, remote_kv=True)
    await p.ended[prefill].wait()
    while decode.phase is not Phase.LOADING:
        await trio.sleep(0)
    assert prefill.allocation is not None
    assert decode.allocation is not None
    memory = p.memories.ranks[0]
    for source, target in zip(prefill.allocation.blocks, decode.allocation.blocks, strict=True):
        for layer in range(memory.num_layers):
            for tensor in range(2):
                at, to = (memory.plane_address(layer, tensor, block) for block in (source, target))
                d.memories.regions[0][to : to + memory.plane_bytes] = p.memories.regions[0][
                    at : at + memory.plane_bytes
                ]
    p.engine.release(prefill.allocation)
    d.engine.loaded(decode)
    return await d.answer(decode)


async def test_what_p_computed_d_goes_on_with(tiny: Path, nursery: trio.Nursery) -> None:
    model = load(tiny)
    p, d, alone = Bench(model), Bench(model), Bench(model)
    for bench in (p, d, alone):
        nursery.start_soon(bench.engine.run)
    asked = prompts(1, 16, 31, 32, 33, 200)
    for tokens in asked:
        expected = await alone.answer(alone.ask(tokens, 20))
        assert await hand_over(p, d, tokens, 20) == expected
    assert d.engine.prompt_tokens_computed == len(asked), "D computes the last token of each prompt, and no other"
    assert not [outcome for outcome in p.outcomes if isinstance(outcome, Token)]
    assert (p.engine.pool.free, d.engine.pool.free) == (200, 200)
    nursery.cancel_scope.cancel()


async def test_an_answer_ends_where_it_is_asked_to(tiny: Path, nursery: trio.Nursery) -> None:
    model = load(tiny)
    (tokens,) = prompts(20)
    expected = dense_answer(model, tokens, 12)
    bench = Bench(model, eos=[expected[6]])
    nursery.start_soon(bench.engine.run)
    by_eos = bench.ask(tokens, 12)
    ignoring = bench.ask(tokens, 12, Sampling(ignore_eos=True))
    by_token = bench.ask(tokens, 12, Sampling(stop_token_ids=frozenset({expected[3]})))
    at_once = bench.ask(tokens, 12, Sampling(stop_token_ids=frozenset({expected[0]})))
    by_caller = bench.ask(tokens, 12)

    def stop(outcome: object) -> None:
        if isinstance(outcome, Token) and outcome.seq is by_caller and len(bench.answers[by_caller]) == 5:
            bench.engine.finish(by_caller)

    bench.hook = stop
    for seq, length, ending in (
        (by_eos, 7, "stop"),
        (ignoring, 12, "length"),
        (by_token, 4, "stop"),
        (at_once, 1, "stop"),
        (by_caller, 5, None),
    ):
        assert await bench.answer(seq) == expected[:length]
        assert bench.answers[seq][-1].ending == ending
    with pytest.raises(ValueError, match="no token of it is being reported"):
        bench.engine.finish(by_caller)
    assert bench.engine.pool.free == 200
    nursery.cancel_scope.cancel()


async def test_a_dropped_sequence_produces_no_events(tiny: Path, nursery: trio.Nursery) -> None:
    bench = Bench(load(tiny), blocks=30)
    (tokens,) = prompts(40)
    waiting, remote, running = bench.ask(tokens), bench.ask(tokens, remote_kv=True), bench.ask(tokens, 100)
    assert bench.engine.drop(waiting) is Dropped.AT_ONCE
    nursery.start_soon(bench.engine.run)
    while len(bench.answers[running]) < 3:
        await trio.sleep(0)
    assert bench.admitted() == [remote]
    assert remote.allocation is not None
    assert bench.engine.drop(remote) is Dropped.BLOCKS_ARE_YOURS
    bench.engine.release(remote.allocation)
    assert bench.engine.drop(running) is Dropped.AFTER_STEP
    assert bench.engine.drop(running) is Dropped.NOT_HERE
    before = len(bench.outcomes)
    while bench.engine.pool.free < 30:
        await trio.sleep(0)
    assert len(bench.outcomes) == before
    assert not [outcome for outcome in bench.outcomes if isinstance(outcome, Finished | Prefilled)]
    nursery.cancel_scope.cancel()


async def test_what_never_fits_is_refused_and_forgotten(tiny: Path) -> None:
    bench = Bench(load(tiny), blocks=3)
    with pytest.raises(NeverFitsError):
        bench.ask(*prompts(40), output=20)
    assert bench.engine.waiting == 0
