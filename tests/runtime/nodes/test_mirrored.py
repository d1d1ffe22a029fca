"""Engines whose KV lies on a device, with a copy of it in the transport's memory: by every method the tokens are those
of one engine alone. The device's memory is this process's here; `-m gpu` tests the same on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pdflow.methods.catalogue import METHODS  # noqa: E402
from pdflow_runtime.engines.job import Sampling  # noqa: E402
from pdflow_runtime.gpu import memory as gpu_memory  # noqa: E402
from pdflow_runtime.nodes.models import TorchModel  # noqa: E402
from tests.runtime.support.live_pair import cluster, live_pair, prompt  # noqa: E402

ON_DEVICE = ("pool.prefill.device=cuda", "pool.decode.device=cuda", "transfer.kv_buffer_device=cpu")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A device whose memory is this process's: all that has been taken of it."""
    found: list[Any] = []

    def allocate(nbytes: int, gpu: int) -> Any:
        found.append(torch.full((nbytes,), 255, dtype=torch.uint8))
        return found[-1]

    monkeypatch.setattr(gpu_memory, "allocate", allocate)
    monkeypatch.setattr(gpu_memory, "pinned", lambda view, gpu: torch.frombuffer(view, dtype=torch.uint8))
    return iter([found])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.trio
async def test_tokens_are_those_of_one_engine_alone(method: str, taken: Iterator[list[Any]]) -> None:
    scenario = cluster(f"transfer.method={method}", *ON_DEVICE)
    memories = next(taken)
    async with live_pair(scenario, TorchModel(scenario)) as home:
        assert len(memories) == 3, "of P, of D, and of the engine that is alone"
        for number, length in enumerate((1, 16, 40, 300)):
            tokens = prompt(length, number)
            sampling = Sampling(max_tokens=6, ignore_eos=True)
            alone = await home.ask_alone(f"alone {number}", tokens, sampling)
            assert await home.ask(str(number), tokens, sampling) == alone
        # Again: what D has of the first prompts is read from its blocks, and not from what has landed since.
        again = await home.ask("again", tokens, sampling)
        assert again == alone
        await home.quiet()
        assert home.d.engine.prompt_tokens_computed == 5
