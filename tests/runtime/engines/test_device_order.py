"""On a device that makes nothing visible before it has been waited for, a layer is in its blocks when that is reported,
and everything is when a step has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pdflow_runtime.engines.host_mirror import HostMirror  # noqa: E402
from pdflow_runtime.engines.job import GREEDY, TokenRequest, Work  # noqa: E402
from pdflow_runtime.engines.kv_cache import KvCache  # noqa: E402
from pdflow_runtime.engines.torch_runner import TorchRunner  # noqa: E402
from pdflow_runtime.engines.weights import DTYPES  # noqa: E402
from tests.runtime.engines import support  # noqa: E402
from tests.runtime.engines.late_device import LateDevice  # noqa: E402

BLOCKS = 12
PROMPT = tuple(5 + (at * 31) % 240 for at in range(70))
TABLE = (7, 2, 9, 4, 1)


class Late:
    """An engine on such a device: what others see of its blocks, and of their copy in host memory."""

    def __init__(self, folder: Path, tp: int, mirrored: bool, asked_in_vain: int) -> None:
        model = support.load(folder)
        memories = support.memories(model.config, "float32", BLOCKS, tp=tp)
        device = LateDevice(asked_in_vain)
        self.ranks, self.shape = memories.ranks, memories.shape
        self.blocks = [torch.frombuffer(region, dtype=torch.uint8).clone() for region in memories.regions]
        self.copies = [region.clone() for region in self.blocks]
        kept, copies = device.hide("computation", self.blocks), device.hide("copies", self.copies)
        mirror = HostMirror(self.shape, self.ranks, kept, copies, device) if mirrored else None
        cache = KvCache(self.shape, self.ranks, kept, DTYPES["float32"], device)
        self.runner = TorchRunner(model, cache, mirror, mirrored)
        self.seen = self.copies if mirrored else self.blocks

    def layer(self, layer: int) -> list[Any]:
        """What others see of a layer's blocks, at each rank."""
        found = []
        for memory, region in zip(self.ranks, self.seen, strict=True):
            planes = region.view(memory.num_layers, memory.tensors_per_layer, BLOCKS, -1)
            found.append(planes[layer][:, list(TABLE)].clone())
        return found


@pytest.mark.parametrize("asked_in_vain", [0, 1, 100])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_is_there_when_it_is_reported(tiny: Path, tp: int, mirrored: bool, asked_in_vain: int) -> None:
    late = Late(tiny, tp, mirrored, asked_in_vain)
    reported: dict[int, list[Any]] = {}
    late.runner.compute([Work(PROMPT, 0, TABLE, None)], lambda layer: reported.update({layer: late.layer(layer)}))
    assert list(reported) == list(range(late.shape.num_layers))
    for layer, then in reported.items():
        assert all(torch.equal(a, b) for a, b in zip(then, late.layer(layer), strict=True))
        # Nobody has written 0xff, which was there before.
        assert all(not bool((rank == 255).all()) for rank in then)


@pytest.mark.parametrize("mirrored", [False, True])
def test_all_of_a_step_is_there_when_it_has_ended(tiny: Path, mirrored: bool) -> None:
    """Also where no token is asked for, and no layer is reported: as in a prefill engine."""
    late, expected = Late(tiny, 1, mirrored, 100), Late(tiny, 1, False, 0)
    for engine in (late, expected):
        engine.runner.compute([Work(PROMPT[:40], 0, TABLE, None)])
        engine.runner.compute([Work(PROMPT[40:], 40, TABLE, None)])
    for layer in range(late.shape.num_layers):
        assert all(torch.equal(a, b) for a, b in zip(late.layer(layer), expected.layer(layer), strict=True))


def test_what_has_landed_in_host_memory_is_read(tiny: Path) -> None:
    p, d = Late(tiny, 1, True, 1), Late(tiny, 1, True, 1)
    alone = support.load(tiny)
    p.runner.compute([Work(PROMPT[:-1], 0, TABLE, None)])
    for (hidden, _), there in zip(d.runner._device._memories["copies"], p.copies, strict=True):  # type: ignore[attr-defined]
        hidden.copy_(there)
    asked = TokenRequest(GREEDY, 0)
    (sampled,) = d.runner.compute([Work(PROMPT[-1:], len(PROMPT) - 1, TABLE, asked, True, TABLE)])
    assert sampled is not None
    assert [sampled.token] == support.dense_answer(alone, PROMPT, 1)
