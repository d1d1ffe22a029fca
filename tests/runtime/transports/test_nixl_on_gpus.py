"""NIXL over memory of GPUs: who calls it has attached, and UCX moves the bytes by cuda_ipc."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdflow_runtime.gpu import driver
from pdflow_runtime.transports import nixl
from pdflow_runtime.transports.adopting import Segment
from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.nixl import READ_BY_CUDA_IPC, NixlAgent
from pdflow_runtime.transports.registered import MemoryTable
from tests.runtime.transports.agents import TIMEOUT_S, VRAM
from tests.runtime.transports.ucx_tables import reads_by_cuda_ipc, transports_of_reads


class FakeLibrary:
    """NIXL's Python, which takes note for each call whether its thread had attached to GPU 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.setting: str | None = None
        self.here = threading.local()

    def attach(self, gpu: int) -> None:
        self.here.gpu = gpu

    def nixl_agent_config(self, enable_prog_thread: bool) -> bool:
        return enable_prog_thread

    def nixl_agent(self, name: str, config: bool) -> Any:
        self.setting = os.environ.get(READ_BY_CUDA_IPC)
        self._note("nixl_agent")
        functions = {function: self._function(function, answer) for function, answer in ANSWERS.items()}
        return FakeAgent(release=self._function("release", None), **functions)

    def _function(self, name: str, answer: Any) -> Any:
        def called(*args: Any) -> Any:
            self._note(name)
            return answer

        return called

    def _note(self, name: str) -> None:
        self.calls.append((name, getattr(self.here, "gpu", None) == 1))


class FakeAgent(SimpleNamespace):
    def __del__(self) -> None:
        self.release()


ANSWERS: dict[str, Any] = {
    "register_memory": None,
    "get_agent_metadata": b"metadata",
    "add_remote_agent": b"peer",
    "remove_remote_agent": None,
    "get_xfer_descs": [],
    "initialize_xfer": "handle",
    "transfer": "PROC",
    "update_notifs": None,
    "check_xfer_state": "DONE",
    "release_xfer_handle": None,
}
ON_GPU = Segment(4096, 4096, 1)
IN_HOST = Segment(8192, 4096)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake = FakeLibrary()
    monkeypatch.setattr(nixl, "import_module", lambda name: fake)
    monkeypatch.setattr(driver, "attach", fake.attach)
    monkeypatch.delenv(READ_BY_CUDA_IPC, raising=False)
    yield fake
    os.environ.pop(READ_BY_CUDA_IPC, None)


def in_a_thread(call: Any, *args: Any) -> None:
    """Call it in a thread of its own, which has attached to nothing."""
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def call_everything(agent: NixlAgent) -> None:
    table: Any = MemoryTable([True], [])
    in_a_thread(agent.register, [IN_HOST])
    in_a_thread(agent.metadata)
    in_a_thread(agent.add, b"metadata")
    in_a_thread(agent.begin_read, table, table, "peer")
    in_a_thread(agent.ended, "handle")
    in_a_thread(agent.poll)
    in_a_thread(agent.remove, "peer")


@pytest.mark.parametrize("segments", [[ON_GPU], [IN_HOST, ON_GPU]])
def test_every_call_comes_from_a_thread_that_has_attached(library: FakeLibrary, segments: list[Segment]) -> None:
    agent = NixlAgent("p.r0")
    in_a_thread(agent.register, segments)
    call_everything(agent)
    in_a_thread(agent.close)
    assert {name for name, _ in library.calls} == {"nixl_agent", "release", *ANSWERS}
    assert [name for name, attached in library.calls if not attached] == []


def test_without_memory_of_a_gpu_nobody_attaches(library: FakeLibrary) -> None:
    agent = NixlAgent("p.r0")
    in_a_thread(agent.register, [IN_HOST])
    call_everything(agent)
    assert len(library.calls) > len(ANSWERS)
    assert not any(attached for _, attached in library.calls)
    assert library.setting is None


