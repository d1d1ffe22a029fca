"""The network over the paged cache: against a dense forward pass, and that company and cuts change no bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.runtime.engines import support

torch = support.torch

from pdflow.layout.descriptors import descriptors  # noqa: E402
from pdflow.layout.pairing import runs  # noqa: E402
from pdflow.layout.ranks import writers  # noqa: E402
from pdflow_runtime.engines.job import (  # noqa: E402
    Sampled,
    Sampling,
    TokenRequest,
    Work,
)
from pdflow_runtime.engines.model import Llama  # noqa: E402
from pdflow_runtime.engines.torch_runner import TorchRunner  # noqa: E402

LOGPROBS = Sampling(logprobs=512)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}:{length}").randrange(2, 512) for _ in range(length)]


def work(tokens: Sequence[int], start: int, end: int, blocks: Sequence[int], needs_token: bool = True) -> Work:
    return Work(tuple(tokens[start:end]), start, tuple(blocks), TokenRequest(LOGPROBS, 0) if needs_token else None)


def runner(model: Llama, dtype: str, blocks: int = 120, **layout: object) -> TorchRunner:
    return TorchRunner(model, support.memories(model.config, dtype, blocks, **layout).cache(dtype))  # type: ignore[arg-type]


def logprobs(sampled: Sampled | None) -> list[float]:
    assert sampled is not None
    assert sampled.logprobs is not None
    return [logprob for _, logprob in sorted(sampled.logprobs.top)]


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-5), ("float32", 1e-3), ("float16", 0.1), ("bfloat16", 0.5)])
def test_it_computes_what_a_dense_forward_pass_computes(tiny: Path, dtype: str, near: float) -> None:
    model = support.load(tiny, dtype)
    tokens = prompt(150)
    exact = support.load(tiny, "float64")
    expected = support.dense_logits(exact.config, exact.weights, tokens)[-1].log_softmax(-1).tolist()
    got = logprobs(runner(model, dtype).compute([work(tokens, 0, 150, range(5, 15))])[0])
    assert got == pytest.approx(expected, abs=near)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_company_nor_chunks_change_a_bit(tiny: Path, dtype: str) -> None:
    model = support.load(tiny, dtype)
    tokens = prompt(500)
    expected = logprobs(runner(model, dtype).compute([work(tokens, 0, 500, range(32))])[0])
    others = [prompt(length, seed=1) for length in (1, 7, 130)]
    for boundaries in ((0, 499, 500), (0, 16, 100, 101, 103, 400, 500), (0, 256, 500), (*range(0, 501, 50),)):
        busy = runner(model, dtype)
        for turn, (start, end) in enumerate(pairwise(boundaries)):
            before, after = (work(others[k], 0, len(others[k]), range(40 + 10 * k, 50 + 10 * k)) for k in (turn % 3, 1))
            _, last, _ = busy.compute([before, work(tokens, start, end, range(32)), after])
        assert logprobs(last) == expected, f"cut at {boundaries}"


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("nesting", ["layer-major", "block-major"])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_how_the_cache_is_laid_out_changes_no_bit(tiny: Path, tp: int, pp: int, nesting: str, order: str) -> None:
    """Two KV heads over four ranks: each is kept twice."""
    model = support.load(tiny)
    tokens = prompt(70)
    plain, other = runner(model, "float32"), runner(model, "float32", tp=tp, pp=pp, nesting=nesting, order=order)
    for start, end in ((0, 33), (33, 69), (69, 70)):
        works = [work(tokens, start, end, (9, 2, 33, 7, 1))]
        assert logprobs(plain.compute(works)[0]) == logprobs(other.compute(works)[0])


@pytest.mark.parametrize(
    ("p_tp", "p_pp", "d_tp", "p_block", "d_block"),
    [(1, 1, 1, 16, 16), (4, 1, 1, 16, 16), (1, 1, 2, 16, 8), (2, 1, 4, 8, 16), (2, 3, 1, 16, 16)],
)
def test_copied_by_descriptors_it_goes_on_elsewhere(
    tiny: Path, p_tp: int, p_pp: int, d_tp: int, p_block: int, d_block: int
) -> None:
    """P computes the prompt, its bytes are copied as the layout says, D computes the last token again and goes on."""
    model = support.load(tiny)
    tokens = prompt(75)
    p = support.memories(model.config, "float32", 40, p_block, p_tp, p_pp)
    d = support.memories(model.config, "float32", 40, d_block, d_tp)
    p_blocks, d_blocks = list(range(3, 3 + -(-75 // p_block))), list(range(20, 20 + -(-76 // d_block)))
    alone = TorchRunner(model, p.cache("float32"))
    expected = logprobs(alone.compute([work(tokens, 0, 75, p_blocks)])[0])
    for pair in writers(p.shape, p_tp, p_pp, d_tp):
        source, target = p.ranks[pair.p_rank], d.ranks[pair.d_rank]
        for piece in descriptors(pair, source, target, runs(p_blocks, p_block, d_blocks, d_block, 0, 75)):
            at, to, length = piece
            d.regions[pair.d_rank][to : to + length] = p.regions[pair.p_rank][at : at + length]
    there = TorchRunner(model, d.cache("float32"))
    assert logprobs(there.compute([work(tokens, 74, 75, d_blocks)])[0]) == expected
    tokens.append(7)
    both = [
        runner.compute([work(tokens, 75, 76, blocks)])[0] for runner, blocks in ((alone, p_blocks), (there, d_blocks))
    ]
    assert logprobs(both[0]) == logprobs(both[1])


def test_another_prompts_kv_gives_other_tokens(tiny: Path) -> None:
    """The negative control: what decides the token is the KV, not the tokens that it is computed from."""
    model = support.load(tiny)
    mine, other = prompt(40), prompt(40, seed=9)
    both = runner(model, "float32")
    both.compute([work(mine, 0, 40, (0, 1, 2)), work(other, 0, 40, (3, 4, 5))])
    right, wrong = both.compute([work(mine, 39, 40, (0, 1, 2)), work(mine, 39, 40, (3, 4, 5))])
    assert logprobs(right) != logprobs(wrong)
