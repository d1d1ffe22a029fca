"""A stand-in for NCCL on machines without a GPU: the functions that we call, on memory that two processes share.

It is no NCCL: it shows that what calls NCCL calls it in the right order, and how KV moves through it, not how fast. As
with the real one, ranks meet when all have asked to, no call waits, a send ends with its receive, what stands between
group start and end goes together, and the other rank is not notified of an abort. The real one moves bytes on a CUDA
stream; here each call that asks a StandInStream what is left moves some. A communicator that has been freed raises an
error, where the real one would read freed memory.

Ranks meet in a file under /dev/shm which is gone from there when all have come. In it, a ring for each pair of ranks,
with one writer and one reader; their counters are in the order in which x86 stores them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from pathlib import Path
from typing import Final

import numpy as np

from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.nccl.library import ID_BYTES, IN_PROGRESS, SUCCESS
from pdflow_runtime.transports.region import FOLDER, OwnedRegion, check_path, new_name

RING_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 4096
"""The size of the counters: [arrived of each rank, then written and read of each ring], as u64."""


class StandInRefused(RuntimeError):  # noqa: N818 (as NCCL's are RuntimeErrors)
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
    """A communicator: the end of a group at one rank. TransportError for a file that no agent makes."""

    def __init__(self, path: Path, ranks: int, rank: int) -> None:
        self._path: Final = path
        self.ranks: Final = ranks
        self.rank: Final = rank
        self.nbytes: Final = HEAD_BYTES + ranks**2 * RING_BYTES
        self.freed = False
        self._complete = False
        self.head: np.ndarray[tuple[int], np.dtype[np.uint64]]
        self._rings = 0
        check_path(str(path), "kv", FOLDER)
        self._owned: Final = OwnedRegion(self.nbytes, name=path.name) if rank == 0 else None
        if self._owned is not None:
            self._join(self._owned.view)

    def has_joined(self) -> bool:
        """True if all ranks have come. TransportError."""
        if self._complete:
            return True
        if not self._rings:
            memory = _found(self._path, self.nbytes)
            if memory is None:
                return False
            self._join(memory)
        if not self.head[: self.ranks].all():
            return False
        self.hide()
        self._complete = True
        return True

    def _join(self, memory: memoryview) -> None:
        self.head = np.frombuffer(memory, "<u8", HEAD_BYTES // 8)
        self._rings = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + HEAD_BYTES
        self.head[self.rank] = 1

    def hide(self) -> None:
        """Remove the file, which ranks that have come keep."""
        if self._owned is not None:
            self._owned.close()

    def ring(self, source: int, target: int) -> tuple[int, int]:
        """Return the index of a ring's counters, and the address of its bytes."""
        number = source * self.ranks + target
        return self.ranks + 2 * number, self._rings + number * RING_BYTES


class Move:
    """A send or a receive, as far as it has come."""

    def __init__(self, comm: Comm, sends: bool, address: int, count: int, peer: int) -> None:
        source, target = (comm.rank, peer) if sends else (peer, comm.rank)
        self._comm: Final = comm
        self._sends: Final = sends
        self._counters, self._ring = comm.ring(source, target)
        self._address, self.left = address, count

    def step(self) -> bool:
        """Move what can be moved. True if that was anything."""
        if self._comm.freed:
            raise StandInRefused("this communicator has been freed")
        head, at = self._comm.head, self._counters
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


class StandInStream:
    """A queue of sends and receives, in the place of a CUDA stream: what goes together, one behind the other."""

    def __init__(self) -> None:
        self._queue: Final[deque[list[Move]]] = deque()

    def put(self, moves: list[Move]) -> None:
        self._queue.append(moves)

    def left(self) -> int:
        """Move what can be moved now, and return how many bytes are left."""
        while self._queue:
            moves = self._queue[0]
            while any(move.step() for move in moves):
                pass
            if any(move.left for move in moves):
                break
            self._queue.popleft()
        return sum(move.left for moves in self._queue for move in moves)


class StandIn:
    """The stand-in's functions, by the names of runtime/pdflow_runtime/transports/nccl/library.py."""

    def __init__(self) -> None:
        self._grouped: Final = threading.local()

    def ncclGetVersion(self) -> str:
        return "stand-in"

    def ncclGetUniqueId(self) -> StandInId:
        return StandInId(new_name().encode().ljust(ID_BYTES, b"\0"))

    def unique_id_from_bytes(self, data: bytes) -> StandInId:
        return StandInId(data)

    def ncclCommInitRankConfig(self, world_size: int, unique_id: StandInId, rank: int) -> Comm:
        try:
            return Comm(unique_id.path, world_size, rank)
        except TransportError as error:
            raise StandInRefused(str(error)) from None

    def ncclCommGetAsyncError(self, comm: Comm) -> int:
        if comm.freed:
            raise StandInRefused("this communicator has been freed")
        try:
            return SUCCESS if comm.has_joined() else IN_PROGRESS
        except TransportError as error:
            raise StandInRefused(str(error)) from None

    def ncclSend(self, sendbuff: int, count: int, datatype: int, dest: int, comm: Comm, stream: StandInStream) -> None:
        self._put(Move(comm, True, sendbuff, count, dest), stream)

    def ncclRecv(self, recvbuff: int, count: int, datatype: int, src: int, comm: Comm, stream: StandInStream) -> None:
        self._put(Move(comm, False, recvbuff, count, src), stream)

    def ncclGroupStart(self) -> None:
        self._grouped.moves = []

    def ncclGroupEnd(self) -> None:
        moves, self._grouped.moves = self._grouped.moves, None
        for stream in {stream for stream, _ in moves}:
            stream.put([move for put_on, move in moves if put_on is stream])

    def ncclCommAbort(self, comm: Comm) -> None:
        if comm.freed:
            raise StandInRefused("this communicator has been freed")
        comm.freed = True
        comm.hide()

    def _put(self, move: Move, stream: StandInStream) -> None:
        grouped: list[tuple[StandInStream, Move]] | None = getattr(self._grouped, "moves", None)
        if grouped is None:
            stream.put([move])
        else:
            grouped.append((stream, move))


def _found(path: Path, nbytes: int) -> memoryview | None:
    """Map the file that rank 0 makes; None while it is not there and whole. TransportError if it cannot be mapped."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransportError(f"cannot open the file that the two ranks share: {error.strerror}") from None
    try:
        size = os.fstat(fd).st_size
        if size > nbytes:
            raise TransportError("the file that the two ranks share belongs to another group")
        return memoryview(mmap.mmap(fd, nbytes)) if size == nbytes else None
    finally:
        os.close(fd)
