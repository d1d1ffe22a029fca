"""The copies that a step waits for: in a runner, on a device that is late, and in an engine that is given none."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch")

from pdflow.engine import Admitted, Dropped  # noqa: E402
from pdflow_runtime.engines.device import Cpu  # noqa: E402
from pdflow_runtime.engines.host_mirror import HostMirror  # noqa: E402
from pdflow_runtime.engines.job import GREEDY, TokenRequest, Work  # noqa: E402
from pdflow_runtime.engines.kv_cache import KvCache  # noqa: E402
from pdflow_runtime.engines.step_load import LoadFailedError, StepLoad  # noqa: E402
from pdflow_runtime.engines.torch_runner import TorchRunner  # noqa: E402
from pdflow_runtime.engines.weights import DTYPES  # noqa: E402
from tests.runtime.engines import support  # noqa: E402
from tests.runtime.engines.late_device import LateDevice  # noqa: E402

pytestmark = pytest.mark.trio
BLOCKS = 12
PROMPT = tuple(5 + (at * 31) % 240 for at in range(70))
TABLE = (7, 2, 9, 4, 1)
LAST = Work(PROMPT[-1:], len(PROMPT) - 1, TABLE, TokenRequest(GREEDY, 0), True, TABLE, True)


def nothing() -> None:
    pass


def host_memory(folder: Path) -> tuple[Any, Any, list[Any]]:
    """The shape, the ranks and the blocks of an engine that has computed the prompt but for its last token. Slots that
    nobody has written are no numbers."""
    model = support.load(folder)
    memories = support.memories(model.config, "float32", BLOCKS)
    TorchRunner(model, memories.cache("float32")).compute([Work(PROMPT[:-1], 0, TABLE, None)])
    regions = [torch.frombuffer(region, dtype=torch.uint8) for region in memories.regions]
    size, last = memories.shape.block_size, TABLE[-1]
    cache = KvCache(memories.shape, memories.ranks, regions, DTYPES["float32"])
    beyond = torch.arange(len(PROMPT) % size, size)
    for layer in range(memories.shape.num_layers):
        slots = cache.slot_mapping(torch.full_like(beyond, last), beyond)
        heads = memories.shape.num_kv_heads
        cache.write(layer, slots, torch.full((len(beyond), 2, heads, memories.shape.head_dim), torch.nan))
    return memories.shape, memories.ranks, regions


@pytest.mark.parametrize("loads", [False, True], ids=["before the step", "in the step"])
async def test_blocks_in_host_memory_are_brought_to_the_device_layer_by_layer(tiny: Path, loads: bool) -> None:
    """Whatever is beyond a sequence's end comes with them."""
    shape, ranks, mirror = host_memory(tiny)
    model, device = support.load(tiny), Cpu()
    kept = [torch.full_like(region, 255) for region in mirror]
    cache = KvCache(shape, ranks, kept, DTYPES["float32"], device)
    runner = TorchRunner(model, cache, HostMirror(shape, ranks, kept, mirror, device))
    load = None
    if loads:
        load = StepLoad(shape.num_layers)
        load.add(lambda layer: None, nothing)
    work = Work(LAST.tokens, LAST.start, TABLE, LAST.token_request, True, TABLE, loads)
    (sampled,) = await runner.step([work], None, load)
    assert sampled is not None
    assert [sampled.token] == support.dense_answer(model, PROMPT, 1)


async def test_a_layer_is_computed_when_its_copy_to_a_device_has_ended(tiny: Path) -> None:
    shape, ranks, mirror = host_memory(tiny)
    size = shape.block_size
    for memory, region in zip(ranks, mirror, strict=True):
        cells = region.view(memory.num_layers, memory.tensors_per_layer, BLOCKS, memory.num_heads, size, -1)
        cells[:, :, TABLE[-1], :, len(PROMPT) % size :] = 0
    model, device = support.load(tiny), LateDevice(100)
    seen = [torch.full_like(region, 255) for region in mirror]
    kept = device.hide("loads", seen)
    cache = KvCache(shape, ranks, seen, DTYPES["float32"], device)
    runner = TorchRunner(model, cache, HostMirror(shape, ranks, kept, mirror, device))
    load = StepLoad(shape.num_layers)
    load.add(lambda layer: None, nothing)
    (sampled,) = await runner.step([LAST], None, load)
    assert sampled is not None
    assert [sampled.token] == support.dense_answer(model, PROMPT, 1)


