"""The torch engine on a GPU: its tokens are those of a dense forward pass, and a layer is in its blocks when that is
reported."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pdflow_runtime.gpu.driver import gpus

torch = pytest.importorskip("torch")

from pdflow.layout.descriptors import rank_memory  # noqa: E402
from pdflow_runtime.engines.config import ModelConfig, read_config  # noqa: E402
from pdflow_runtime.engines.device import Cuda  # noqa: E402
from pdflow_runtime.engines.host_mirror import HostMirror  # noqa: E402
from pdflow_runtime.engines.job import GREEDY, Sampled, Sampling, TokenRequest, Work  # noqa: E402
from pdflow_runtime.engines.kv_cache import KvCache  # noqa: E402
from pdflow_runtime.engines.model import Llama  # noqa: E402
from pdflow_runtime.engines.step_load import StepLoad  # noqa: E402
from pdflow_runtime.engines.tiny import tiny_model  # noqa: E402
from pdflow_runtime.engines.torch_runner import TorchRunner  # noqa: E402
from pdflow_runtime.engines.weights import DTYPES, read_weights  # noqa: E402
from pdflow_runtime.gpu.memory import allocate, pinned  # noqa: E402
from tests.runtime.engines.support import dense_logits  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no GPU")]
BLOCKS = 120
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), 1, **SIZES)


class OnGpu:
    """A runner on a GPU, and its regions; if `mirrored`, with their copies in host memory."""

    def __init__(self, folder: Path, dtype: str, block_size: int = 16, tp: int = 1, mirrored: bool = False) -> None:
        self.config: ModelConfig = read_config(folder)
        shape = self.config.kv_shape(block_size, dtype)
        self.memories = [rank_memory(shape, BLOCKS, tp) for _ in range(tp)]
        self.regions = [allocate(shape.rank_block_bytes(tp, 1, 0) * BLOCKS, 0) for _ in range(tp)]
        for region in self.regions:
            region.fill_(255)  # what nobody has written is no number
        device = Cuda()
        cache = KvCache(shape, self.memories, self.regions, DTYPES[dtype], device)
        self.mirrors = [pinned(memoryview(bytearray(len(region))), 0) for region in self.regions if mirrored]
        mirror = HostMirror(shape, self.memories, self.regions, self.mirrors, device) if mirrored else None
        self.runner = TorchRunner(Llama(self.config, read_weights(folder, self.config, dtype, "cuda")), cache, mirror)
        self.block_size = block_size

    def answers(self, prompts: list[list[int]], output: int, chunk: int = 10**6) -> list[list[int]]:
        """Compute the prompts together, chunk by chunk, then decode them together."""
        free = iter(random.Random(2).sample(range(BLOCKS), BLOCKS))
        needed = [-(-(len(prompt) + output) // self.block_size) for prompt in prompts]
        tables = [tuple(next(free) for _ in range(count)) for count in needed]
        tokens = [list(prompt) for prompt in prompts]
        asked = TokenRequest(GREEDY, 0)
        for at in range(0, max(map(len, prompts)), chunk):
            works, numbers = [], []
            for number, prompt in enumerate(prompts):
                if at < len(prompt):
                    last = at + chunk >= len(prompt)
                    chunk_tokens = tuple(prompt[at : at + chunk])
                    works.append(Work(chunk_tokens, at, tables[number], asked if last else None))
                    numbers.append(number)
            self._append(tokens, numbers, self.runner.compute(works))
        for _ in range(output - 1):
            works = [Work((own[-1],), len(own) - 1, tables[at], asked, True) for at, own in enumerate(tokens)]
            self._append(tokens, list(range(len(prompts))), self.runner.compute(works))
        return [own[len(prompt) :] for own, prompt in zip(tokens, prompts, strict=True)]

    @staticmethod
    def _append(tokens: list[list[int]], numbers: list[int], found: list[Sampled | None]) -> None:
        for number, sampled in zip(numbers, found, strict=True):
            if sampled is not None:
                tokens[number].append(sampled.token)


def prompts(*lengths: int) -> list[list[int]]:
    drawn = random.Random(3)
    return [[drawn.randrange(2, 250) for _ in range(length)] for length in lengths]


def dense(folder: Path, prompt: list[int], output: int) -> list[int]:
    config = read_config(folder)
    weights: Any = read_weights(folder, config, "float64")
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(int(dense_logits(config, weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_are_those_of_a_dense_forward_pass(folder: Path, block_size: int, tp: int) -> None:
    asked = prompts(1, 7, 16, 33, 64, 100)
    on_gpu = OnGpu(folder, "float32", block_size, tp)
    expected = [dense(folder, prompt, 12) for prompt in asked]
    assert on_gpu.answers(asked, 12) == expected
    assert OnGpu(folder, "float32", block_size, tp).answers(asked, 12, chunk=24) == expected
    assert [on_gpu.answers([prompt], 12)[0] for prompt in asked] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_near(folder: Path, dtype: str) -> None:
    asked = prompts(5, 40, 90)
    on_gpu = OnGpu(folder, dtype)
    config = read_config(folder)
    weights: Any = read_weights(folder, config, "float64")
    every = TokenRequest(Sampling(logprobs=config.vocab_size), 0)
    for prompt in asked:
        (sampled,) = on_gpu.runner.compute([Work(tuple(prompt), 0, tuple(range(1, 8)), every)])
        assert sampled is not None
        assert sampled.logprobs is not None
        found = torch.tensor([value for _, value in sorted(sampled.logprobs.top)], dtype=torch.float64)
        exact = dense_logits(config, weights, prompt)[-1].log_softmax(-1)
        assert (found - exact).norm() / exact.norm() < {"bfloat16": 0.02, "float16": 0.003, "float64": 1e-6}[dtype]


def test_a_layer_is_in_its_blocks_when_it_is_said_to_be(folder: Path) -> None:
    on_gpu = OnGpu(folder, "float32")
    memory, region = on_gpu.memories[0], on_gpu.regions[0]
    plane = memory.num_blocks * memory.plane_bytes
    other = torch.cuda.Stream()
    seen: list[Any] = []

    def written(layer: int) -> None:
        with torch.cuda.stream(other):
            seen.append(region[2 * layer * plane : 2 * (layer + 1) * plane].clone())
        other.synchronize()

    work = Work(tuple(prompts(500)[0]), 0, tuple(range(40)), TokenRequest(GREEDY, 0))
    for _ in range(20):
        region.fill_(255)
        torch.cuda.synchronize()
        seen.clear()
        on_gpu.runner.compute([work], written)
        torch.cuda.synchronize()
        assert len(seen) == memory.num_layers
        for layer, found in enumerate(seen):
            blocks = slice(0, 31 * memory.plane_bytes)
            assert torch.equal(found[blocks], region[2 * layer * plane :][blocks])


@pytest.mark.trio
async def test_a_step_computes_kv_that_lands_meanwhile(folder: Path) -> None:
    """Layer by layer, from host memory, while another sequence of the step decodes in a graph."""
    landing, decoding = prompts(70, 20)
    blocks, others = (7, 2, 9, 4, 1), (20, 21)
    asked = TokenRequest(GREEDY, 0)
    p, d = OnGpu(folder, "float32"), OnGpu(folder, "float32", mirrored=True)
    p.runner.compute([Work(tuple(landing[:-1]), 0, blocks, None)])
    d.runner.compute([Work(tuple(decoding[:-1]), 0, others, None)])
    plane = p.memories[0].num_blocks * p.memories[0].plane_bytes
    stream = torch.cuda.Stream()

    def copy(layer: int) -> None:
        own = slice(2 * layer * plane, 2 * (layer + 1) * plane)
        with torch.cuda.stream(stream):
            d.mirrors[0][own] = p.regions[0][own]
        stream.synchronize()

    load = StepLoad(p.memories[0].num_layers)
    load.add(copy, lambda: None)
    works = [
        Work((landing[-1],), 69, blocks, asked, True, blocks, True),
        Work((decoding[-1],), 19, others, asked, True),
    ]
    found = await d.runner.step(works, None, load)
    expected = [*dense(folder, landing, 1), *dense(folder, decoding, 1)]
    assert [sampled.token for sampled in found if sampled is not None] == expected
