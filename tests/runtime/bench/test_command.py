"""The command itself, as a process beside a server: where text goes, exit codes, files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from click.testing import CliRunner

import pdflow.cli
import pdflow.cli.serving
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.sockets import listen
from tests.runtime.bench.stub import refuse, stub

PDFLOW = (sys.executable, "-m", "pdflow", "bench")
SMALL = ("--random-input-len", "8", "--random-output-len", "2")


def test_goodput_takes_several_bounds_as_vllms_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def bench(command: list[str], **options: Any) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr(
        pdflow.cli.serving, "importlib", SimpleNamespace(import_module=lambda _: SimpleNamespace(bench=bench))
    )
    flags = ("--request-rate", "inf", "--goodput", "ttft:500", "tpot:50", "--goodput", "e2el:9000", "--seed", "3")
    ran = CliRunner().invoke(pdflow.cli.cli, ["bench", *flags], prog_name="pdflow")
    assert ran.exit_code == 0, ran.output
    assert set(asked[0]["goodput"]) == {"ttft:500", "tpot:50", "e2el:9000"}
    assert (asked[0]["request_rate"], asked[0]["seed"], asked[0]["ignore_eos"]) == (float("inf"), 3, None)
    lost = CliRunner().invoke(pdflow.cli.cli, ["bench", "tpot:50"], prog_name="pdflow")
    assert (lost.exit_code, len(asked)) == (2, 1)


@pytest.mark.trio
async def test_a_run_prints_its_table_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    async with stub() as (_, port):
        files = ("--out", str(tmp_path / "out"), "--save-result", "--result-dir", str(tmp_path / "vllm"))
        ran = await trio.run_process(
            [*PDFLOW, "--port", str(port), "--num-prompts", "3", *SMALL, *files],
            capture_stdout=True,
            capture_stderr=True,
        )
    assert b"completed    3 of 3" in ran.stdout
    assert ran.stderr.count(b"written: ") == 3
    [path] = (tmp_path / "vllm").iterdir()
    ours = (tmp_path / "out/results.json").read_bytes()
    assert path.read_bytes() == ours
    assert "bench --port" in msgspec.json.decode(ours)["pdflow"]["command_line"]


@pytest.mark.trio
async def test_ctrl_c_keeps_what_there_is_and_exits_130(tmp_path: Path) -> None:
    second_request = trio.Event()

    async def odd(number: int, responder: Responder) -> bool:
        if number == 2:
            second_request.set()
        return False

    flags = ("--num-prompts", "1000", "--max-concurrency", "1", *SMALL, "--quiet", "--out", str(tmp_path))
    async with stub(odd) as (_, port), trio.open_nursery() as nursery:
        process = await nursery.start(
            lambda task_status: trio.run_process(
                [*PDFLOW, "--port", str(port), *flags], check=False, stdout=subprocess.DEVNULL, task_status=task_status
            )
        )
        await second_request.wait()
        process.send_signal(signal.SIGINT)
        with trio.fail_after(20):
            assert await process.wait() == 130
    content = msgspec.json.decode((tmp_path / "results.json").read_bytes())
    assert content["completed"] >= 2
    assert content["pdflow"]["interrupted"]


@pytest.mark.trio
async def test_where_no_request_is_answered_the_exit_code_is_1() -> None:
    async def odd(number: int, responder: Responder) -> bool:
        await refuse(responder)
        return True

    async with stub(odd) as (_, port):
        flags = ("--port", str(port), "--num-prompts", "2", *SMALL)
        refused = await trio.run_process([*PDFLOW, *flags], check=False, capture_stdout=True)
    assert refused.returncode == 1
    assert b"HTTP 503: nobody is up" in refused.stdout


def test_where_nobody_answers_it_is_2_and_nothing_is_written(tmp_path: Path) -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    flags = ("--port", str(port), "--out", str(tmp_path / "out"))
    nobody = CliRunner().invoke(pdflow.cli.cli, ["bench", *flags], prog_name="pdflow")
    assert nobody.exit_code == 2
    assert "does not answer" in nobody.stderr
    assert len(nobody.stderr.splitlines()) == 1
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.trio
async def test_in_the_c_locale_texts_are_utf_8(tmp_path: Path) -> None:
    async with stub() as (server, port):
        texts = ("--model", "größe", "--label", "größe", "--metadata", "ort=größe", "--extra-body", '{"user": "größe"}')
        ran = await trio.run_process(
            [*PDFLOW, "--port", str(port), "--num-prompts", "3", *SMALL, *texts, "--out", str(tmp_path / "größe")],
            capture_stdout=True,
            env={**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C"},
        )
    assert b"completed    3 of 3" in ran.stdout
    assert ran.stdout.isascii()
    assert (server.asked[0]["model"], server.asked[0]["user"]) == ("größe", "größe")
    written = (tmp_path / "größe/results.json").read_text(encoding="utf-8")
    assert written.count("größe") >= 5
