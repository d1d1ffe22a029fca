"""A model's folder that cannot be served is a sentence and exit code 2, whatever is wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from runtime.models import TorchModel, folder_of, open_prompts
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
