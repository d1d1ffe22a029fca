"""How fast the transports are, beside what the machine does bare: python benchmarks/transport_speed.py

Two processes, as live: one writes, the other owns the memory. A transfer is timed at the writer, from posting it to the
owner's answer. Beside shm: one memmove of as many bytes between two mapped files. Beside tcp: sendall into a bare
recv_into loop in another process, with one byte back. Beside nixl: a READ of NIXL's from another process that
polls all the time; UCX_NET_DEVICES is lo unless set. Beside mooncake: one READ of the Transfer Engine's, waited for as
its own tools do; only if asked for, and in a network of its own:

    python -m tests.runtime.transports.alone python benchmarks/transport_speed.py mooncake

NCCL is measured by its stand-in, beside the stand-in's own send and receive, and says nothing of NCCL.

Rounds alternate, so both see the same machine; best of them, and median in brackets. CPU is that of both processes, all
threads, taken together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import trio

from pdflow.layout.descriptors import Descriptor
from runtime.transports.agent import StreamAgent
from runtime.transports.base import Ended, TransportEvent
from runtime.transports.copying import Mapped
from runtime.transports.groups import CHUNK_BYTES, Group, HostStaging
from runtime.transports.mooncake import MooncakeTransport, local_on, require
from runtime.transports.nccl import NcclTransport
from runtime.transports.nccl_standin import StandIn
from runtime.transports.nixl import Local, NixlTransport
from runtime.transports.region import OwnedRegion
from runtime.transports.registered import DRAM, Table
from runtime.transports.shm import ShmTransport
from runtime.transports.tcp import TcpTransport

os.environ.setdefault("UCX_NET_DEVICES", "lo")
KINDS: dict[str, Callable[[str, Callable[[TransportEvent], None]], StreamAgent]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "nixl": NixlTransport,
    "mooncake": MooncakeTransport,
    "nccl stand-in": partial(NcclTransport, library=StandIn()),
}
LARGE_BYTES = 64 << 20
ROUNDS = 60
SMALL_BYTES = 16 << 10
SMALL = 3000
IDLE_S = 3.0


class Writer:
    """One agent, and what it waits for."""

    def __init__(self, kind: str, name: str, nbytes: int) -> None:
        self.ended: set[int] = set()
        self._news = trio.Event()
        self.transport = KINDS[kind](name, self._tell)
        self.memory = self.transport.allocate(nbytes)
        self._last = 0

    def _tell(self, event: TransportEvent) -> None:
        if isinstance(event, Ended):
            assert event.ok
            self.ended.add(event.op)
            self._news.set()

    def post(self, pieces: list[Descriptor], notice: bytes | None = b"done") -> int:
        self._last += 1
        self.transport.write(self._last, "d.r0", pieces, 1, notice)
        return self._last

    async def end_of(self, op: int) -> None:
        while op not in self.ended:
            self._news = trio.Event()
            await self._news.wait()


class Other:
    """The other process."""

    def __init__(self, *orders: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *orders]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self.asked()

    def asked(self, *question: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if question:
            self.process.stdin.write(" ".join(question) + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def cpu_s(self) -> float:
        return float(self.asked("cpu"))

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def nixl_source(nbytes: int) -> None:
    """The other process: memory to read, with somebody who polls."""
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = bytes(nbytes)
    mapped = Mapped(memory)
    local = Local(f"source-{os.getpid()}")
    local.register(mapped.address, nbytes)
    print(local.about().hex(), mapped.address, flush=True)
    reader = threading.Thread(target=sys.stdin.read, daemon=True)
    reader.start()
    while reader.is_alive():
        local.poll()
        time.sleep(0.0002)
    local.close()


def bare_nixl(nbytes: int) -> Bare:
    """One READ."""
    other = Other("nixl-source", str(nbytes))
    about, address = other.first.split()
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    local = Local(f"bare-{os.getpid()}")
    target = Mapped(memory).address
    local.register(target, nbytes)
    remote = local.add(bytes.fromhex(about))

    def once() -> None:
        ours, theirs = (Table(DRAM, [(at, nbytes, 0)]) for at in (target, int(address)))
        handle = local.begin_read(ours, theirs, remote)
        while local.ended(handle) is None:
            pass

    def end() -> None:
        memory[0] = 0  # Ours as long as this lives.
        local.close()
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def bare_mooncake(nbytes: int) -> Bare:
    """One batch READ, waited for as Mooncake does."""
    other = Other("mooncake-source", str(nbytes))
    segment, address = other.first.split()
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    target = Mapped(memory).address
    engine = require().TransferEngine()
    assert not engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(target, nbytes)

    def once() -> None:
        assert not engine.batch_transfer_sync_read(segment, [target], [int(address)], [nbytes])

    def end() -> None:
        engine.unregister_memory(target)
        memory[0] = 0  # Ours as long as this lives.
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def bare_standin(nbytes: int) -> Bare:
    """As many sends as fill the bytes."""
    ident = StandIn().ncclGetUniqueId().internal
    other = Other("standin-sink", ident.hex())
    group = Group(StandIn(), ident, 0)
    group.open(HostStaging())

    def once() -> None:
        for _ in range(nbytes // CHUNK_BYTES):
            group.send(CHUNK_BYTES)

    def end() -> None:
        other.process.kill()
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def cpu_of(pid: int) -> float:
    """Of a process that does not answer, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def owner(kind: str, nbytes: int) -> None:
    """The other process: owns memory, and says what it has used whenever it is asked."""
    agent = Writer(kind, "d.r0", nbytes)
    agent.memory[:] = bytes(nbytes)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.transport.run)
        print(agent.transport.describe().hex(), flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline):
            print(cpu_s(), flush=True)
        await agent.transport.aclose()


