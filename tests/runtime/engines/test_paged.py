"""Decoding from pages: the rows, masks and page numbers that a GPU's kernel is given, with a kernel written after their
meaning. On a GPU the same is tested with the real one (tests/runtime/gpu)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pdflow_runtime.engines.attention import decode_graphs  # noqa: E402
from pdflow_runtime.engines.attention.decode_graphs import DecodeGraphs  # noqa: E402
from pdflow_runtime.engines.job import Sampling, TokenRequest, Work  # noqa: E402
from pdflow_runtime.engines.torch_runner import TorchRunner  # noqa: E402
from tests.runtime.engines import support  # noqa: E402

SIZE = 16
BLOCKS = 60


def by_pages(q: Any, k: Any, v: Any, block_mask: Any, kernel_options: Any) -> Any:
    """What a block mask means: whole pages, then what the mask lets pass of the others."""
    size, out = block_mask.BLOCK_SIZE[1], torch.zeros_like(q)
    for row in range(len(q)):
        at: list[int] = []
        for page in block_mask.full_kv_indices[row, 0, 0, : int(block_mask.full_kv_num_blocks[row, 0, 0])].tolist():
            at += range(page * size, (page + 1) * size)
        for page in block_mask.kv_indices[row, 0, 0, : int(block_mask.kv_num_blocks[row, 0, 0])].tolist():
            within = torch.arange(page * size, (page + 1) * size)
            seen = block_mask.mask_mod(torch.tensor(row), torch.tensor(0), torch.tensor(0), within)
            at += within[seen].tolist()
        if at:
            scores = q[row, 0] @ k[0, 0, at].T * q.shape[-1] ** -0.5
            out[row, 0] = scores.softmax(-1) @ v[0, 0, at]
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_of_a_batch_see_their_own_contexts(tiny: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = support.load(tiny)
    cache = support.memories(model.config, "float32", BLOCKS, SIZE, tp).cache("float32")
    runner = TorchRunner(model, cache)
    monkeypatch.setattr(decode_graphs.torch, "compile", lambda function, **how: by_pages)
    graphs = DecodeGraphs(model, cache)
    drawn = random.Random(1)
    prompts = [[drawn.randrange(2, 250) for _ in range(length)] for length in (1, 15, 16, 17, 31, 63)]
    free = iter(drawn.sample(range(BLOCKS), BLOCKS))
    tables = [tuple(next(free) for _ in range(-(-(len(prompt) + 1) // SIZE))) for prompt in prompts]
    every = TokenRequest(Sampling(logprobs=model.config.vocab_size), 0)
    runner.compute([Work(tuple(prompt), 0, table, None) for prompt, table in zip(prompts, tables, strict=True)])
    works = [Work((7,), len(prompt), table, every, True) for prompt, table in zip(prompts, tables, strict=True)]
    runner._clear_ends(works)
    rows = graphs._rows(works, decode_graphs.LEAST)
    graphs._inputs[: len(rows), : rows.shape[1]] = torch.from_numpy(rows)
    found = graphs._forward(len(rows))[: len(works)].log_softmax(-1)
    for row, sampled in zip(found, runner.compute(works), strict=True):
        assert sampled is not None
        assert sampled.logprobs is not None
        expected = torch.tensor([value for _, value in sorted(sampled.logprobs.top)])
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
