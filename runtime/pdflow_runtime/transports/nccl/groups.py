"""Groups of two ranks in NCCL, and the bytes that go from one's staging buffer into the other's.

This is the only module that calls NCCL. Its rules:

- A group belongs to a stream of messages. The stream's opener is rank 0, has made the group's id and sent it ahead. So
  two peers that open one at once have one each, and neither waits for the other's; where bytes go one way, as in P and
  D, there is one for each pair of ranks.
- Calls of NCCL must come in one order on both sides. The stream's host announces each body, and both take them one
  after the other as announced. Nothing is sent that has not been announced, so a refusal costs no body.
- A body goes in chunks through staging buffers, one here and one there (staging.py): NCCL sends what lies in one piece,
  and what has not yet left the buffer has not landed.
- No call of NCCL waits: groups are opened without blocking, and sends and receives are put on the staging buffer's
  stream, which is asked again and again what is left of it. So an abort ends whatever waits here, within a millisecond.
- NCCL frees a communicator when it aborts it. That is done by `close` alone, under the lock that each call holds from
  its first use of the communicator to its last: none is used after it was freed, and what has waited for a kernel that
  the abort ended raises, rather than taking its bytes for received.
- NCCL does not tell the other rank of an abort. That rank watches the stream of messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pdflow_runtime.transports.nccl.library import IN_PROGRESS, UINT8, Library
from pdflow_runtime.transports.nccl.staging import NcclStaging

OPEN_TIMEOUT_S: Final = 30.0
"""The time that the other rank has to join a group. It does so once its body is announced, as this one does: NCCL takes
0.1 to 2 s for it."""
FIRST_PAUSE_S: Final = 2e-5
LAST_PAUSE_S: Final = 1e-3


class NcclGroup:
    """A group of ranks that send and receive by NCCL. Args: `ident`, the id as rank 0 has made it; `ranks`, one for a
    group with oneself. Calls but `abort` wait, and only one thread at a time is in one.

    RuntimeError where NCCL fails, or after `abort`; the group cannot be used again then.
    """

    def __init__(self, library: Library, ident: bytes, rank: int, ranks: int = 2) -> None:
        self._library: Final = library
        self._ident: Final = ident
        self._rank: Final = rank
        self._ranks: Final = ranks
        self._comm: Any = None
        self._aborted: Final = threading.Event()
        self._calls: Final = threading.Lock()
        """Held by each call as long as it may use the communicator."""
        self.staging: NcclStaging

    def open(self, staging: NcclStaging) -> None:
        """Open the group with the other rank, which must do so too within OPEN_TIMEOUT_S."""
        with self._calling():
            self.staging = staging
            staging.attach()
            ident = self._library.unique_id_from_bytes(self._ident)
            self._comm = self._library.ncclCommInitRankConfig(self._ranks, ident, self._rank)
            for waited_s in self._until_issued():
                if waited_s > OPEN_TIMEOUT_S:
                    raise RuntimeError(f"the other rank did not join the group within {OPEN_TIMEOUT_S:g} s")

    def send(self, nbytes: int) -> None:
        """Send this many bytes from the start of the staging buffer."""
        with self._calling():
            staging = self.staging
            staging.attach()
            self._library.ncclSend(staging.address, nbytes, UINT8, self._other, self._comm, staging.stream)
            self._finish()

    def receive(self, nbytes: int) -> None:
        """Receive this many bytes into the staging buffer."""
        with self._calling():
            staging = self.staging
            staging.attach()
            self._library.ncclRecv(staging.address, nbytes, UINT8, self._other, self._comm, staging.stream)
            self._finish()

    def pass_on(self, source: int, target: int, nbytes: int) -> None:
        """Copy from one address that NCCL reaches to another, in a group of one rank."""
        library = self._library
        with self._calling():
            self.staging.attach()
            library.ncclGroupStart()
            try:
                library.ncclSend(source, nbytes, UINT8, self._other, self._comm, self.staging.stream)
                library.ncclRecv(target, nbytes, UINT8, self._other, self._comm, self.staging.stream)
            finally:
                library.ncclGroupEnd()
            self._finish()

    def abort(self) -> None:
        """Abort the group, from any thread, without waiting: calls that wait in other threads fail. NCCL's kernels go
        on waiting until `close`."""
        self._aborted.set()

    def close(self) -> None:
        """Abort the group, and free what NCCL holds for it, once no call is in progress."""
        self._aborted.set()
        with self._calls:
            comm, self._comm = self._comm, None
            if comm is not None:
                self._library.ncclCommAbort(comm)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._calls:
            self._check()
            try:
                yield
            except BaseException:
                self._aborted.set()
                raise
            self._check()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("the group was aborted")

    def _finish(self) -> None:
        """Wait until what was posted has been done: first until NCCL has put it on the stream, which it does in a
        thread of its own. A stream that is looked at earlier has nothing left, though nothing has moved."""
        for _ in self._until_issued():
            pass
        self.staging.mark()
        before, pause = 0, PollInterval(self._aborted)
        while left := self.staging.left():
            if left != before:
                before, pause = left, PollInterval(self._aborted)
            pause.wait()
            self._check()
            self._library.ncclCommGetAsyncError(self._comm)  # It raises what the kernel will wait for in vain.
        self._library.ncclCommGetAsyncError(self._comm)

    def _until_issued(self) -> Iterator[float]:
        """Wait until NCCL has done what the last call asks for, but for what is on the stream. Yields, in between, for
        how many seconds."""
        pause = PollInterval(self._aborted)
        while self._library.ncclCommGetAsyncError(self._comm) == IN_PROGRESS:
            pause.wait()
            self._check()
            yield pause.waited_s

    @property
    def _other(self) -> int:
        return self._ranks - 1 - self._rank


class PollInterval:
    """Waits between two looks at what others do, for short times at first, and no longer once an event is set."""

    def __init__(self, over: threading.Event) -> None:
        self._over: Final = over
        self._next_s = FIRST_PAUSE_S
        self.waited_s = 0.0

    def wait(self) -> None:
        self._over.wait(self._next_s)
        self.waited_s += self._next_s
        self._next_s = min(2 * self._next_s, LAST_PAUSE_S)
