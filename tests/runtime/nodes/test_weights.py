"""KV of other weights, or in another dtype, is refused, and the log says so: however late in the model weights differ,
and though both dtypes may have the same size."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from safetensors.torch import load_file, save_file

from pdflow.protocol.messages import Code
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.models import TorchModel, folder_of
from tests.runtime.store.test_store import another_engine
from tests.runtime.support.live_pair import Prefill, cluster, live_pair, prompt

SAMPLING = Sampling(max_tokens=8, ignore_eos=True)
LATE = "model.layers.3.mlp.down_proj.weight"
"""Of the last layer: no KV depends on it, and every token does."""


def changed(folder: Path, name: str) -> None:
    """One value of one tensor is another."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 0] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model twice, but for a value of the last layer."""
    base = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        made = folder_of(cluster())
    original, other = (Path(shutil.copytree(made, base / name)) for name in ("original", "other"))
    changed(other, LATE)
    return original, other


@pytest.fixture
def pair(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[ResolvedScenario, TorchModel, Prefill]:
    """D's scenario and model, and P's. The parameter: what both scenarios say besides."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    d, p = (cluster(f"serve.model={folder}", *request.param) for folder in folders)
    return d, TorchModel(d), (p, TorchModel(p))


STORE = ("transfer.method=kv-store", "transfer.store_granularity=block", "pool.prefill.enable_prefix_caching=false")


@pytest.mark.parametrize(
    "pair",
    [("transfer.method=nixl-push",), ("transfer.method=nixl-pull",), STORE],
    ids=["push", "pull", "store"],
    indirect=True,
)
@pytest.mark.trio
async def test_kv_of_a_model_that_differs_in_its_last_layer_is_refused_and_logged(
    pair: tuple[ResolvedScenario, TorchModel, Prefill], caplog: pytest.LogCaptureFixture
) -> None:
    scenario, model, prefill = pair
    async with live_pair(scenario, model, "tcp", prefill) as home:
        for number in range(2):
            assert await home.ask(f"r{number}", prompt(100, number), SAMPLING) == ([], Code.WEIGHTS)
        await home.quiet()
    messages = [record.getMessage() for record in caplog.records if "(WEIGHTS)" in record.getMessage()]
    assert len(messages) == 1, "said once of each peer"
    assert "decode-0" in messages[0]
    assert ("store-0" if home.store is not None else "prefill-0") in messages[0]
    assert f"{model.weights:016x}" in messages[0]


@pytest.mark.parametrize("pair", [STORE], indirect=True)
@pytest.mark.trio
async def test_nothing_in_a_store_is_found_by_an_engine_of_other_weights(
    pair: tuple[ResolvedScenario, TorchModel, Prefill],
) -> None:
    scenario, model, (of_p, other) = pair
    async with live_pair(scenario, model) as home:
        assert (await home.ask("a", prompt(500), SAMPLING)).code is Code.NONE
        async with another_engine(home, other, *STORE, f"serve.model={of_p.serve.model}") as node:
            assert await home.ask("b", prompt(500), SAMPLING) == ([], Code.WEIGHTS)
            assert node.engine.prompt_tokens_computed == 500
            await home.quiet()


@pytest.mark.parametrize("p_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull", "kv-store"])
@pytest.mark.trio
async def test_engines_of_other_dtypes_refuse_each_other_with_both_named(
    method: str, p_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    d, p = (cluster(f"transfer.method={method}", f"model.kv_dtype={dtype}") for dtype in ("bf16", p_dtype))
    async with live_pair(d, TorchModel(d), "tcp", (p, TorchModel(p))) as home:
        # What is to be read is judged before its engine is met.
        code = Code.WEIGHTS if method == "nixl-pull" else Code.UNREACHABLE
        assert await home.ask("r", prompt(100), SAMPLING) == ([], code)
    theirs = {"fp32": "float32", "fp16": "float16"}[p_dtype]
    there = "decode-0.r0" if home.store is None else "store-0.put.r0"
    message = f"prefill-0.r0 keeps KV in {theirs}, {there} in bfloat16: give all engines one model.kv_dtype"
    if method == "nixl-pull":
        message = rf"dtype \(weights \w+ in {theirs}\) differ from those here \(weights \w+ in bfloat16\)"
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
@pytest.mark.trio
async def test_kv_goes_from_engine_to_engine_in_any_dtype(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scenario = cluster(f"model.kv_dtype={dtype}")
    async with live_pair(scenario, TorchModel(scenario)) as home:
        answer = await home.ask("r", prompt(40), SAMPLING)
        assert answer.code is Code.NONE
        assert len(set(answer.tokens)) > 4
        assert answer == await home.ask_alone("alone", prompt(40), SAMPLING)
        await home.quiet()
