"""Agents for the tests: what each has been told, in order, and a peer that is a process of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import trio

from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.gpu.driver import gpus
from pdflow_runtime.transports.adopting import Segment, address_of, adopt
from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.base import Ended, Flushed, NotificationArrived, TransportEvent
from pdflow_runtime.transports.cuda_ipc import CudaIpcTransport
from pdflow_runtime.transports.mooncake import INSTALL as INSTALL_MOONCAKE
from pdflow_runtime.transports.mooncake import MooncakeTransport
from pdflow_runtime.transports.nccl.library import real_library
from pdflow_runtime.transports.nccl.standin import StandIn
from pdflow_runtime.transports.nccl.transport import NcclTransport
from pdflow_runtime.transports.nixl import INSTALL as INSTALL_NIXL
from pdflow_runtime.transports.nixl import NixlTransport
from pdflow_runtime.transports.shm import ShmTransport
from pdflow_runtime.transports.tcp import TcpTransport
from tests.runtime.support.certificates import cluster_tls
from tests.runtime.support.fake_gpu import FAKE_GPU, fake_allocations
from tests.runtime.support.local import ClosingTransport, LocalTransport
from tests.runtime.transports.alone import is_alone
from tests.runtime.transports.kernels import CpuDevice

REGION_BYTES = 8 << 20
TIMEOUT_S = 60
"""For what must come; as long as this only where a machine has far more to do than it can."""
_ZEROES = bytes(REGION_BYTES)
KINDS: dict[str, Callable[[str, Callable[[TransportEvent], None]], StreamAgent]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "tcp by TLS": partial(TcpTransport, tls=cluster_tls()),
    "nixl": NixlTransport,
    "nixl by TLS": partial(NixlTransport, tls=cluster_tls()),
    "nixl, tensor": NixlTransport,
    "nixl, 1 segment": NixlTransport,
    "nixl, 5 segments": NixlTransport,
    "tcp, 1 segment": TcpTransport,
    "tcp, 5 segments": TcpTransport,
    "nixl, VRAM": NixlTransport,
    "mooncake": MooncakeTransport,
    "nccl": partial(NcclTransport, library=StandIn()),
    "cuda-ipc, fake": partial(CudaIpcTransport, share=fake_allocations),
    "cuda-ipc, fake in 5": partial(CudaIpcTransport, share=fake_allocations),
    "cuda-ipc, VRAM": CudaIpcTransport,
    **dict.fromkeys(
        ("nccl by kernels", "nccl by kernels, 1 segment", "nccl by kernels, 3 segments"),
        partial(NcclTransport, library=StandIn(), device=CpuDevice),
    ),
    "local": LocalTransport,
    "closing": ClosingTransport,
    **dict.fromkeys(
        ("nccl on GPUs", "nccl on GPUs, VRAM"),
        lambda me, on_event: NcclTransport(me, on_event, library=real_library()),
    ),
}
EMBEDDED = ("shm", "tcp", "nccl")
UNLIKE_THEM = ("local", "closing")
"""They declare what no other one does (support/local.py)."""
NIXL = pytest.param(
    "nixl", marks=(pytest.mark.nixl, pytest.mark.skipif(find_spec("nixl") is None, reason=f"no NIXL: {INSTALL_NIXL}"))
)
SECURED = ("tcp by TLS", pytest.param("nixl by TLS", marks=(*NIXL.marks, pytest.mark.nightly)))
"""All of tcp's bytes, and the messages of nixl, which go by the same streams."""
MOONCAKE = pytest.param(
    "mooncake",
    marks=(
        pytest.mark.mooncake,
        pytest.mark.skipif(find_spec("mooncake") is None, reason=f"no Mooncake: {INSTALL_MOONCAKE}"),
        pytest.mark.skipif(not is_alone(), reason="it listens everywhere: test_mooncake.py runs it by itself"),
    ),
)
TENSOR = pytest.param("nixl, tensor", marks=NIXL.marks)
"""A region that is torch's."""
TCP_ADOPTED = ("tcp, 1 segment", "tcp, 5 segments")
ADOPTED = [
    *TCP_ADOPTED,
    *(pytest.param(kind, marks=NIXL.marks) for kind in ("nixl, 1 segment", "nixl, 5 segments")),
]
"""Regions of memory that the agent has not allocated, but for their last OWN_BYTES."""
BY_KERNELS = [
    pytest.param(kind, marks=pytest.mark.skipif(find_spec("torch") is None, reason="no torch"))
    for kind in ("nccl by kernels", "nccl by kernels, 1 segment", "nccl by kernels, 3 segments")
]
"""Regions that are tensors, gathered and scattered by torch's kernels, on the CPU and over NCCL's stand-in."""
FAKE_CUDA_IPC = ("cuda-ipc, fake", "cuda-ipc, fake in 5")
"""Regions in one segment, and in five of two allocations."""
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no GPU"))
CUDA_IPC = pytest.param("cuda-ipc, VRAM", marks=ON_GPU)
VRAM = pytest.param("nixl, VRAM", marks=(*NIXL.marks, *ON_GPU))
ALL = [*EMBEDDED, *SECURED, *UNLIKE_THEM, NIXL, *ADOPTED, *BY_KERNELS, MOONCAKE, *FAKE_CUDA_IPC, CUDA_IPC, VRAM]
os.environ.setdefault("UCX_NET_DEVICES", "lo")
IMPORTED_ONCE = ["tests.runtime.transports.child", *(["torch"] * (find_spec("torch") is not None))]
"""By the server that children are forked from. NIXL's Python imports torch, as do tests of kernels."""


