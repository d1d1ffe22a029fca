"""The page "Serve your own Hugging Face model": its commands run, with a copy of examples/tiny-docs as `my-model`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands, run_pdflow

PAGE = (ROOT / "docs/serve-your-model.md").read_text(encoding="utf-8")
COMMANDS = commands(PAGE)
TRAIN = ROOT / "examples/train_tiny.py"


def command(name: str) -> list[str]:
    """The words of the page's command `pdflow NAME`, or `curl`."""
    [line] = [line for line in COMMANDS if line.startswith((f"pdflow {name}", name))]
    return shlex.split(os.path.expandvars(line))


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the page's commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    tmp_path.joinpath("examples").symlink_to(ROOT / "examples")
    shutil.copytree(ROOT / "examples/tiny-docs", tmp_path / "my-model")
    return tmp_path


@pytest.mark.parametrize("name", ["validate", "simulate"])
def test_a_folder_is_validated_and_simulated_by_its_config_alone(name: str, clone: Path) -> None:
    for file in (clone / "my-model").iterdir():
        if file.name != "config.json":
            file.unlink()
    few = ["--set", "workload.requests=3"] if name == "simulate" else []
    ran = run_pdflow([*command(name)[1:], *few])
    assert ran.exit_code == 0, ran


@pytest.mark.slow
def test_a_folder_is_served_and_answers(clone: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    from tests.runtime.support.served import served

    _, _, scenario, *overrides = command("serve")
    with served(clone, clone / scenario, *overrides[1::2]) as cluster:
        curl = [argument.replace("127.0.0.1:8000", f"127.0.0.1:{cluster.port}") for argument in command("curl")]
        answer = subprocess.run(curl, capture_output=True, encoding="utf-8", check=True).stdout
        top = [sys.executable, "-m", *command("top"), f"http://127.0.0.1:{cluster.port}", "--once"]
        subprocess.run(top, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    assert "chat.completion" in answer
    assert "my-model" in cluster.log.read_text(encoding="utf-8")


def test_the_page_names_the_families_that_are_computed() -> None:
    config = pytest.importorskip("pdflow_runtime.engines.config")
    named = re.findall(r"^\| `(\w+)` \| ", PAGE.partition("## Get a folder")[0], re.MULTILINE)
    assert tuple(named[1:] if named[0] == "model_type" else named) == config.FAMILY


def test_the_model_of_the_quickstart_is_small() -> None:
    assert sum(file.stat().st_size for file in (ROOT / "examples/tiny-docs").iterdir()) < 5_000_000


@pytest.mark.slow
def test_the_training_script_writes_a_folder_that_is_served(tmp_path: Path) -> None:
    """Two steps of it: files that the engine reads, of the shape of those that are committed."""
    pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")
    pytest.importorskip("transformers", reason="needs transformers: pip install 'pdflow[dev]'")
    from pdflow_runtime.engines.config import read_config
    from pdflow_runtime.engines.tokenizer import Tokenizer
    from pdflow_runtime.engines.weights import read_weights

    made = tmp_path / "model"
    subprocess.run([sys.executable, str(TRAIN), "--steps", "2", "--out", str(made)], check=True, cwd=tmp_path)
    config = read_config(made)
    assert config == read_config(ROOT / "examples/tiny-docs")
    read_weights(made, config, "float32")
    assert Tokenizer(made).decode(Tokenizer(made).encode("a KV cache")) == "a KV cache"
