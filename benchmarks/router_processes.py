"""The processes of router_speed.py: stub engines, and the routers in front of them, each with the CPU time it has used.

pdflow's router is the one that `pdflow serve` starts, in the same way: the endpoint chooses engines, the byte tokenizer
makes tokens of the prompt, answers may be resumed, requests carry the local secret's signature. Every router has two
engines of each kind, and takes them in turn.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.router_stub import BLOCK_SIZE
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.addresses import LOOPBACK, AllReported, EngineAddress
from pdflow_runtime.security.local_secret import new_secret
from pdflow_runtime.security.secret import LOCAL_VARIABLE
from tests.runtime.support.tied import tied

ROOT = Path(__file__).resolve().parents[1]
PDFLOW = "pdflow"
PEERS = {"vllm-router": "0.1.17", "smg": "1.13.0"}
"""Peers and their versions, each a command of that name."""
INSTALL = (
    "pip install vllm-router==0.1.17 smg==1.13.0 orjson requests uvicorn fastapi setproctitle aiohttp, "
    "and name that environment's folder: --peers DIR"
)
ONE_LEG, BOTH_LEGS = ("aggregated",), ("prefill", "decode")
REPLICAS = 2
START_S = 30.0
SCENARIO = """
[scenario]
name = "router-speed"
[workload]
requests = 1
arrival = { process = "poisson", rate_rps = 1.0 }
input_tokens = { dist = "fixed", tokens = 900 }
output_tokens = { dist = "fixed", tokens = 32 }
[model]
preset = "llama-3.1-8b"
name = "stub"
[network]
preset = "tcp-25g"
[transfer]
method = "nixl-pull"
[serve]
port = 0
"""
POOL = """
[[pool]]
name = "%s"
role = "%s"
replicas = %d
gpu = "cpu"
engine = "synthetic"
block_size = %d
kv_tokens = 32768
max_num_seqs = 256
max_num_batched_tokens = 2048
"""


class Launch(NamedTuple):
    """How pdflow's router is started."""

    arguments: Sequence[str] = ("-m", "pdflow_runtime.router.front")
    """Of Python, before the scenario's."""
    overrides: Sequence[str] = ()
    """Of the scenario."""
    environment: Mapping[str, str] | None = None
    """Variables; None: with a secret that a supervisor has made, as on one host."""


class Running:
    """A router. Args: its port, and the process id of its first process."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid

    def cpu_ns(self) -> int:
        """Return the CPU time of the router's processes so far, user and system."""
        return sum(cpu_ns(pid) for pid in tree(self.pid))


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process, ended threads included: what /proc/PID/stat counts, but in nanoseconds instead
    of ticks (the clock id that clock_getcpuclockid(3) returns)."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def tree(pid: int) -> Iterator[int]:
    """Yield the process and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from tree(int(child))


def names(roles: Sequence[str]) -> list[str]:
    return [f"{role}-{number}" for role in roles for number in range(REPLICAS)]


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: dict[str, str] | None = None, output: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """Run a process, and end it; it lives no longer than we do."""
    pipes = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(tied(*command), **pipes, text=True, cwd=ROOT, env=environment) as running:
        try:
            yield running
        finally:
            running.kill()


@contextlib.contextmanager
def engines(*options: str) -> Iterator[dict[str, int]]:
    """Run the stub engines, with options of router_stub.py; gives the port of each by its name."""
    wanted = names((*ONE_LEG, *BOTH_LEGS))
    with started([sys.executable, str(ROOT / "benchmarks/router_stub.py"), *options, *wanted]) as running:
        assert running.stdout
        yield dict(zip(wanted, map(int, running.stdout.readline().split()), strict=True))


@contextlib.contextmanager
def router(
    name: str, ports: dict[str, int], roles: Sequence[str], peers: Path | None = None, launch: Launch | None = None
) -> Iterator[Running]:
    """Run a router in front of the engines of these roles, and wait until it answers."""
    opened = (
        _pdflow(ports, roles, launch or Launch()) if peers is None else _peer(peers / "bin" / name, name, ports, roles)
    )
    with opened as running:
        _wait(running.port)
        yield running


@contextlib.contextmanager
def _pdflow(ports: dict[str, int], roles: Sequence[str], launch: Launch) -> Iterator[Running]:
    pools = "".join(POOL % (role, role, REPLICAS, BLOCK_SIZE) for role in roles)
    variables = {LOCAL_VARIABLE: new_secret()} if launch.environment is None else launch.environment
    environment = {**os.environ, **variables}
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "router.toml"
        scenario.write_text(SCENARIO + pools)
        overrides = [argument for override in launch.overrides for argument in ("--set", override)]
        command = [sys.executable, *launch.arguments, str(scenario), "--child", *overrides]
        with started(command, environment) as running:
            assert running.stdin
            assert running.stdout
            at = {name: Coordinates(LOOPBACK, ports[name]) for name in names(roles)}
            for news in (*(EngineAddress(name, here, here) for name, here in at.items()), AllReported()):
                running.stdin.write(msgspec.json.encode(news).decode() + "\n")
            running.stdin.flush()
            url = running.stdout.readline()
            if not url:
                raise RuntimeError(f"pdflow's router did not start: run {' '.join(command)}")
            yield Running(int(url.rpartition(":")[2]), running.pid)


@contextlib.contextmanager
def _peer(command: Path, name: str, ports: dict[str, int], roles: Sequence[str]) -> Iterator[Running]:
    port, metrics = free_ports(2)
    urls = {engine: f"http://{LOOPBACK}:{ports[engine]}" for engine in names(roles)}
    if roles == ONE_LEG:
        engines = ["--worker-urls", *urls.values()]
    else:
        engines = ["--vllm-pd-disaggregation" if name == "vllm-router" else "--pd-disaggregation"]
        for engine, url in urls.items():
            engines += ["--prefill" if engine.startswith("prefill") else "--decode", url]
    common = ["--host", LOOPBACK, "--port", str(port), "--prometheus-port", str(metrics), "--policy", "round_robin"]
    quiet = ["--log-level", "warning"] if name == "vllm-router" else ["--log-level", "error", "--backend", "vllm"]
    program = [str(command.with_name("python")), str(command), *(["launch"] if name == "smg" else [])]
    with started([*program, *common, *quiet, *engines], output=subprocess.DEVNULL) as running:
        yield Running(port, running.pid)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def _wait(port: int) -> None:
    """Wait until the router answers a request with a stream. RuntimeError if it never does."""
    asked = json.dumps({"model": "stub", "prompt": "x", "max_tokens": 1, "stream": True})
    until, seen = time.monotonic() + START_S, "nothing"
    while time.monotonic() < until:
        connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
        try:
            connection.request("POST", "/v1/completions", asked, {"content-type": "application/json"})
            answer = connection.getresponse()
            seen = answer.read().decode()
            if answer.status == 200 and "[DONE]" in seen:
                return
        except OSError as error:
            seen = str(error)
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"the router at port {port} did not stream an answer within {START_S:g} s, but sent: {seen}")