class Tensor:
    """A torch tensor that tests read and write as they do a memoryview, wherever it lies."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._torch: Any = import_module("torch")
        self.bytes = self._torch.zeros(nbytes, dtype=self._torch.uint8, device=device)

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, at: int | slice) -> int | bytes:
        found = self.bytes[at].cpu()
        return int(found) if isinstance(at, int) else found.numpy().tobytes()

    def __setitem__(self, at: slice, new: bytes | memoryview) -> None:
        if len(new):
            self.bytes[at] = self._torch.frombuffer(bytearray(new), dtype=self._torch.uint8).to(self.bytes.device)
        if self.bytes.is_cuda:
            self._torch.cuda.synchronize()

    def __bytes__(self) -> bytes:
        return bytes(self.bytes.cpu().numpy())

    def __iter__(self) -> Iterator[int]:
        return iter(bytes(self))

    def __eq__(self, other: object) -> bool:
        return bytes(self) == other

    __hash__ = None  # type: ignore[assignment]


def tensor_of(transport: StreamAgent, nbytes: int) -> Tensor:
    """The transport's region: on the GPU if there is one."""
    tensor = Tensor(nbytes, "cuda" if gpus() else "cpu")
    assert not adopt(transport, [Segment(tensor.bytes.data_ptr(), nbytes, 0 if gpus() else None)], 0)
    return tensor


class Segmented:
    """A region of several memories that tests read and write as they do a memoryview."""

    def __init__(self, memories: Sequence[memoryview]) -> None:
        self.memories = memories
        self.borders = list(accumulate(map(len, memories)))

    def __len__(self) -> int:
        return self.borders[-1]

    def __getitem__(self, at: int | slice) -> int | bytes:
        if isinstance(at, int):
            return self[at : at + 1][0]  # type: ignore[index]
        return b"".join(bytes(view) for view in self._views(at))

    def __setitem__(self, at: slice, new: bytes | memoryview) -> None:
        taken = 0
        for view in self._views(at):
            view[:] = memoryview(new)[taken : taken + len(view)]
            taken += len(view)
        assert taken == len(new)

    def _views(self, at: slice) -> Iterator[memoryview]:
        begin, end, _ = at.indices(len(self))
        for memory, border in zip(self.memories, self.borders, strict=True):
            start = border - len(memory)
            if begin < border and start < end:
                yield memory[max(begin - start, 0) : end - start]

    def __bytes__(self) -> bytes:
        return b"".join(map(bytes, self.memories))

    def __iter__(self) -> Iterator[int]:
        return iter(bytes(self))

    def __eq__(self, other: object) -> bool:
        return bytes(self) == other

    __hash__ = None  # type: ignore[assignment]