def sink(nbytes: int) -> None:
    """The other process: a plain loop that receives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        sock, _ = server.accept()
        memory = memoryview(bytearray(nbytes))
        with sock:
            while True:
                have = 0
                while have < nbytes:
                    got = sock.recv_into(memory[have:])
                    if not got:
                        return
                    have += got
                sock.sendall(b"x")


def mooncake_source(nbytes: int) -> None:
    """The other process: memory to read."""
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = bytes(nbytes)
    address = Mapped(memory).address
    local = local_on("127.0.0.1")
    local.register(memory, address)
    print(local.segment, address, flush=True)
    sys.stdin.read()


def standin_sink(ident: str) -> None:
    """The other process: the second rank."""
    group = Group(StandIn(), bytes.fromhex(ident), 1)
    print("opening", flush=True)
    group.open(HostStaging())
    while True:
        group.receive(CHUNK_BYTES)


class Bare(NamedTuple):
    """What the machine does without us."""

    once: Callable[[], None]
    other_cpu_s: Callable[[], float]
    end: Callable[[], None]


def bare_copy(nbytes: int) -> Bare:
    """One memmove between two files in shared memory."""
    source, target = OwnedRegion(nbytes), OwnedRegion(nbytes)
    source.view[:] = random.Random(1).randbytes(1 << 16) * (nbytes >> 16)
    to, at = Mapped(target.view).address, Mapped(source.view).address

    def end() -> None:
        source.close()
        target.close()

    def once() -> None:
        ctypes.memmove(to, at, nbytes)

    return Bare(once, lambda: 0.0, end)


def bare_socket(nbytes: int) -> Bare:
    """One sendall to a plain loop."""
    other = Other("sink", str(nbytes))
    sock = socket.create_connection(("127.0.0.1", int(other.first)))
    payload = random.Random(1).randbytes(1 << 16) * (nbytes >> 16)

    def once() -> None:
        sock.sendall(payload)
        sock.recv(1)

    def end() -> None:
        sock.close()
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def cut(nbytes: int, piece: int) -> list[Descriptor]:
    """So many bytes in pieces of this size, scattered at the target as blocks of a pool are."""
    targets = list(range(0, nbytes, piece))
    random.Random(2).shuffle(targets)
    return [Descriptor(at * piece, to, piece) for at, to in enumerate(targets)]


class Side:
    """What one of the two has taken."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self.cpu_s = 0.0
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        self._began = (time.perf_counter(), cpu_s())

    def end(self) -> None:
        self.walls.append(time.perf_counter() - self._began[0])
        self.cpu_s += cpu_s() - self._began[1]

    def __str__(self) -> str:
        best, median = (LARGE_BYTES / t / 1e9 for t in (min(self.walls), statistics.median(self.walls)))
        return f"{best:6.2f} GB/s ({median:5.2f}), {self.cpu_s / len(self.walls) * 1e3:5.1f} ms of CPU"


