"""vLLM's KV tensors as a rank's memory: what is adopted lies where the strides say, and the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="KV tensors are torch's")

from pdflow.layout.shapes import KvShape, MlaDims  # noqa: E402
from pdflow_runtime.vllm.options import UnsupportedError  # noqa: E402
from pdflow_runtime.vllm.worker.kv_memory import INTERIORS, adopted_memory  # noqa: E402

SHAPE = KvShape(2, 4, 8, 4, 16, packed=True)
BLOCKS = 5


def tensors(*shape: int, dtype: Any = torch.float32) -> dict[str, Any]:
    return {f"layers.{number}": torch.zeros(shape or (BLOCKS, 4, 16, 16), dtype=dtype) for number in range(2)}


def adopted(caches: dict[str, Any], backend: str = "FLASH_ATTN", shape: KvShape = SHAPE, tp: int = 1) -> Any:
    return adopted_memory(caches, shape, tp, backend, "", BLOCKS)


def test_each_allocation_is_a_segment_and_each_layer_begins_where_it_lies() -> None:
    caches = tensors()
    memory = adopted(caches)
    assert [segment.address for segment in memory.segments] == [each.data_ptr() for each in caches.values()]
    assert memory.memory.region_bases == (0, memory.segments[0].nbytes)
    assert memory.memory.order == "HND"


def test_layers_of_one_allocation_are_one_segment() -> None:
    whole = torch.zeros(3 + BLOCKS * 2 * 4 * 16 * 16)
    views = whole[3:].reshape(BLOCKS, 2, 4, 16, 16)
    memory = adopted({f"layers.{number}": views[:, number] for number in range(2)})
    assert len(memory.segments) == 1
    assert memory.memory.region_bases == (12, 12 + 4 * 16 * 16 * 4)
    assert memory.memory.block_stride == 2 * 4 * 16 * 16 * 4


def test_blocks_of_cpus_are_opaque_and_named_by_what_packs_them() -> None:
    memory = adopted_memory(tensors(), SHAPE, 1, "CPU_ATTN", "amx", BLOCKS)
    assert memory.memory.order == "opaque"
    assert memory.interior == "CPU_ATTN torch.float32 amx"


def test_an_mla_layer_needs_no_axis_of_heads() -> None:
    shape = KvShape(2, 1, 24, 4, 16, mla=MlaDims(24, 0))
    memory = adopted(tensors(BLOCKS, 16, 24), "FLASHMLA", shape, tp=4)
    assert memory.memory.num_heads == 1
    assert memory.memory.cell_bytes == 96


@pytest.mark.parametrize(
    ("caches", "backend", "message"),
    [
        (tensors(), "NEW_ATTN", "attention backend NEW_ATTN is not supported"),
        ({"layers.0": tensors()["layers.0"]}, "FLASH_ATTN", "1 layers have KV tensors, but the model has 2 layers"),
        ({"layers.0": [], "layers.1": []}, "FLASH_ATTN", "models with recurrent state are not supported"),
        (tensors(2, BLOCKS, 4, 16, 8), "FLASH_ATTN", "is not one tensor of 4 axes"),
        (tensors(2 * BLOCKS, 4, 8, 16), "FLASH_ATTN", "set --block-size 8"),
        (tensors(BLOCKS, 4, 16, 18), "FLASH_ATTN", "quantised KV with scales"),
        (tensors(BLOCKS, 2, 16, 16), "FLASH_ATTN", "2 heads of 64 bytes a token, expected 4"),
        (tensors() | {"layers.1": torch.zeros(BLOCKS, 2, 16, 16)}, "FLASH_ATTN", "layer layers.1 differs in shape"),
        (
            {name: torch.zeros(4, BLOCKS, 16, 16).permute(1, 0, 2, 3) for name in ("layers.0", "layers.1")},
            "FLASH_ATTN",
            "this KV cache layout is not supported",
        ),
        (
            {name: torch.zeros(BLOCKS, 4, 16, 32)[..., ::2] for name in ("layers.0", "layers.1")},
            "FLASH_ATTN",
            "is not contiguous in its last axis",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_refused_in_a_sentence(caches: dict[str, Any], backend: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as refused:
        adopted(caches, backend)
    assert "\n" not in str(refused.value)


def test_every_backend_that_is_served_is_of_a_known_interior() -> None:
    assert set(INTERIORS.values()) == {"cells", "whole heads"}
