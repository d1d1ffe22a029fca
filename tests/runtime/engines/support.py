"""One engine for tests, the tiny model, and a dense forward pass that has neither cache nor blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

torch = pytest.importorskip("torch", reason="the engine's arithmetic is torch's: pip install 'pdflow[live]'")

from pdflow.engine import Admitted, Finished, Limits, Prefilled  # noqa: E402
from pdflow.engine import Sequence as Seq  # noqa: E402
from pdflow.layout.descriptors import RankMemory, rank_memory  # noqa: E402
from pdflow.layout.shapes import KvShape  # noqa: E402
from pdflow.memory.caching import CachingPool  # noqa: E402
from pdflow.memory.paged import PagedPool  # noqa: E402
from pdflow_runtime.engines.config import ModelConfig, read_config  # noqa: E402
from pdflow_runtime.engines.job import GREEDY, Job, Sampling, Token  # noqa: E402
from pdflow_runtime.engines.kv_cache import KvCache  # noqa: E402
from pdflow_runtime.engines.loop import LiveEngine  # noqa: E402
from pdflow_runtime.engines.model import Llama  # noqa: E402
from pdflow_runtime.engines.sampling.logprobs import PromptScores  # noqa: E402
from pdflow_runtime.engines.torch_runner import TorchRunner  # noqa: E402
from pdflow_runtime.engines.weights import DTYPES, Weights, read_weights  # noqa: E402

torch.set_num_threads(1)


@attrs.frozen
class Memories:
    """Where an engine's ranks keep their KV, in bytes of their own."""

    shape: KvShape
    ranks: tuple[RankMemory, ...]
    regions: tuple[bytearray, ...]

    def cache(self, dtype: str) -> KvCache:
        return KvCache(self.shape, self.ranks, [memoryview(region) for region in self.regions], DTYPES[dtype])


def memories(
    config: ModelConfig, dtype: str, blocks: int, block_size: int = 16, tp: int = 1, pp: int = 1, **layout: Any
) -> Memories:
    shape = config.kv_shape(block_size, dtype)
    stages = [stage for stage in range(pp) for _ in range(tp)]
    ranks = tuple(rank_memory(shape, blocks, tp, pp, stage, **layout) for stage in stages)
    # What nobody has written is no number.
    regions = tuple(bytearray(b"\xff" * (shape.rank_block_bytes(tp, pp, stage) * blocks)) for stage in stages)
    return Memories(shape, ranks, regions)


def load(folder: Path, dtype: str = "float32") -> Llama:
    config = read_config(folder)
    return Llama(config, read_weights(folder, config, dtype))


class Bench:
    """A live engine that runs, and all that it has told."""

    def __init__(
        self,
        model: Llama,
        dtype: str = "float32",
        blocks: int = 200,
        block_size: int = 16,
        tp: int = 1,
        caching: bool = False,
        eos: Iterable[int] = (),
        **limits: int,
    ) -> None:
        self.memories = memories(model.config, dtype, blocks, block_size, tp)
        pool = CachingPool(blocks, 1) if caching else PagedPool(blocks)
        runner = TorchRunner(model, self.memories.cache(dtype))
        self.engine = LiveEngine(runner, Limits(block_size=block_size, **limits), pool, self.on_engine_output, eos)
        self.outcomes: list[object] = []
        self.answers: dict[Seq, list[Token]] = {}
        self.hook: Callable[[object], None] = lambda outcome: None
        self.ended: dict[Seq, trio.Event] = {}

    def on_engine_output(self, outcome: object) -> None:
        self.outcomes.append(outcome)
        if isinstance(outcome, Token):
            self.answers[outcome.seq].append(outcome)
        elif isinstance(outcome, Finished | Prefilled):
            self.ended[outcome.seq].set()
        self.hook(outcome)

    def ask(
        self,
        tokens: Sequence[int],
        output: int = 16,
        sampling: Sampling = GREEDY,
        scores: PromptScores | None = None,
        **flags: Any,
    ) -> Seq:
        prefix = self.engine.names(tokens) if scores is None else ()
        seq = Seq(len(self.answers), len(tokens), output, prefix=prefix, **flags)
        self.engine.submit(Job(seq, tokens, sampling, scores=scores))
        self.answers[seq], self.ended[seq] = [], trio.Event()
        return seq

    async def answer(self, seq: Seq) -> list[int]:
        await self.ended[seq].wait()
        return [token.token for token in self.answers[seq]]

    def admitted(self) -> list[Seq]:
        return [outcome.seq for outcome in self.outcomes if isinstance(outcome, Admitted)]


def dense_logits(config: ModelConfig, weights: Weights, tokens: Sequence[int]) -> Any:
    """Of every position; written after the formulas, with full matrices."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    x = weights.embedding[torch.tensor(tokens)]
    count = len(tokens)
    angle = torch.arange(count)[:, None] / config.rope_theta ** (torch.arange(0, width, 2) / width)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def norm(x: Any, weight: Any) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def turned(x: Any) -> Any:
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for layer in weights.layers:
        y = norm(x, layer.input_norm) @ layer.qkv.T
        q, k, v = y.split([heads * width, kv_heads * width, kv_heads * width], -1)
        q = turned(q.view(count, heads, width).transpose(0, 1))
        k = turned(k.view(count, kv_heads, width).transpose(0, 1)).repeat_interleave(heads // kv_heads, 0)
        v = v.view(count, kv_heads, width).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1) @ layer.out.T
        y = norm(x, layer.mlp_norm)
        gate, up = (y @ layer.gate_up.T).chunk(2, -1)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ layer.down.T
    return norm(x, weights.norm) @ weights.head.T


def dense_answer(model: Llama, prompt: Sequence[int], output: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(int(dense_logits(model.config, model.weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
