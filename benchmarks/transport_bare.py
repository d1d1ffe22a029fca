"""What the machine does without our transports: as many bytes in one piece, or in the same pieces.

Each has a process of its own on the other side, which this file is, too. Beside NIXL's READs that process polls all the
time; Mooncake's are posted 256 at a time, as more might fail; the stand-in for NCCL knows no pieces.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.transports.adopting import Segment
from pdflow_runtime.transports.copying import Mapped
from pdflow_runtime.transports.mooncake import local_on, require
from pdflow_runtime.transports.nccl.groups import NcclGroup
from pdflow_runtime.transports.nccl.staging import CHUNK_BYTES, HostStaging
from pdflow_runtime.transports.nccl.standin import StandIn
from pdflow_runtime.transports.nixl import NixlAgent
from pdflow_runtime.transports.region import OwnedRegion
from pdflow_runtime.transports.registered import MemoryTable

LARGE_BYTES = 64 << 20
LAYERS = 32
"""Each with a plane of K and one of V."""
CASES = {"1 piece": LARGE_BYTES, "1,024": 64 << 10, "8,192": 8 << 10, "8,192, no order": 8 << 10}
SMALL = "16 KiB in 4 pieces"
POSTED = 256
"""Pieces that Mooncake takes at once without failing."""
IOV_MAX = 1024


def split(nbytes: int, piece: int) -> list[Descriptor]:
    """So many bytes in pieces of this size, layer by layer, with each layer's blocks scattered alike."""
    planes = min(2 * LAYERS, nbytes // piece)
    blocks = nbytes // piece // planes
    block_orders = [list(range(blocks)), list(range(blocks))]
    for seed, order in enumerate(block_orders):
        random.Random(seed).shuffle(order)
    return [
        Descriptor((first + source) * piece, (first + target) * piece, piece)
        for first in range(0, planes * blocks, blocks)
        for source, target in zip(*block_orders, strict=True)
    ]


def pieces_of(case: str) -> list[Descriptor]:
    if case == SMALL:
        return [Descriptor(at, 2 * at, 4096) for at in range(0, 16_384, 4096)]
    pieces = split(LARGE_BYTES, CASES[case])
    if "no order" not in case:
        return pieces
    targets = [piece.target_address for piece in pieces]
    random.Random(2).shuffle(targets)
    return [Descriptor(at, to, length) for (at, _, length), to in zip(pieces, targets, strict=True)]


class Other:
    """The other process."""

    def __init__(self, *arguments: str, script: str = __file__) -> None:
        command = [sys.executable, str(Path(script).resolve()), *arguments]
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


class Bare(NamedTuple):
    """What the machine does without us."""

    once: Callable[[], None]
    other_cpu_s: Callable[[], float]
    end: Callable[[], None]


def cpu_of(pid: int) -> float:
    """Of a process that does not answer, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


LOOP = """
#include <stdint.h>
#include <string.h>
void copy(char *to, const char *from, const uint64_t *rows, uint64_t count) {
    for (uint64_t row = 0; row < count; row++)
        memmove(to + rows[3 * row + 1], from + rows[3 * row], rows[3 * row + 2]);
}
"""


@cache
def loop_in_c() -> Callable[..., None] | None:
    """Copies [N, 3] rows of u64; None without gcc."""
    if shutil.which("gcc") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "loop.so")
        command = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
        subprocess.run(command, input=LOOP, text=True, check=True)
        copy = ctypes.CDLL(str(made)).copy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    return copy


def bare_copy(pieces: list[Descriptor]) -> Bare:
    """A loop of memmove between two files in shared memory."""
    source, target = OwnedRegion(LARGE_BYTES), OwnedRegion(LARGE_BYTES)
    source.view[:] = random.Random(1).randbytes(1 << 16) * (LARGE_BYTES >> 16)
    target.view[:] = source.view
    to, at = Mapped(target.view).address, Mapped(source.view).address
    rows = np.array(pieces, np.uint64)
    copy = loop_in_c()

    def end() -> None:
        source.close()
        target.close()

    def once() -> None:
        if copy is not None:
            copy(to, at, rows.ctypes.data, len(rows))
        else:
            deque((ctypes.memmove(to + there, at + here, length) for here, there, length in pieces), maxlen=0)

    return Bare(once, lambda: 0.0, end)


def bare_socket(pieces: list[Descriptor]) -> Bare:
    """A loop of sendmsg to one of recvmsg_into."""
    other = Other("sink", next(case for case in (*CASES, SMALL) if pieces_of(case) == pieces))
    sock = socket.create_connection(("127.0.0.1", int(other.first)))
    payload = memoryview(random.Random(1).randbytes(1 << 16) * (LARGE_BYTES >> 16))
    views = [payload[piece.source_address :][: piece.length] for piece in pieces]

    def once() -> None:
        assert moved(sock.sendmsg, views)
        sock.recv(1)

    def end() -> None:
        sock.close()
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def sink(case: str) -> None:
    """The other process: a plain loop that receives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        sock, _ = server.accept()
        memory = memoryview(bytearray(LARGE_BYTES))
        pieces = [memory[piece.target_address :][: piece.length] for piece in pieces_of(case)]
        with sock:
            while moved(lambda views: sock.recvmsg_into(views)[0], pieces):
                sock.sendall(b"x")


def moved(call: Callable[[list[memoryview]], int], views: list[memoryview]) -> bool:
    """All of these views, as many at once as the kernel takes; False where the stream ends."""
    at, views = 0, list(views)
    while at < len(views):
        now = views[at : at + IOV_MAX]
        count = call(now)
        if not count:
            return False
        for view in now:
            if count < len(view):
                break
            count -= len(view)
            at += 1
        if count:
            views[at] = views[at][count:]
    return True


def bare_nixl(pieces: list[Descriptor]) -> Bare:
    """One READ."""
    other = Other("nixl-source")
    metadata, address = other.first.split()
    memory = memoryview(mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    local = NixlAgent(f"bare-{os.getpid()}-{len(pieces)}")
    target = Mapped(memory).address
    local.register([Segment(target, LARGE_BYTES)])
    remote = local.add(bytes.fromhex(metadata))
    theirs, ours = (
        MemoryTable(
            np.zeros(len(pieces), bool),
            np.array([(base + piece[side], piece.length, 0) for piece in pieces], np.uint64),
        )
        for side, base in enumerate((int(address), target))
    )

    def once() -> None:
        handle = local.begin_read(ours, theirs, remote)
        while local.ended(handle) is None:
            pass

    def end() -> None:
        memory[0] = 0  # Ours as long as this lives.
        local.close()
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def nixl_source() -> None:
    """The other process: memory to read, with somebody who polls."""
    memory = memoryview(mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = bytes(LARGE_BYTES)
    mapped = Mapped(memory)
    local = NixlAgent(f"source-{os.getpid()}")
    local.register([Segment(mapped.address, LARGE_BYTES)])
    print(local.metadata().hex(), mapped.address, flush=True)
    reader = threading.Thread(target=sys.stdin.read, daemon=True)
    reader.start()
    while reader.is_alive():
        local.poll()
        time.sleep(0.0002)
    local.close()


def bare_mooncake(pieces: list[Descriptor]) -> Bare:
    """Batches of READs, waited for as Mooncake does."""
    other = Other("mooncake-source")
    segment, address = other.first.split()
    memory = memoryview(mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    target = Mapped(memory).address
    engine = require().TransferEngine()
    assert not engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(target, LARGE_BYTES)
    theirs = [int(address) + piece.source_address for piece in pieces]
    ours = [target + piece.target_address for piece in pieces]
    lengths = [piece.length for piece in pieces]
    batches = [slice(begin, begin + POSTED) for begin in range(0, len(pieces), POSTED)]

    def once() -> None:
        for batch in batches:
            assert not engine.batch_transfer_sync_read(segment, ours[batch], theirs[batch], lengths[batch])

    def end() -> None:
        engine.unregister_memory(target)
        memory[0] = 0  # Ours as long as this lives.
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def mooncake_source() -> None:
    """The other process: memory to read."""
    memory = memoryview(mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = bytes(LARGE_BYTES)
    address = Mapped(memory).address
    local = local_on("127.0.0.1")
    local.register(memory, address)
    print(local.segment, address, flush=True)
    sys.stdin.read()


def bare_standin(_: list[Descriptor]) -> Bare:
    """As many sends as fill the bytes."""
    ident = StandIn().ncclGetUniqueId().internal
    other = Other("standin-sink", ident.hex())
    group = NcclGroup(StandIn(), ident, 0)
    group.open(HostStaging())

    def once() -> None:
        for _ in range(LARGE_BYTES // CHUNK_BYTES):
            group.send(CHUNK_BYTES)

    def end() -> None:
        other.process.kill()
        other.end()

    return Bare(once, lambda: cpu_of(other.process.pid), end)


def standin_sink(ident: str) -> None:
    """The other process: the second rank."""
    group = NcclGroup(StandIn(), bytes.fromhex(ident), 1)
    print("opening", flush=True)
    group.open(HostStaging())
    while True:
        group.receive(CHUNK_BYTES)


BARE: dict[str, Callable[[list[Descriptor]], Bare]] = {
    "shm": bare_copy,
    "tcp": bare_socket,
    "tcp by TLS": bare_socket,
    "nixl": bare_nixl,
    "mooncake": bare_mooncake,
    "nccl stand-in": bare_standin,
}


def main() -> None:
    match sys.argv[1:]:
        case ["sink", case]:
            sink(case)
        case ["nixl-source"]:
            nixl_source()
        case ["mooncake-source"]:
            mooncake_source()
        case ["standin-sink", ident]:
            standin_sink(ident)


if __name__ == "__main__":
    main()
