"""Groups of two ranks in NCCL, and the bytes that go from one's staging buffer into the other's.

This is the only module that calls NCCL. Its rules:

- A group belongs to a stream of messages. The stream's opener is rank 0, has made the group's id and sent it ahead. So
  two peers that open one at once have one each, and neither waits for the other's; where bytes go one way, as in P and
  D, there is one for each pair of ranks.
- Calls of NCCL must come in one order on both sides. The stream's host announces each body, and both take them one
  after the other as announced. Nothing is sent that has not been announced, so a refusal costs no body.
- A body goes in chunks through staging buffers, one here and one there: NCCL sends what lies in one piece, and what has
  not yet left the buffer has not landed.
- An abort ends what this rank waits for. NCCL does not tell the other rank, which therefore watches the stream.
"""

from __future__ import annotations

import mmap
from importlib import import_module
from typing import Any, Final, Protocol

from pdflow_runtime.transports.copying import Mapped
from pdflow_runtime.transports.nccl.library import UINT8, Library

CHUNK_BYTES: Final = 4 << 20


class NcclStaging(Protocol):
    """A staging buffer that NCCL reaches, and the copies between it and this process's memory."""

    @property
    def host(self) -> Mapped:
        """The memory in which bytes are gathered and from which they are scattered."""

    @property
    def address(self) -> int:
        """The address of the buffer for NCCL."""

    @property
    def stream(self) -> Any: ...

    def out(self, nbytes: int) -> None:
        """Make bytes that were gathered ready for NCCL to send."""

    def back(self, nbytes: int) -> None:
        """Make bytes that NCCL received ready to be scattered when this returns."""

    def wait(self) -> None:
        """Wait until NCCL has done what was posted on the stream."""


class HostStaging:
    """The staging buffer of the stand-in, which reaches this process's memory."""

    stream: Final = None

    def __init__(self) -> None:
        self.host: Final = Mapped(memoryview(mmap.mmap(-1, CHUNK_BYTES)))
        self.address: Final = self.host.address

    def out(self, nbytes: int) -> None:
        pass

    def back(self, nbytes: int) -> None:
        pass

    def wait(self) -> None:
        pass


class CudaStaging:
    """A staging buffer on this process's GPU, with pinned memory beside it."""

    def __init__(self) -> None:
        torch: Any = import_module("torch")
        self._torch: Final = torch
        self._pinned: Final = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device: Final = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cuda")
        self._cuda_stream: Final = torch.cuda.Stream()
        self.host: Final = Mapped(memoryview(self._pinned.numpy()))
        self.address: Final = int(self._device.data_ptr())
        self.stream: Final = self._cuda_stream.cuda_stream

    def out(self, nbytes: int) -> None:
        with self._torch.cuda.stream(self._cuda_stream):
            self._device[:nbytes].copy_(self._pinned[:nbytes], non_blocking=True)

    def back(self, nbytes: int) -> None:
        with self._torch.cuda.stream(self._cuda_stream):
            self._pinned[:nbytes].copy_(self._device[:nbytes], non_blocking=True)
        self.wait()

    def wait(self) -> None:
        self._cuda_stream.synchronize()


class NcclGroup:
    """A group of ranks that send and receive by NCCL. Args: `ident`, the id as rank 0 has made it; `ranks`, one for a
    group with oneself. Calls but `abort` wait.

    RuntimeError where NCCL fails, or after `abort`.
    """

    def __init__(self, library: Library, ident: bytes, rank: int, ranks: int = 2) -> None:
        self._library: Final = library
        self._ident: Final = ident
        self._rank: Final = rank
        self._ranks: Final = ranks
        self._comm: Any = None
        self._aborted = False
        self.staging: NcclStaging

    def open(self, staging: NcclStaging) -> None:
        """Open the group with the other rank, which must do so too."""
        self.staging = staging
        library = self._library
        self._comm = library.ncclCommInitRank(self._ranks, library.unique_id_from_bytes(self._ident), self._rank)
        if self._aborted:
            self.abort()
            raise RuntimeError("the group was aborted while it opened")

    def send(self, nbytes: int) -> None:
        """Send this many bytes from the start of the staging buffer."""
        staging, comm = self.staging, self._opened()
        staging.out(nbytes)
        self._library.ncclSend(staging.address, nbytes, UINT8, self._other, comm, staging.stream)
        staging.wait()

    def receive(self, nbytes: int) -> None:
        """Receive this many bytes into the staging buffer."""
        staging, comm = self.staging, self._opened()
        self._library.ncclRecv(staging.address, nbytes, UINT8, self._other, comm, staging.stream)
        staging.back(nbytes)

    def pass_on(self, source: int, target: int, nbytes: int) -> None:
        """Copy from one address that NCCL reaches to another, in a group of one rank."""
        library, comm, stream = self._library, self._opened(), self.staging.stream
        library.ncclGroupStart()
        library.ncclSend(source, nbytes, UINT8, self._other, comm, stream)
        library.ncclRecv(target, nbytes, UINT8, self._other, comm, stream)
        library.ncclGroupEnd()
        self.staging.wait()

    def abort(self) -> None:
        """Abort the group, from any thread; calls that wait in other threads fail."""
        self._aborted = True
        comm, self._comm = self._comm, None
        if comm is not None:
            self._library.ncclCommAbort(comm)

    def _opened(self) -> Any:
        comm = self._comm
        if comm is None:
            raise RuntimeError("the group was aborted")
        return comm

    @property
    def _other(self) -> int:
        return self._ranks - 1 - self._rank
