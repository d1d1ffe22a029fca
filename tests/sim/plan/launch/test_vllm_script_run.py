"""The script with a stub in place of vLLM: it waits, serves through the proxy, and ends all that it has started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from pdflow_sim.plan.launch.script import vllm_script
from tests.sim.plan.launch.test_vllm_script import ALONE, EXPERTS, PAIR

pytest.importorskip("trio", reason="the proxy needs trio")
pytest.importorskip("httptools", reason="the proxy needs httptools")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
STUB = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = dict(zip(sys.argv[2:], sys.argv[3:]))
role = json.loads(options.get("--kv-transfer-config", "{}")).get("kv_role")
port = int(options["--port"])
with open(f"{port}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{port}.new", f"{port}.pid")
if os.environ.get("STUB_ENDS") == str(port):
    sys.exit(1)


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *ignored):
        pass

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        params = {"from": port} if role == "kv_producer" else body.get("kv_transfer_params")
        gpus = os.environ["CUDA_VISIBLE_DEVICES"]
        self.answer({"port": port, "gpus": gpus, "model": sys.argv[1], "kv_transfer_params": params})


ThreadingHTTPServer(("127.0.0.1", port), Api).serve_forever()
"""


@attrs.frozen
class StartedScript:
    process: subprocess.Popen[str]
    folder: Path
    port: int
    """Of the proxy; those of engines follow."""

    def read_until(self, beginning: str) -> list[str]:
        """Return the lines that the script prints, up to one that begins so, or all of them."""
        assert self.process.stdout
        lines = []
        for line in self.process.stdout:
            lines.append(line.rstrip())
            if line.startswith(beginning):
                break
        return lines

    def ask(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, b'{"prompt": [1, 2]}', {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found

    def running(self) -> list[int]:
        """Return the stubs that have not ended."""
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid")]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@contextmanager
def started(text: str, folder: Path, **variables: str) -> Iterator[StartedScript]:
    (folder / "vllm.sh").write_text(text, encoding="utf-8")
    (folder / "stub.py").write_text(STUB, encoding="utf-8")
    port = free_ports(4)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sim"), str(ROOT / "runtime")]),
        "PYTHON": sys.executable,
        "SERVE": f"{sys.executable} {folder / 'stub.py'}",
        "PORT": str(port),
        "ENGINE_PORT": str(port + 1),
        "READY_S": "60",
        **variables,
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["bash", "vllm.sh"], cwd=folder, env=environment, **pipes) as process:
        script = StartedScript(process, folder, port)
        try:
            yield script
        finally:
            process.terminate()
            process.wait(90)
    assert script.running() == []


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that are free now."""
    for port in range(20_000 + os.getpid() % 9_000, 32_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, sock in enumerate(sockets):
                sock.bind(("127.0.0.1", port + number))
            return port
        except OSError:
            continue
        finally:
            for sock in sockets:
                sock.close()
    raise OSError("no ports are free")


def test_it_serves_through_the_proxy_until_it_is_stopped(tmp_path: Path) -> None:
    with started(vllm_script(PAIR), tmp_path) as script:
        lines = script.read_until("ready: ")
        assert lines[-1] == f"ready: http://127.0.0.1:{script.port}", lines
        first, second = script.ask(), script.ask()
        engines = [script.port + number for number in (1, 2, 3)]
        assert (first["port"], first["kv_transfer_params"]) == (engines[2], {"from": engines[0]})
        assert (second["port"], second["kv_transfer_params"]) == (engines[2], {"from": engines[1]})
        assert (first["gpus"], first["model"]) == ("2,3", "meta-llama/Llama-3.1-8B")
        assert len(script.running()) == 3
        script.process.send_signal(signal.SIGTERM)
        assert script.process.wait(90) == 143
        assert script.running() == []


def test_engines_without_a_connector_are_served_in_turn(tmp_path: Path) -> None:
    with started(vllm_script(ALONE), tmp_path) as script:
        script.read_until("ready: ")
        found = [script.ask() for _ in range(3)]
    assert [answer["port"] - script.port for answer in found] == [1, 2, 1]
    assert [answer["gpus"] for answer in found] == ["0", "1", "0"]


def test_an_engine_that_ends_during_the_start_ends_the_others(tmp_path: Path) -> None:
    port = free_ports(4)
    with started(vllm_script(PAIR), tmp_path, STUB_ENDS=str(port + 3), PORT=str(port), ENGINE_PORT=str(port + 1)) as it:
        lines = it.read_until("ready: ")
        assert lines[-1] == "vllm.sh: a process ended; its log is in vllm-logs"
        assert it.process.wait(90) == 2


def test_an_engine_that_ends_later_ends_the_others(tmp_path: Path) -> None:
    with started(vllm_script(PAIR), tmp_path) as script:
        script.read_until("ready: ")
        os.kill(script.running()[0], signal.SIGKILL)
        lines = script.read_until("vllm.sh: a process")
        assert lines[-1] == "vllm.sh: a process ended; its log is in vllm-logs"
        assert script.process.wait(90) == 2


def test_a_further_host_starts_its_own_engines_and_no_proxy(tmp_path: Path) -> None:
    variables = {"HOSTS": "127.0.0.1 127.0.0.1 127.0.0.1", "HOST_INDEX": "1", "CONNECTOR": "nixl"}
    with started(vllm_script(EXPERTS), tmp_path, **variables) as script:
        assert script.read_until("starting") == ["starting prefill-1: vllm-logs/prefill-1.log"]
        while not script.running():
            assert script.process.poll() is None
            time.sleep(0.05)
        assert [path.name for path in tmp_path.glob("*.pid")] == [f"{script.port + 2}.pid"]
