"""benchmarks/engine_speed.py runs, on a model of next to nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine's arithmetic is torch's: pip install 'pdflow[live]'")

from benchmarks import engine_speed  # noqa: E402
from pdflow.layout.descriptors import rank_memory  # noqa: E402
from pdflow_runtime.engines.kv_cache import KvCache  # noqa: E402
from pdflow_runtime.engines.torch_runner import TorchRunner  # noqa: E402


@pytest.mark.parametrize(("sequences", "start", "new"), [(3, 100, 1), (1, 40, 60)])
def test_a_step_against_its_bare_products(sequences: int, start: int, new: int) -> None:
    llama = engine_speed.model((16, 16, 2, 2, 1, 8, 32), torch.float32)
    shape = llama.config.kv_shape(engine_speed.BLOCK_SIZE, "float32")
    region = memoryview(bytearray(shape.rank_block_bytes(1) * 21))
    runner = TorchRunner(llama, KvCache(shape, [rank_memory(shape, 21, 1)], [region], torch.float32))
    step = engine_speed.works(sequences, start, new)
    assert len(runner.compute(step)) == sequences
    assert engine_speed.median_ms(lambda: runner.compute(step), 1, 0) > 0
    assert engine_speed.products_ms(llama, sequences * new, sequences) > 0
