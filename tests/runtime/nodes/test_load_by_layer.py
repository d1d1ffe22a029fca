"""With `load_by_layer`, D computes a prompt's first step while its KV is copied into blocks: a layer after its copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

import torch

from pdflow.errors import ScenarioError
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.scenario.reading.load import load
from pdflow.serving.decode_request import DecodeStage
from pdflow_runtime.build import refuse_what_is_not_served
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.engines.step_load import LoadFailedError, StepLoad
from pdflow_runtime.gpu import memory as gpu_memory
from pdflow_runtime.nodes.decode_node import DecodeLeg
from pdflow_runtime.nodes.models import SyntheticModel, TorchModel
from pdflow_runtime.nodes.staged_decode_node import LiveStagedDecodeNode
from pdflow_runtime.transports.base import TransportError
from pdflow_sim.check.counterexamples.trace import follow
from tests.runtime.nodes.test_hand_over import same_tokens
from tests.runtime.nodes.test_mirrored import ON_DEVICE
from tests.runtime.support.live_pair import LivePair, answer_of, cluster, live_pair, prompt
from tests.runtime.support.served import served

QUICKSTART: Final = Path(__file__).resolve().parents[3] / "examples/serve-quickstart.toml"
LAYERS: Final = 4
"""Of the tiny model."""
BY_LAYER: Final = ("transfer.method=cpu-staged", "transfer.load_by_layer=true")
SYNTHETIC: Final = ("pool.prefill.engine=synthetic", "pool.decode.engine=synthetic", "pool.prefill.pp=2")
GREEDY: Final = Sampling(max_tokens=6, ignore_eos=True)
TIMEOUT_S: Final = 60


class Steps:
    """What D does with layers, in order: ("copied", layer) and ("computed", layer). `hold` is called in the copying
    thread, with the layer that is copied next."""

    def __init__(self, home: LivePair, hold: Callable[[int], None] = lambda layer: None) -> None:
        node = home.d
        assert isinstance(node, LiveStagedDecodeNode)
        self.done: list[tuple[str, int]] = []
        cache, copy_layer = node.engine._runner._cache, node.copy_layer  # type: ignore[attr-defined]
        write = cache.write

        def copied(*args: Any) -> None:
            hold(args[-1])
            copy_layer(*args)
            self.done.append(("copied", args[-1]))

        def computed(layer: int, *args: Any) -> None:
            write(layer, *args)
            self.done.append(("computed", layer))

        node.copy_layer = copied  # type: ignore[method-assign, assignment]
        cache.write = computed

    def computed(self) -> list[int]:
        return [layer for what, layer in self.done if what == "computed"]


class Held:
    """Holds the copying thread before one layer until a test lets it go on."""

    def __init__(self, layer: int) -> None:
        self.layer: Final = layer
        self.reached: Final = threading.Event()
        self._go_on: Final = threading.Event()

    def __call__(self, layer: int) -> None:
        if layer == self.layer:
            self.reached.set()
            assert self._go_on.wait(TIMEOUT_S)

    async def wait(self) -> None:
        assert await trio.to_thread.run_sync(self.reached.wait, TIMEOUT_S)

    def go_on(self) -> None:
        self._go_on.set()


def begin(home: LivePair, name: str = "r", length: int = 100, sampling: Sampling = GREEDY) -> DecodeLeg:
    leg = home.send(name, prompt(length), sampling)
    assert isinstance(leg, DecodeLeg)
    return leg


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each step that loads has loaded."""
    counted: list[int] = []
    run = StepLoad.run

    def counting(self: StepLoad, *args: Any) -> None:
        counted.append(len(self._copies))
        run(self, *args)

    monkeypatch.setattr(StepLoad, "run", counting)
    return counted


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("transfer.host_buffer_bytes=3145728",),
        ("pool.prefill.tp=2", "pool.decode.tp=1", "pool.decode.block_size=32"),
        ("pool.prefill.tp=1", "pool.decode.tp=2", "pool.prefill.block_size=32"),
        ("pool.prefill.pp=2",),
        ("pool.decode.enable_prefix_caching=false",),
    ],
    ids=" ".join,
)
@pytest.mark.trio
async def test_the_tokens_are_those_of_one_engine_alone(
    keys: tuple[str, ...], model: TorchModel, loads: list[int]
) -> None:
    async with live_pair(cluster(*BY_LAYER, *keys), model) as home:
        await same_tokens(home)
        assert sum(loads) == 8, "each prompt is loaded in a step"


@pytest.mark.trio
async def test_answers_that_begin_with_the_token_of_p(model: TorchModel, loads: list[int]) -> None:
    """P's token is the first that D's step computes, in a block of its own behind a prompt that fills its last one."""
    async with live_pair(cluster(*BY_LAYER, "router.first_token=prefill"), model) as home:
        for length in (1, 15, 16, 17, 100):
            name, tokens = f"r{length}", prompt(length, length)
            alone = await home.ask_alone(f"a{length}", tokens, GREEDY)
            home.p.begin(name, f"x-{name}", tokens)
            params = KvParams(home.p.config.info, f"x-{name}", name, 0)
            answer = await answer_of(home.d.begin(name, params, tokens, GREEDY, first=alone.tokens[0]))
            assert answer.tokens == alone.tokens[1:]
        assert sum(loads) == 5
        await home.quiet()