async def test_copies_are_made_layer_by_layer_and_reported_once_each(tiny: Path) -> None:
    made: list[Any] = []
    load = StepLoad(2)
    for name in ("a", "b"):
        load.add(lambda layer, name=name: made.append((layer, name)), lambda name=name: made.append(name))  # type: ignore[misc]
    load.run(lambda layer: made.append(layer))
    assert made == [(0, "a"), (0, "b"), 0, (1, "a"), (1, "b"), 1, "a", "b"]
    assert load.rule.complete
    load.check()


@pytest.mark.parametrize(("fails_in", "computed"), [("copy", [0]), ("bring", [0]), ("copied", [0, 1, 2])])
async def test_a_failure_is_raised_where_the_layer_is_waited_for(fails_in: str, computed: list[int]) -> None:
    def fails(layer: int = 1) -> None:
        if layer:
            raise OSError("no such memory")

    load = StepLoad(3)
    load.add(fails if fails_in == "copy" else lambda layer: None, fails if fails_in == "copied" else nothing)
    done = []

    def step() -> None:
        with load.running(fails if fails_in == "bring" else None):
            for layer in range(3):
                load.wait_for(layer)
                done.append(layer)

    with pytest.raises(LoadFailedError, match="no such memory"):
        step()
    assert done == computed


async def test_a_step_that_fails_has_ended_when_its_copies_have() -> None:
    """Otherwise a copy might write into memory that is closed behind the step."""
    failing, copied = threading.Event(), []

    def copy(layer: int) -> None:
        assert failing.wait(60)
        time.sleep(0.05)
        copied.append(layer)

    load = StepLoad(2)
    load.add(copy, nothing)

    def step() -> None:
        with load.running(None):
            failing.set()
            raise ArithmeticError("of the step's own")

    with pytest.raises(ArithmeticError, match="of the step's own"):
        step()
    assert copied == [0, 1]


async def test_an_engine_computes_no_sequence_whose_copies_it_was_not_given(tiny: Path) -> None:
    bench = support.Bench(support.load(tiny))
    bench.ask(PROMPT, remote_kv=True, loads_in_step=True)
    with trio.fail_after(60), pytest.raises(RuntimeError, match=r"no copies were given for sequences \[0\]"):
        await bench.engine.run()


async def test_an_engine_accepts_copies_of_sequences_that_it_admits_now_only(tiny: Path) -> None:
    bench = support.Bench(support.load(tiny))
    seq = bench.ask(PROMPT, remote_kv=True, loads_in_step=True)
    with pytest.raises(ValueError, match="sequence 0 is not one whose KV the next step waits for"):
        bench.engine.load_in_step(seq, 2, lambda layer: None, nothing)


async def test_a_sequence_that_is_dropped_as_it_is_admitted_needs_no_copies(tiny: Path, nursery: trio.Nursery) -> None:
    bench = support.Bench(support.load(tiny))
    answers = []

    def dropping(outcome: object) -> None:
        if isinstance(outcome, Admitted):
            answers.append(bench.engine.drop(outcome.seq))

    bench.hook = dropping
    seq = bench.ask(PROMPT, remote_kv=True, loads_in_step=True)
    nursery.start_soon(bench.engine.run)
    while not answers or bench.engine.pool.free < 200:
        await trio.sleep(0)
    assert answers == [Dropped.AFTER_STEP]
    assert not bench.answers[seq]
    nursery.cancel_scope.cancel()
