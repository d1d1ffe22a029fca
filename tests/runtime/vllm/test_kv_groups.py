"""Several KV cache groups in a rank's memory: which layer is in which, in the order of the model's layers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="KV tensors are torch's")

from pdflow.layout.shapes import KvShape  # noqa: E402
from pdflow_runtime.vllm.instance import KvGroup  # noqa: E402
from pdflow_runtime.vllm.worker.kv_memory import adopted_memory, in_model_order, layer_groups  # noqa: E402

FULL = tuple(f"model.layers.{number}.self_attn.attn" for number in (5, 11))
SLIDING = tuple(f"model.layers.{number}.self_attn.attn" for number in (*range(5), *range(6, 11)))
GROUPS = (KvGroup(FULL), KvGroup(SLIDING[:5], 1024), KvGroup(SLIDING[5:], 1024))


def test_layers_are_counted_as_the_model_does() -> None:
    """vLLM has them group by group, and 10 behind 9."""
    ordered = in_model_order(dict.fromkeys((*FULL, *SLIDING)))
    assert [int(name.split(".")[2]) for name in ordered] == list(range(12))
    assert layer_groups(ordered, GROUPS) == (1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 2, 0)


def test_one_group_needs_no_numbers() -> None:
    assert layer_groups(FULL, (KvGroup(FULL),)) == ()
    assert layer_groups(FULL, (KvGroup(FULL, 1024),)) == ()


def test_layers_of_different_groups_may_share_a_tensor() -> None:
    """A block belongs to one group at a time."""
    first, second = (torch.zeros(5, 4, 16, 16) for _ in range(2))
    caches = {"layers.0": first, "layers.1": first, "layers.2": second, "layers.3": second}
    shape = KvShape(4, 4, 8, 4, 16, packed=True)
    adopted = adopted_memory(caches, shape, 1, "FLASH_ATTN", "", 5, (0, 1, 0, 1))
    nbytes = first.untyped_storage().nbytes()
    assert [segment.nbytes for segment in adopted.segments] == [nbytes, nbytes]
    assert adopted.memory.region_bases == (0, 0, nbytes, nbytes)
    assert adopted.memory.layer_groups == (0, 1, 0, 1)
