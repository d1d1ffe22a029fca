"""A stand-in for NCCL on machines without a GPU: the functions that we call, on memory that two processes share.

It is no NCCL: it shows that what calls NCCL calls it in the right order, and how KV moves through it, not how fast. As
with the real one, ranks meet when all have asked to, a send waits for its receive, what stands between group start and
end goes together, and an abort ends what this rank waits for, not what the other one does.

Ranks meet in a file under /dev/shm which is gone from there when all have come. In it, a ring for each pair of ranks,
with one writer and one reader; their counters are in the order in which x86 stores them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.nccl.library import ID_BYTES
from pdflow_runtime.transports.region import FOLDER, OwnedRegion, check_path, new_name

RING_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 4096
"""The size of the counters: [arrived of each rank, then written and read of each ring], as u64."""
RENDEZVOUS_TIMEOUT_S: Final = 10.0
FIRST_PAUSE_S: Final = 2e-5
LAST_PAUSE_S: Final = 1e-3


class StandInRefused(RuntimeError):  # noqa: N818 (as vLLM's are RuntimeErrors)
    def __init__(self, why: str) -> None:
        super().__init__(f"NCCL stand-in error: {why}")


class StandInId:
    """A name for the file, in as many bytes as NCCL's."""

    def __init__(self, internal: bytes) -> None:
        self.internal: Final = internal

    @property
    def path(self) -> Path:
        return FOLDER / self.internal.rstrip(b"\0").decode("ascii", "replace")


class Comm:
    """A communicator: the end of a group at one rank."""

    def __init__(self, memory: memoryview, ranks: int, rank: int) -> None:
        self._memory: Final = memory
        self.ranks: Final = ranks
        self.rank: Final = rank
        self.aborted = False
        self.head: Final = np.frombuffer(memory, "<u8", HEAD_BYTES // 8)
        self._rings: Final = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + HEAD_BYTES

    def ring(self, source: int, target: int) -> tuple[int, int]:
        """Return the index of a ring's counters, and the address of its bytes."""
        number = source * self.ranks + target
        return self.ranks + 2 * number, self._rings + number * RING_BYTES


class Move:
    """A send or a receive, as far as it has come."""

    def __init__(self, comm: Comm, sends: bool, address: int, count: int, peer: int) -> None:
        source, target = (comm.rank, peer) if sends else (peer, comm.rank)
        self.comm: Final = comm
        self._sends: Final = sends
        self._counters, self._ring = comm.ring(source, target)
        self._address, self.left = address, count

    def step(self) -> bool:
        """Move what can be moved. True if that was anything."""
        head, at = self.comm.head, self._counters
        written, read = int(head[at]), int(head[at + 1])
        begun = written if self._sends else read
        room = RING_BYTES - (written - read) if self._sends else written - read
        count = min(room, self.left, RING_BYTES - begun % RING_BYTES)
        if not count:
            return False
        slot = self._ring + begun % RING_BYTES
        ctypes.memmove(*((slot, self._address) if self._sends else (self._address, slot)), count)
        head[at if self._sends else at + 1] = begun + count
        self._address += count
        self.left -= count
        return True


class StandIn:
    """The stand-in's functions, by the names of runtime/pdflow_runtime/transports/nccl/library.py. Every call returns
    when its bytes have moved."""

    def __init__(self) -> None:
        self._grouped: Final = threading.local()

    def ncclGetVersion(self) -> str:
        return "stand-in"

    def ncclGetUniqueId(self) -> StandInId:
        return StandInId(new_name().encode().ljust(ID_BYTES, b"\0"))

    def unique_id_from_bytes(self, data: bytes) -> StandInId:
        return StandInId(data)

    def ncclCommInitRank(self, world_size: int, unique_id: StandInId, rank: int) -> Comm:
        nbytes = HEAD_BYTES + world_size**2 * RING_BYTES
        pause = PollInterval(RENDEZVOUS_TIMEOUT_S)
        try:
            owned = OwnedRegion(nbytes, name=unique_id.path.name) if rank == 0 else None
            memory = _found(unique_id.path, nbytes, pause) if owned is None else owned.view
        except TransportError as error:
            raise StandInRefused(str(error)) from None
        comm = Comm(memory, world_size, rank)
        comm.head[rank] = 1
        try:
            while not comm.head[:world_size].all():
                pause.wait()
        finally:
            if owned is not None:
                owned.close()
        return comm

    def ncclSend(self, sendbuff: int, count: int, datatype: int, dest: int, comm: Comm, stream: object) -> None:
        self._move(Move(comm, True, sendbuff, count, dest))

    def ncclRecv(self, recvbuff: int, count: int, datatype: int, src: int, comm: Comm, stream: object) -> None:
        self._move(Move(comm, False, recvbuff, count, src))

    def ncclGroupStart(self) -> None:
        self._grouped.moves = []

    def ncclGroupEnd(self) -> None:
        moves, self._grouped.moves = self._grouped.moves, None
        _move_all(moves)

    def ncclCommAbort(self, comm: Comm) -> None:
        comm.aborted = True

    def _move(self, move: Move) -> None:
        grouped: list[Move] | None = getattr(self._grouped, "moves", None)
        if grouped is None:
            _move_all([move])
        else:
            grouped.append(move)


class PollInterval:
    """Waits between two looks at what other ranks do, short times at first. StandInRefused after the timeout."""

    def __init__(self, timeout_s: float) -> None:
        self._left_s = timeout_s
        self._next_s = FIRST_PAUSE_S
        self._never: Final = threading.Event()

    def wait(self) -> None:
        if self._left_s <= 0:
            raise StandInRefused("the other rank did not connect in time")
        self._never.wait(self._next_s)
        self._left_s -= self._next_s
        self._next_s = min(2 * self._next_s, LAST_PAUSE_S)


def _move_all(moves: Sequence[Move]) -> None:
    pause = PollInterval(float("inf"))
    while any(move.left for move in moves):
        if any(move.comm.aborted for move in moves):
            raise StandInRefused("aborted")
        moved = [move.step() for move in moves]
        if any(moved):
            pause = PollInterval(float("inf"))
        else:
            pause.wait()


def _found(path: Path, nbytes: int, pause: PollInterval) -> memoryview:
    """Map the file that rank 0 makes, once it is there and whole. TransportError for a name that no agent gives."""
    check_path(str(path), "kv", FOLDER)
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            pause.wait()
            continue
        except OSError as error:
            raise TransportError(f"cannot open the file that the two ranks share: {error.strerror}") from None
        try:
            size = os.fstat(fd).st_size
            if size == nbytes:
                return memoryview(mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)
        if size > nbytes:
            raise TransportError("the file that the two ranks share belongs to another group")
        pause.wait()