@pytest.mark.trio
async def test_all_layers_are_copied_first_where_the_token_of_p_is_not_known(
    model: TorchModel, loads: list[int]
) -> None:
    async with live_pair(cluster(*BY_LAYER, "router.first_token=prefill"), model) as home:
        alone = await home.ask_alone("a", prompt(100), GREEDY)
        home.p.begin("r", "x-r", prompt(100))
        params = KvParams(home.p.config.info, "x-r", "r", 0)
        leg = home.d.begin("r", params, prompt(100), GREEDY, first_follows=True)
        with trio.fail_after(TIMEOUT_S):
            while home.d.decoding.stage_of("r") is not DecodeStage.LOADED:
                await trio.sleep(0.001)
        home.d.set_first_token(leg, alone.tokens[0])
        assert (await answer_of(leg)).tokens == alone.tokens[1:]
        assert not loads
        await home.quiet()


@pytest.mark.slow
@pytest.mark.trio
async def test_a_cluster_answers_as_without_it(tmp_path: Path) -> None:
    """Its processes, its record, and its requests all at once."""
    fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    answers = []
    for by_layer in ("false", "true"):
        overrides = ("transfer.method=cpu-staged", f"transfer.load_by_layer={by_layer}")
        record = tmp_path / by_layer
        with served(tmp_path, QUICKSTART, *overrides, events=record) as processes:
            tokens: dict[int, list[int]] = {}

            async def ask(number: int, tokens: dict[int, list[int]] = tokens, served: Any = processes) -> None:
                tokens[number] = (await served.ask(prompt=prompt(300, number % 8), **fields)).tokens

            async with trio.open_nursery() as nursery:
                for number in range(16):
                    nursery.start_soon(ask, number)
        answers.append(tokens)
        assert follow(load(QUICKSTART, overrides=overrides), record / "events.jsonl").events
    assert answers[0] == answers[1]


@pytest.mark.trio
async def test_synthetic_engines_read_no_wrong_kv(loads: list[int]) -> None:
    scenario = cluster(*BY_LAYER, *SYNTHETIC)
    model = SyntheticModel(scenario, scenario.pools[1])
    async with live_pair(scenario, model) as home:
        await same_tokens(home)
        assert home.d.engine._runner.wrong == 0  # type: ignore[attr-defined]
        assert sum(loads) == 8