BARE: dict[str, Callable[[int], Bare]] = {
    "shm": bare_copy,
    "tcp": bare_socket,
    "nixl": bare_nixl,
    "mooncake": bare_mooncake,
    "nccl stand-in": bare_standin,
}


async def large(kind: str, writer: Writer, other: Other, rounds: int) -> list[str]:
    bare = BARE[kind](LARGE_BYTES)
    lines = []
    for piece in (LARGE_BYTES, 64 << 10, 8 << 10):
        pieces = cut(LARGE_BYTES, piece)
        await writer.end_of(writer.post(pieces))
        bare.once()
        ours, theirs = Side(), Side()
        ours.cpu_s, theirs.cpu_s = -other.cpu_s(), -bare.other_cpu_s()
        for _ in range(rounds):
            ours.begin()
            await writer.end_of(writer.post(pieces))
            ours.end()
            theirs.begin()
            bare.once()
            theirs.end()
        ours.cpu_s += other.cpu_s()
        theirs.cpu_s += bare.other_cpu_s()
        lines.append(
            f"{kind}  64 MiB in {len(pieces):5,} pieces {ours}; bare {theirs}; "
            f"{min(theirs.walls) / min(ours.walls):4.0%} of it"
        )
    bare.end()
    return lines


async def small(kind: str, writer: Writer, other: Other, count: int) -> list[str]:
    """One after the other, then 32 at once."""
    lines = []
    pieces = cut(SMALL_BYTES, SMALL_BYTES // 4)
    for at_once in (1, 32):
        before = cpu_s() + other.cpu_s()
        begin = time.perf_counter()
        for _ in range(count // at_once):
            for op in [writer.post(pieces) for _ in range(at_once)]:
                await writer.end_of(op)
        took = time.perf_counter() - begin
        spent = cpu_s() + other.cpu_s() - before
        done = count // at_once * at_once
        lines.append(
            f"{kind}  16 KiB in 4 pieces, {at_once:2} at once  {spent / done * 1e6:6.0f} us of CPU  "
            f"{took / done * 1e6:6.0f} us each"
        )
    return lines


async def measured(kind: str, rounds: int = ROUNDS, count: int = SMALL) -> list[str]:
    other = Other("owner", kind, str(LARGE_BYTES))
    writer = Writer(kind, "p.r0", LARGE_BYTES)
    writer.memory[:] = random.Random(1).randbytes(1 << 16) * (LARGE_BYTES >> 16)
    async with trio.open_nursery() as nursery:
        await nursery.start(writer.transport.run)
        await writer.transport.connect("d.r0", bytes.fromhex(other.first))
        lines = await large(kind, writer, other, rounds)
        lines += await small(kind, writer, other, count)
        before = cpu_s() + other.cpu_s()
        idle_s = IDLE_S if rounds == ROUNDS else 0.0
        await trio.sleep(idle_s)
        spent = cpu_s() + other.cpu_s() - before
        lines.append(f"{kind}  connected, nothing to do  {spent / max(idle_s, 1):6.2%} of a core")
        await writer.transport.aclose()
    other.end()
    return lines


def main() -> None:
    match sys.argv[1:]:
        case ["owner", kind, nbytes]:
            trio.run(owner, kind, int(nbytes))
        case ["sink", nbytes]:
            sink(int(nbytes))
        case ["nixl-source", nbytes]:
            nixl_source(int(nbytes))
        case ["mooncake-source", nbytes]:
            mooncake_source(int(nbytes))
        case ["standin-sink", ident]:
            standin_sink(ident)
        case kinds:
            print(f"{os.cpu_count()} cores")
            missing = {"mooncake"} if find_spec("nixl") else {"mooncake", "nixl"}
            for kind in kinds or (kind for kind in KINDS if kind not in missing):
                print("\n".join(trio.run(measured, kind)), flush=True)


if __name__ == "__main__":
    main()
