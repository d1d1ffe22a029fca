"""The extra `client` is enough for `pdflow top` and `pdflow bench`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[client]'")
pytest.importorskip("httptools", reason="needs httptools: pip install 'pdflow[client]'")

import trio

from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from tests.runtime.bench.stub import stub

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Final = PROJECT["optional-dependencies"]
SMALL: Final = ("--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "2")
WITHOUT: Final = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from pdflow.cli import main
main()
"""
"""A command in an environment that lacks these modules."""


def modules(extra: str) -> set[str]:
    return {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in EXTRAS[extra] if not need.startswith("pdflow[")}


def without(missing: Iterable[str], *args: str) -> list[str]:
    return [sys.executable, "-c", WITHOUT.format(missing=sorted(missing)), *args]


def test_live_has_what_client_has() -> None:
    assert "pdflow[client]" in EXTRAS["live"]
    assert {"torch", "tokenizers"} <= modules("live")
    assert modules("client") == {"trio", "httptools"}


@pytest.mark.trio
async def test_bench_runs_without_what_only_live_has(tmp_path: Path) -> None:
    async with stub() as (_, port):
        args = ("bench", "--port", str(port), *SMALL, "--out", str(tmp_path / "out"))
        ran = await trio.run_process(without(modules("live"), *args), capture_stdout=True, capture_stderr=True)
    assert b"completed    3 of 3" in ran.stdout
    assert (tmp_path / "out/results.json").is_file()


@pytest.mark.trio
async def test_top_runs_without_what_only_live_has() -> None:
    from tests.runtime.http.world import serving

    async def state(request: HttpRequest, responder: Responder) -> None:
        assert request.path == "/admin/state"
        await responder.reply(200, (JSON,), b'{"open": 7, "engines": {}, "drained": [], "silent": []}')

    async with serving(state) as server:
        args = ("top", f"http://127.0.0.1:{server.port}", "--once")
        ran = await trio.run_process(without(modules("live"), *args), capture_stdout=True, capture_stderr=True)
    assert b"7 requests open" in ran.stdout


@pytest.mark.parametrize("missing", ["trio", "httptools"])
@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (("top", "--once"), "client"),
        (("bench", *SMALL), "client"),
        (("serve", "examples/serve-quickstart.toml"), "live"),
    ],
)
def test_without_the_extra_the_error_has_the_command_that_installs_it(
    args: tuple[str, ...], extra: str, missing: str
) -> None:
    ran = subprocess.run(without([missing], *args), capture_output=True, text=True, encoding="utf-8", check=False)
    assert ran.returncode == 2
    assert ran.stderr == f"this needs {missing}: pip install 'pdflow[{extra}]'\n"


@pytest.mark.parametrize("missing", ["torch", "tokenizers"])
def test_serve_without_torch_is_one_error_before_any_process_starts(missing: str) -> None:
    ran = subprocess.run(
        without([missing], "serve", "examples/serve-quickstart.toml", "--port", "0"),
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    lacking = ", ".join(name for name in ("torch", "tokenizers") if name == missing or find_spec(name) is None)
    assert ran.stderr == f"engine = \"torch\" needs {lacking}: pip install 'pdflow[live]'\n"
