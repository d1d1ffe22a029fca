"""The command: exit codes, where text goes, and that bad input writes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pdflow.cli
import pdflow.cli.runs
from pdflow.errors import BudgetError, InvariantError, MissingBackendError, PdflowError

ROOT = Path(__file__).resolve().parents[2]
MD1 = str(ROOT / "examples/md1.toml")


def pdflow_command(*args: str) -> Result:
    return CliRunner().invoke(pdflow.cli.cli, list(args), prog_name="pdflow")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The simulated world replaced by a note of what it was asked."""
    asked: list[dict[str, Any]] = []

    def simulate(scenario: Any, **options: Any) -> Any:
        asked.append({"scenario": scenario, **options})
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr(
        pdflow.cli.runs, "importlib", SimpleNamespace(import_module=lambda _: SimpleNamespace(simulate=simulate))
    )
    return asked


def test_simulate_passes_its_options_on(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = pdflow_command("simulate", MD1, "--seed", "5", "--set", "workload.requests=9", "--out", out, "--exact")
    assert result.exit_code == 0, result.output
    [asked] = runs
    scenario = asked.pop("scenario")
    assert (scenario.seed, scenario.workload.requests) == (5, 9)
    assert (asked["out"], asked["exact"], asked["events"]) == (out, True, False)
    flags = {"exact", "events", "check_invariants", "save_detailed", "timeline", "html", "quiet"}
    assert set(asked) == flags | {"out", "command", "written"}
    assert asked["written"].resolved is scenario


def test_bad_input_goes_to_stderr_with_exit_2_and_nothing_is_written(runs: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    sets = ("--set", "pool.decode.tp=3", "--set", "transfer.method=nixl-pul")
    result = pdflow_command("simulate", MD1, *sets, "--out", str(out))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 2
    assert "(did you mean nixl-pull?)" in result.stderr
    assert runs == []
    assert not out.exists()


@pytest.mark.parametrize("flag", ["--events", "--save-detailed", "--html"])
def test_files_need_a_folder(runs: list[Any], flag: str) -> None:
    result = pdflow_command("simulate", MD1, flag)
    assert result.exit_code == 2
    assert "--out" in result.stderr
    assert runs == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvariantError("S1"), 1),
        (MissingBackendError("pip install x"), 2),
        (BudgetError("time"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(pdflow.cli.runs, "_simulate", fail)
    result = pdflow_command("simulate", MD1)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr == (f"{error}\n" if isinstance(error, PdflowError) else "interrupted\n")


def test_the_exit_code_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdflow.cli.runs, "_simulate", lambda *_, **__: 1)
    assert pdflow_command("simulate", MD1).exit_code == 1


VALIDATED = """\
scenario  shared-link, seed 1
workload  50,000 requests, Poisson at 8/s
model     llama-3.1-8b: 16.1 GB of weights, KV 131,072 B/token
transfer  nixl-push, strict
posting   connector vllm-nixl
router    round-robin, concurrent dispatch, 2 attempts
network   ideal: unlimited, 0 s
link      uplink: 671 MB/s, 0 s
path      prefill to decode via uplink
cost      prefill: constant: 0.1 s per prefill step, 0.0 s per decode step; not
          a model of a GPU
cost      decode: constant: 0.0 s per prefill step, 0.0 s per decode step; not a
          model of a GPU
noise     off

                                         weights    KV tokens    KV bytes
pool     role     engines  GPUs each     per GPU   per engine  per engine
prefill  prefill      400  1 x h100-sxm  16.1 GB      457,824       60 GB
decode   decode         1  1 x h100-sxm  16.1 GB  100,000,000     13.1 TB
"""


def test_validate_prints_what_the_engines_hold() -> None:
    result = pdflow_command("validate", str(ROOT / "examples/shared-link.toml"))
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == VALIDATED.splitlines()


def test_names_are_shown_as_they_are() -> None:
    name = "[/x] :smile: [red]"
    result = pdflow_command("validate", MD1, "--set", f'scenario.name="{name}"')
    assert result.exit_code == 0, result.output
    assert f"scenario  {name}, seed 1" in result.stdout


def test_validate_of_a_wrong_file() -> None:
    result = pdflow_command("validate", str(ROOT / "tests/scenario/wrong/everything.toml"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 23


def test_schema_is_json() -> None:
    assert json.loads(pdflow_command("schema").stdout)["title"] == "pdflow scenario"


def test_presets() -> None:
    everything = pdflow_command("presets").stdout
    assert all(name in everything for name in ("llama-3.1-70b", "a100-80g", "rdma-400g", "NVIDIA A100"))
    one = pdflow_command("presets", "deepseek-v3").stdout
    assert "moe.dense_layers" in one
    assert "config.json" in one
    assert "h200" not in one
    assert max(map(len, (everything + one).splitlines())) <= 80
    wrong = pdflow_command("presets", "idel")
    assert wrong.exit_code == 2
    assert "did you mean ideal?" in wrong.stderr
    alias = pdflow_command("presets", "h100").stdout
    assert alias.startswith('"h100" is the preset h100-sxm: NVIDIA H100 SXM 80 GB\n')
    assert "GPU h100-sxm: " in alias
    assert "h800" not in alias


def test_the_preset_that_an_alias_stands_for_is_printed() -> None:
    expected = 'pool.prefill.gpu: "h100" is the preset h100-sxm: NVIDIA H100 SXM 80 GB'
    validated = pdflow_command("validate", MD1, "--set", "pool.prefill.gpu=h100")
    assert expected in " ".join(validated.stdout.split())
    few = ("--set", "workload.requests=3")
    simulated = pdflow_command("simulate", MD1, "--set", "pool.prefill.gpu=h100", *few)
    assert f"note: {expected}" in " ".join(simulated.stderr.split())
    assert "note: " not in pdflow_command("simulate", MD1, "--set", "pool.prefill.gpu=h100-sxm", *few).stderr


@pytest.mark.parametrize("command", [(), ("simulate",), ("validate",), ("schema",), ("presets",)])
def test_help_is_readable_at_80_columns(command: tuple[str, ...]) -> None:
    result = pdflow_command(*command, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "..." not in result.stdout.replace("COMMAND [ARGS]...", "").replace("[NAME]...", "")


def module(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdflow", *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_as_a_module_without_colours() -> None:
    done = module("validate", MD1, NO_COLOR="1", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b[3" not in done.stdout
    wrong = module("validate", "absent.toml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "absent.toml: cannot be read: No such file or directory\n"
    assert module("--version").stdout.startswith("pdflow")


def test_help_opens_nothing_slow() -> None:
    slow = ("sim", "numpy", "rich", "cattrs", "matplotlib")
    code = f"import sys, pdflow.cli; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_of_somebody_else_called_sim_and_runtime_change_nothing(tmp_path: Path) -> None:
    """Both names are common in research code, and the working directory comes first on the path."""
    for name in ("sim", "runtime"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    code = f"import pdflow; pdflow.simulate({MD1!r}, overrides={{'workload.requests': 9}})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