OWN_BYTES = 64 << 10
BORDERS = {
    "1 segment": [REGION_BYTES - OWN_BYTES],
    "5 segments": [4099, 70_000, (2 << 20) + 13, (5 << 20) + 1, REGION_BYTES - OWN_BYTES],
    "3 segments": [64 << 10, (2 << 20) + 4096, REGION_BYTES - OWN_BYTES],
}
"""The offsets behind the last byte of each adopted segment: own memory follows the last one without a gap."""


def segmented_of(transport: StreamAgent, borders: Sequence[int]) -> Segmented:
    """The transport's region, of memory that others have allocated."""
    sizes = [border - start for start, border in zip((0, *borders), borders, strict=False)]
    foreign = [memoryview(bytearray(size)) for size in sizes]
    own = adopt(transport, [Segment(address_of(memory), len(memory)) for memory in foreign], OWN_BYTES)
    return Segmented([*foreign, own])


def fake_vram_of(transport: StreamAgent, sizes: Sequence[int]) -> tuple[Segmented, memoryview]:
    """The transport's region in segments of a fake GPU, and its words. All but the last are of one allocation."""
    *first, last = sizes
    shared = FAKE_GPU.allocate(sum(first)) if first else memoryview(b"")
    starts = accumulate(first, initial=0)
    views = [shared[start : start + size] for start, size in zip(starts, first, strict=False)]
    views.append(FAKE_GPU.allocate(last))
    return Segmented(views), adopt(transport, [Segment(address_of(view), len(view), 0) for view in views], OWN_BYTES)


def memory_of(kind: str, transport: StreamAgent, nbytes: int) -> tuple[Any, Any, int]:
    """The memory of an agent of this kind, as its peers see it; the part that peers read words of, and its offset."""
    how = kind.partition(", ")[2]
    if how.startswith("fake"):
        borders = [*BORDERS["5 segments"][:-1], nbytes] if how == "fake in 5" else [nbytes]
        fake, words = fake_vram_of(transport, [end - start for start, end in pairwise((0, *borders))])
        return fake, words, nbytes
    if kind == "cuda-ipc, VRAM":
        tensor = Tensor(nbytes, "cuda")
        words = adopt(transport, [Segment(tensor.bytes.data_ptr(), nbytes, 0)], OWN_BYTES)
        return tensor, words, nbytes
    if not how:
        memory: Any = transport.allocate(nbytes)
    else:
        memory = segmented_of(transport, BORDERS[how]) if how in BORDERS else tensor_of(transport, nbytes)
    return memory, memory, 0


def within_segments(pieces: Sequence[tuple[int, int, int]], borders: Sequence[int]) -> list[Descriptor]:
    """The same bytes in pieces that cross no border, at either side."""
    found = []
    for at, to, length in pieces:
        done = 0
        while True:
            ends = [next((border for border in borders if border > begin + done), None) for begin in (at, to)]
            left = [end - begin - done for begin, end in zip((at, to), ends, strict=True) if end is not None]
            step = min([length - done, *left])
            found.append(Descriptor(at + done, to + done, step))
            done += step
            if done == length:
                break
    return found