@pytest.mark.trio
async def test_engines_with_a_copy_of_their_blocks_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, loads: list[int]
) -> None:
    """As on a GPU. What nobody has written is no number, in both memories."""

    def pinned(view: memoryview, gpu: int) -> Any:
        return torch.frombuffer(view, dtype=torch.uint8).fill_(255)

    monkeypatch.setattr(gpu_memory, "allocate", lambda nbytes, gpu: torch.full((nbytes,), 255, dtype=torch.uint8))
    monkeypatch.setattr(gpu_memory, "pinned", pinned)
    scenario = cluster(*BY_LAYER, *ON_DEVICE)
    async with live_pair(scenario, TorchModel(scenario)) as home:
        await same_tokens(home)
        assert sum(loads) == 8


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.trio
async def test_a_layer_is_computed_after_its_copy(
    layer: int, model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of one layer is held back until the engine has come to that layer: those before it have been computed by
    then, and it is not."""
    arrived = threading.Event()
    wait_for = StepLoad.wait_for

    def waiting(self: StepLoad, at: int) -> None:
        if at == layer:
            arrived.set()
        wait_for(self, at)

    monkeypatch.setattr(StepLoad, "wait_for", waiting)
    async with live_pair(cluster(*BY_LAYER), model) as home:
        held = Held(layer)
        steps = Steps(home, held)
        leg = begin(home, sampling=Sampling(max_tokens=1, ignore_eos=True))
        await held.wait()
        assert await trio.to_thread.run_sync(arrived.wait, TIMEOUT_S)
        # An engine that does not wait computes the layer in less than that.
        await trio.sleep(0.1)
        assert steps.computed() == list(range(layer))
        held.go_on()
        assert await answer_of(leg) == await home.ask_alone("a", prompt(100), Sampling(max_tokens=1, ignore_eos=True))
        for each in range(LAYERS):
            assert steps.done.index(("copied", each)) < steps.done.index(("computed", each))
        await home.quiet()


@pytest.mark.trio
async def test_a_prompt_that_is_aborted_during_its_load_keeps_its_blocks_until_the_copies_end(
    model: TorchModel,
) -> None:
    async with live_pair(cluster(*BY_LAYER), model) as home:
        held = Held(2)
        steps = Steps(home, held)
        leg = begin(home)
        await held.wait()
        node = home.d
        free = node.pool.free
        assert free < node.pool.num_blocks
        assert node.staging is not None
        node.abort(leg)
        assert await answer_of(leg) == ([], Code.CANCELLED)
        assert node.decoding.knows("r"), "no other request may have this name yet"
        assert node.pool.free == free
        assert node.staging.held, "the copies still read from there"
        held.go_on()
        await home.quiet()
        assert steps.done.count(("copied", LAYERS - 1)) == 1
        assert not node.decoding.knows("r")
        # Its KV is in the prefix cache now, all of it.
        again = await answer_of(begin(home, "s"))
        assert node.engine.prefix_cache_hits == 96
        assert again == await home.ask_alone("a", prompt(100), GREEDY)
        await home.quiet()


@pytest.mark.trio
async def test_other_requests_of_the_step_get_their_tokens_if_one_is_aborted(model: TorchModel) -> None:
    """Two prompts that one step loads, and one that decodes there already."""
    async with live_pair(cluster(*BY_LAYER), model) as home:
        long = Sampling(max_tokens=40, ignore_eos=True)
        expected = {name: await home.ask_alone(f"a{name}", prompt(100), long) for name in ("old", "stays")}
        old = begin(home, "old", sampling=long)
        while not home.d.engine.steps:
            await trio.sleep(0)
        held = Held(1)
        Steps(home, held)
        home.d.engine.hold()
        legs = [begin(home, name, sampling=long) for name in ("leaves", "stays")]
        while home.d.engine.waiting < len(legs):
            await trio.sleep(0.001)
        home.d.engine.resume()
        await held.wait()
        home.d.abort(legs[0])
        held.go_on()
        assert await answer_of(legs[1]) == expected["stays"]
        assert await answer_of(old) == expected["old"]
        await home.quiet()


@pytest.mark.trio
async def test_sequences_that_were_loaded_are_preempted_and_computed_again(model: TorchModel, loads: list[int]) -> None:
    """There are blocks for all prompts, and not for all answers."""
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    async with live_pair(cluster(*BY_LAYER, "pool.decode.kv_tokens=768"), model) as home:
        prompts = {f"r{number}": prompt(100, number) for number in range(6)}
        alone = {name: await home.ask_alone(f"a{name}", tokens, sampling) for name, tokens in prompts.items()}
        legs = {name: home.send(name, tokens, sampling) for name, tokens in prompts.items()}
        for name, leg in legs.items():
            assert isinstance(leg, DecodeLeg)
            assert await answer_of(leg) == alone[name]
        assert home.d.engine.preemptions
        assert sum(loads) == len(prompts), "what is computed again is not loaded again"
        await home.quiet()


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
@pytest.mark.trio
async def test_a_copy_that_fails_ends_the_engine(layer: int, model: TorchModel) -> None:
    """As one does that is made before the step. No token is computed from what the blocks hold, and they stay taken."""

    def fails(at: int) -> None:
        if at == layer:
            raise TransportError("this memory is gone")

    kept: list[Any] = []
    with pytest.RaisesGroup(LoadFailedError, flatten_subgroups=True) as caught:
        async with live_pair(cluster(*BY_LAYER), model) as home:
            steps = Steps(home, fails)
            kept = [home.d, steps, begin(home)]
            await trio.sleep_forever()
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert f"layer {layer} of the KV" in str(error)
    assert isinstance(error.__cause__, TransportError)
    node, steps, leg = kept
    assert steps.computed() == list(range(layer))
    assert node.pool.free < node.pool.num_blocks
    assert node.staging.held
    with pytest.raises(trio.WouldBlock):
        leg.receive_channel.receive_nowait()


@pytest.mark.trio
async def test_an_engine_that_is_stopped_during_a_load_closes_its_memory_after_the_copies(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = trio.Event()
    held = Held(1)
    aclose = LiveStagedDecodeNode.aclose

    async def closing(self: LiveStagedDecodeNode) -> None:
        closed.set()
        await aclose(self)

    monkeypatch.setattr(LiveStagedDecodeNode, "aclose", closing)

    async def stopped() -> None:
        async with live_pair(cluster(*BY_LAYER), model) as home:
            Steps(home, held)
            begin(home)
            await held.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stopped)
        await held.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not closed.is_set()
        held.go_on()
        with trio.fail_after(TIMEOUT_S):
            await closed.wait()


def test_only_the_dialect_of_the_original_is_refused() -> None:
    refuse_what_is_not_served(cluster(*BY_LAYER))
    with pytest.raises(ScenarioError, match="pdflow serve supports strict only") as caught:
        refuse_what_is_not_served(cluster(*BY_LAYER, "transfer.dialect=as-published"))
    assert [problem.path for problem in caught.value.problems] == ["transfer.dialect"]