def test_ucx_is_made_to_read_by_cuda_ipc_unless_told_otherwise(library: FakeLibrary) -> None:
    NixlAgent("p.r0").register([ON_GPU])
    assert library.setting == "on"
    os.environ[READ_BY_CUDA_IPC] = "off"
    NixlAgent("p.r0").register([ON_GPU])
    assert library.setting == "off"


def test_a_gpu_that_cannot_be_used_is_one_sentence(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gpu: int) -> None:
        raise driver.GpuError("cuDevicePrimaryCtxRetain: out of memory")

    monkeypatch.setattr(driver, "attach", fails)
    with pytest.raises(TransportError, match="NIXL cannot use GPU 1: cuDevicePrimaryCtxRetain: out of memory"):
        NixlAgent("p.r0").register([ON_GPU])
    assert library.calls == []


EMULATED = """
[1795672137.800277] [host:7159 :1]   +----------+--------------------+-----------------------------------------+
[1795672137.800277] [host:7159 :1]   | d.r0-43dbd812befbb364 intra-node cfg#2                                  |
[1795672137.800277] [host:7159 :1]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1]   |
[1795672137.800277] [host:7159 :1]   +----------+--------------------+-----------------------------------------+
[1795672137.800277] [host:7159 :1]   |    Range |    Description     |                 Config                  |
[1795672137.800277] [host:7159 :1]   +----------+--------------------+-----------------------------------------+
[1795672137.800277] [host:7160 :0]   | active message by ucp_am_send*(fast-completion) from host memory        |
[1795672137.800277] [host:7160 :0]   |  0..8246 | short              | cuda_ipc/none                           |
[1795672137.800277] [host:7159 :1]   |   0..inf | software emulation | tcp/lo                                  |
[1795672137.800277] [host:7159 :1]   +----------+--------------------+-----------------------------------------+
[1795672137.800277] [host:7159 :1]   | remote memory read by ucp_get*(multi) into host memory from host        |
[1795672137.800277] [host:7159 :1]   |   0..inf | zero-copy          | cma/memory                              |
"""
COPIED = EMULATED.replace("software emulation", "zero-copy").replace("tcp/lo", "cuda_ipc/cuda")
SHORT = "| remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1] |\n"


@pytest.mark.parametrize(
    ("output", "transports", "by_cuda_ipc"),
    [
        ("", [], False),
        (EMULATED, ["tcp/lo"], False),
        (SHORT + "|          0..inf | software emulation | tcp/lo |", ["tcp/lo"], False),
        (COPIED, ["cuda_ipc/cuda"], True),
        (SHORT + "| 0 | no data fetch | |\n| 1..inf | zero-copy | cuda_ipc/cuda |", ["", "cuda_ipc/cuda"], True),
        (SHORT + "| 0..8K | copy-out | tcp/lo |\n| 8193..inf | zero-copy | cuda_ipc/cuda |", None, False),
        (COPIED + EMULATED, ["cuda_ipc/cuda", "tcp/lo"], False),
        (COPIED.replace("from cuda", "from host"), [], False),
    ],
)
def test_what_ucx_prints_is_read(output: str, transports: list[str] | None, by_cuda_ipc: bool) -> None:
    assert transports is None or transports_of_reads(output) == transports
    assert reads_by_cuda_ipc(output) == by_cuda_ipc


@pytest.mark.parametrize("kind", [VRAM])
def test_ucx_reads_a_gpu_s_memory_by_cuda_ipc(kind: str, tmp_path: Path) -> None:
    """Between two processes: within one UCX does not need it."""
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.runtime.transports.vram_pair", kind],
            env={**os.environ, "UCX_PROTO_INFO": "y", "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parents[3],
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=3 * TIMEOUT_S,
            check=False,
        )
    output = printed.read_text()
    assert ended.returncode == 0, output
    assert reads_by_cuda_ipc(output), output