class Agent:
    """A transport with its memory and what it has told."""

    def __init__(self, kind: str, name: str, nbytes: int = REGION_BYTES) -> None:
        self.events: list[TransportEvent] = []
        self._news = trio.Event()
        self.transport = KINDS[kind](name, self._on_event)
        self.memory: Any
        self.memory, self.words, self.words_at = memory_of(kind, self.transport, nbytes)
        self._last_op = 0
        self._wrote_to: dict[int, str] = {}

    @property
    def done_is_local(self) -> bool:
        return self.transport.done_means == "local"

    def _on_event(self, event: TransportEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def wait_for(self, event: TransportEvent) -> None:
        """Wait until this has been told."""
        with trio.fail_after(TIMEOUT_S):
            while event not in self.events:
                self._news = trio.Event()
                await self._news.wait()

    async def ended(self, op: int) -> bool:
        with trio.fail_after(TIMEOUT_S):
            while True:
                for event in self.events:
                    if isinstance(event, Ended) and event.op == op:
                        return event.ok
                self._news = trio.Event()
                await self._news.wait()

    async def landed(self, op: int) -> bool:
        """Whether a WRITE has, by all that its transport has to say: where DONE is local, a flush's end, too."""
        return await self.ended(op) and (not self.done_is_local or await self.flushed(self._wrote_to[op]))

    async def flushed(self, peer: str) -> bool:
        before = len(self._flushes(peer))
        self.transport.flush(peer)
        with trio.fail_after(TIMEOUT_S):
            while len(found := self._flushes(peer)) == before:
                self._news = trio.Event()
                await self._news.wait()
        return found[before]

    def _flushes(self, peer: str) -> list[bool]:
        return [event.ok for event in self.events if isinstance(event, Flushed) and event.peer == peer]

    def write(
        self, peer: str, pieces: Sequence[tuple[int, int, int]], generation: int = 1, notification: bytes | None = None
    ) -> int:
        self._last_op += 1
        self._wrote_to[self._last_op] = peer
        self.transport.write(self._last_op, peer, self._pieces(pieces), generation, notification)
        return self._last_op

    def read(self, peer: str, pieces: Sequence[tuple[int, int, int]]) -> int:
        self._last_op += 1
        self.transport.read(self._last_op, peer, self._pieces(pieces))
        return self._last_op

    def _pieces(self, pieces: Sequence[tuple[int, int, int]]) -> list[Descriptor]:
        """As whoever posts must, who knows where segments end: here all agents of a kind have the same ones."""
        return within_segments(pieces, self.memory.borders if isinstance(self.memory, Segmented) else ())

    def notifications(self) -> list[bytes]:
        return [event.notification for event in self.events if isinstance(event, NotificationArrived)]


def untouched(agent: Agent) -> bool:
    """No byte of its memory has been written."""
    return bytes(agent.memory) == _ZEROES


@asynccontextmanager
async def agents(kind: str, *names: str) -> AsyncIterator[list[Agent]]:
    """Running agents that do not know each other yet; closed at the end."""
    made = [Agent(kind, name) for name in names]
    async with trio.open_nursery() as nursery:
        for agent in made:
            await nursery.start(agent.transport.run)
        yield made
        for agent in made:
            await agent.transport.aclose()
            if isinstance(agent.memory, Segmented):
                FAKE_GPU.free(agent.memory.memories)


@asynccontextmanager
async def pair(kind: str) -> AsyncIterator[tuple[Agent, Agent]]:
    """A prefill rank that may write to a decode rank, which may read from it."""
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        await p.transport.connect("d.r0", d.transport.describe())
        await d.transport.connect("p.r0", p.transport.describe())
        yield p, d


class Child:
    """A process with one agent (child.py). It ends when our end of the pipe is closed."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self.description = bytes.fromhex(self.next_message())

    def next_message(self) -> str:
        """What it says next. EOFError if it has ended."""
        return str(self._pipe.recv())

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> None:
        """Until it has ended."""
        self._process.join()


@contextmanager
def child(kind: str, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Forked by a server that has imported what it needs, and done nothing else: one import for all, not one each. With
    GPUs, or an environment of its own, a process from the start: CUDA, once begun, is not to be forked."""
    context: Any = get_context("spawn" if env or gpus() else "forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    ours, theirs = context.Pipe()
    process = context.Process(target=run_child, args=(theirs, kind, name, *arguments))
    with pytest.MonkeyPatch.context() as patch:
        for key, value in (env or {}).items():
            patch.setenv(key, value)
        process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def run_child(pipe: Connection, *arguments: str) -> None:
    """In that process."""
    from tests.runtime.transports.child import main

    trio.run(main, pipe, *arguments)
