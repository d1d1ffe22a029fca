"""A model's folder that cannot be served is a sentence and exit code 2, whatever is wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.protocol.wire.limits import MAX_BLOCKS
from runtime.http.errors import OpenAIError
from runtime.models import TorchModel, folder_of, open_prompts, weights_bytes
from tests.runtime.support.house import cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(folder_of(cluster()), tmp_path / "model"))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_missing_is_said(missing: str, folder: Path) -> None:
    (folder / missing).unlink()
    with pytest.raises(PdflowError, match=r"config\.json|tokenizer\.json|safetensors") as told:
        TorchModel(cluster(f"serve.model={folder}"))
    assert told.value.exit_code == EXIT_BAD_INPUT


def test_another_shape_is_refused_before_its_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    other = cluster(f"serve.model={folder}", "model.num_layers=3")
    for opened in (TorchModel, open_prompts):
        with pytest.raises(PdflowError, match=r"model\.num_layers: is 3"):
            opened(other)


def test_a_prompt_of_more_blocks_than_a_registration_names_is_refused_to_whoever_sends_it() -> None:
    """D's process ended when it was to be registered."""
    engines = [f"pool.{pool}.engine=synthetic" for pool in ("prefill", "decode")]
    room = [f"pool.{pool}.kv_tokens=200_000" for pool in ("prefill", "decode")]
    prompts = open_prompts(cluster(*engines, *room, "pool.prefill.block_size=1", "pool.decode.block_size=1"))
    prompts.check_length(MAX_BLOCKS, 20)
    with pytest.raises(OpenAIError, match="may have 65536 tokens here") as refused:
        prompts.check_length(MAX_BLOCKS + 1, 20)
    assert refused.value.status == 400
    open_prompts(cluster(*engines, *room)).check_length(190_000, 20)


def test_the_time_to_start_is_by_the_size_of_the_weights(folder: Path) -> None:
    assert weights_bytes(cluster()) == 0
    assert weights_bytes(cluster(f"serve.model={folder}")) == (folder / "model.safetensors").stat().st_size
