"""How fast the transports are, beside what the machine does bare: python benchmarks/transport_speed.py

Two processes, as live: one writes, the other owns the memory. A transfer is timed at the writer, from posting it to the
owner's answer. Pieces lie as a prompt's KV does, layer by layer, its blocks scattered alike in each; "no order" are
some that follow no such rule. Beside each transport stands what the machine does bare (transport_bare.py), with as
many bytes in one piece, and with the same pieces:

    shm       memmove between two mapped files, in a loop in C (in Python where there is no gcc)
    tcp       sendmsg and recvmsg_into of those pieces by two plain loops, with one byte back
    tcp by TLS  the same, without TLS
    nixl      a READ of NIXL's from another process that polls all the time; UCX_NET_DEVICES is lo unless set
    mooncake  READs of the Transfer Engine's, at most 256 pieces at once, waited for as its own tools do
    nccl stand-in   the stand-in's own send and receive, which know no pieces; it says nothing of NCCL

Mooncake only if asked for, and in a network of its own:

    python -m tests.runtime.transports.alone python benchmarks/transport_speed.py mooncake

Rounds alternate, so all see the same machine; best of them, and median in brackets. CPU is that of both processes, all
threads, taken together.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import trio

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.transport_bare import BARE, CASES, LARGE_BYTES, SMALL, Other, loop_in_c, pieces_of
from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.process.processes import end_process
from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.base import Ended, TransportEvent
from pdflow_runtime.transports.mooncake import MooncakeTransport
from pdflow_runtime.transports.nccl.standin import StandIn
from pdflow_runtime.transports.nccl.transport import NcclTransport
from pdflow_runtime.transports.nixl import NixlTransport
from pdflow_runtime.transports.shm import ShmTransport
from pdflow_runtime.transports.tcp import TcpTransport
from tests.runtime.support.certificates import cluster_tls

os.environ.setdefault("UCX_NET_DEVICES", "lo")
KINDS: dict[str, Callable[[str, Callable[[TransportEvent], None]], StreamAgent]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "tcp by TLS": partial(TcpTransport, tls=cluster_tls()),
    "nixl": NixlTransport,
    "mooncake": MooncakeTransport,
    "nccl stand-in": partial(NcclTransport, library=StandIn()),
}
ROUNDS = 60
SMALL_ROUNDS = 3000
IDLE_S = 3.0


class Writer:
    """One agent, and what it waits for."""

    def __init__(self, kind: str, name: str, nbytes: int) -> None:
        self.ended: set[int] = set()
        self._news = trio.Event()
        self.transport = KINDS[kind](name, self._on_event)
        self.memory = self.transport.allocate(nbytes)
        self._last = 0

    def _on_event(self, event: TransportEvent) -> None:
        if isinstance(event, Ended):
            assert event.ok
            self.ended.add(event.op)
            self._news.set()

    def post(self, pieces: list[Descriptor], notification: bytes | None = b"done") -> int:
        self._last += 1
        self.transport.write(self._last, "d.r0", pieces, 1, notification)
        return self._last

    async def end_of(self, op: int) -> None:
        while op not in self.ended:
            self._news = trio.Event()
            await self._news.wait()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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

    @property
    def best(self) -> float:
        """GB/s"""
        return LARGE_BYTES / min(self.walls) / 1e9

    @property
    def median(self) -> float:
        return LARGE_BYTES / statistics.median(self.walls) / 1e9

    @property
    def cpu_ms(self) -> float:
        return self.cpu_s / len(self.walls) * 1e3


async def large(kind: str, writer: Writer, other: Other, rounds: int) -> list[str]:
    whole = BARE[kind](pieces_of("1 piece"))
    lines = []
    for case in CASES:
        pieces = pieces_of(case)
        knows_pieces = len(pieces) > 1 and kind != "nccl stand-in"
        bares = [whole, *([BARE[kind](pieces)] if knows_pieces else [])]
        await writer.end_of(writer.post(pieces))
        for bare in bares:
            bare.once()
        ours, theirs = Side(), [Side() for _ in bares]
        ours.cpu_s = -other.cpu_s()
        for bare, side in zip(bares, theirs, strict=True):
            side.cpu_s = -bare.other_cpu_s()
        for _ in range(rounds):
            ours.begin()
            await writer.end_of(writer.post(pieces))
            ours.end()
            for bare, side in zip(bares, theirs, strict=True):
                side.begin()
                bare.once()
                side.end()
        ours.cpu_s += other.cpu_s()
        for bare, side in zip(bares, theirs, strict=True):
            side.cpu_s += bare.other_cpu_s()
        lines.append(in_a_line(kind, case, ours, theirs))
        for bare in bares[1:]:
            bare.end()
    whole.end()
    return lines


def in_a_line(kind: str, case: str, ours: Side, bare: list[Side]) -> str:
    bare_figures = [
        f"{what} {side.best:5.2f} {side.cpu_ms:4.1f} ms {ours.best / side.best:4.0%}"
        for what, side in zip(("one", "same"), bare, strict=False)
    ]
    return (
        f"{kind} {case:15} {ours.best:5.2f} ({ours.median:5.2f}) {ours.cpu_ms:5.1f} ms; bare: {'; '.join(bare_figures)}"
    )


async def small(kind: str, writer: Writer, other: Other, count: int) -> list[str]:
    """One after the other, then 32 at once."""
    lines = []
    pieces = pieces_of(SMALL)
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
            f"{kind}  {SMALL}, {at_once:2} at once  {spent / done * 1e6:6.0f} us of CPU  "
            f"{took / done * 1e6:6.0f} us each"
        )
    if kind != "nccl stand-in":
        lines[0] += f"; bare: {bare_small_us(kind, count):.0f} us of CPU"
    return lines


def bare_small_us(kind: str, count: int) -> float:
    """CPU of both sides for each such transfer."""
    bare = BARE[kind](pieces_of(SMALL))
    bare.once()
    before = cpu_s() + bare.other_cpu_s()
    for _ in range(count):
        bare.once()
    spent = cpu_s() + bare.other_cpu_s() - before
    bare.end()
    return spent / count * 1e6


async def measured(kind: str, rounds: int = ROUNDS, count: int = SMALL_ROUNDS) -> list[str]:
    other = Other("owner", kind, str(LARGE_BYTES), script=__file__)
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
        case kinds:
            loop = "C" if loop_in_c() else "Python"
            print(f"{os.cpu_count()} cores. 64 MiB in so many pieces: GB/s (median), CPU of both sides;")
            print(f"bare: the same bytes in one piece, and in the same pieces (shm: by a loop in {loop})")
            missing = {"mooncake"} if find_spec("nixl") else {"mooncake", "nixl"}
            for kind in kinds or (kind for kind in KINDS if kind not in missing):
                print("\n".join(trio.run(measured, kind)), flush=True)


if __name__ == "__main__":
    main()
    # NIXL's libnl and libibverbs1's crash at exit.
    end_process(0)
