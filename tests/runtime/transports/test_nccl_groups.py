"""Groups over a library that is slow, fails, or never answers: what is waited for, and when a communicator is freed."""

# ruff: noqa: N802 (NCCL's own names)

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pdflow_runtime.transports.nccl import groups
from pdflow_runtime.transports.nccl.groups import NcclGroup
from pdflow_runtime.transports.nccl.library import IN_PROGRESS, SUCCESS
from pdflow_runtime.transports.nccl.staging import HostStaging
from pdflow_runtime.transports.nccl.standin import StandIn
from pdflow_runtime.transports.region import FOLDER

WAIT_S = 20


class Slow:
    """NCCL, and a GPU on which its kernels end when they are told to, or when an abort frees what they use."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.states: list[int | Exception] = []
        """What is said of the communicator, and then SUCCESS for ever."""
        self.blocked = {"ncclSend": threading.Event(), "ncclGroupEnd": threading.Event()}
        """A call of this name ends when its event is set."""
        for event in self.blocked.values():
            event.set()
        self.entered = threading.Event()
        self.kernels = 0
        self.freed = False

    def unique_id_from_bytes(self, data: bytes) -> bytes:
        return data

    def ncclCommInitRankConfig(self, world_size: int, unique_id: bytes, rank: int) -> str:
        self.log.append("init")
        return "comm"

    def ncclCommGetAsyncError(self, comm: str) -> int:
        self._use(comm)
        state = self.states.pop(0) if self.states else SUCCESS
        if isinstance(state, Exception):
            raise state
        self.log.append("in progress" if state == IN_PROGRESS else "success")
        return state

    def ncclSend(self, sendbuff: int, count: int, datatype: int, dest: int, comm: str, stream: object) -> None:
        self._post("ncclSend", comm)

    def ncclRecv(self, recvbuff: int, count: int, datatype: int, src: int, comm: str, stream: object) -> None:
        self._post("ncclRecv", comm)

    def ncclGroupStart(self) -> None:
        self.log.append("ncclGroupStart")

    def ncclGroupEnd(self) -> None:
        self.entered.set()
        self.blocked["ncclGroupEnd"].wait(WAIT_S)
        assert not self.freed
        self.log.append("ncclGroupEnd")

    def ncclCommAbort(self, comm: str) -> None:
        self._use(comm)
        self.log.append("abort")
        self.freed = True
        self.kernels = 0  # They have ended, without having moved anything.

    def _post(self, name: str, comm: str) -> None:
        self.entered.set()
        if name in self.blocked:
            self.blocked[name].wait(WAIT_S)
        self._use(comm)
        self.kernels += 1
        self.log.append(name)

    def _use(self, comm: str) -> None:
        assert comm == "comm"
        assert not self.freed, "it is used after it was freed"


class SlowStaging(HostStaging):
    """A buffer on that GPU."""

    def __init__(self, library: Slow) -> None:
        super().__init__()
        self._library = library
        self.looked = threading.Event()

    def mark(self) -> None:
        self._library.log.append("mark")

    def left(self) -> int:
        self.looked.set()
        return self._library.kernels


class Call:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def ended(self) -> str:
        """Wait for the end, and return the error's text; "" without one."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return "" if self.error is None else str(self.error)

    def runs(self) -> bool:
        self._thread.join(0.02)
        return self._thread.is_alive()


def opened() -> tuple[NcclGroup, Any, SlowStaging]:
    library: Any = Slow()
    group, staging = NcclGroup(library, b"id", 0), SlowStaging(library)
    group.open(staging)
    library.log.clear()
    return group, library, staging


@pytest.mark.parametrize("abort", ["abort", "close"])
def test_what_an_abort_ends_has_not_been_received(abort: str) -> None:
    """The abort frees the kernel, after which nothing is left on the stream: once a chunk that never came was
    scattered."""
    group, library, staging = opened()
    receiving = Call(lambda: group.receive(64))
    assert staging.looked.wait(WAIT_S)
    aborting = Call(getattr(group, abort))
    assert receiving.ended() == "the group was aborted"
    assert aborting.ended() == ""
    group.close()
    assert library.log[-1] == "abort"
    assert library.log.count("abort") == 1


def test_an_abort_when_the_kernel_has_just_ended_is_seen_too() -> None:
    group, _, staging = opened()

    def left() -> int:
        group.abort()
        return 0

    staging.left = left  # type: ignore[method-assign]
    assert Call(lambda: group.receive(64)).ended() == "the group was aborted"


@pytest.mark.parametrize("name", ["ncclSend", "ncclGroupEnd"])
def test_nothing_is_freed_while_a_call_uses_it(name: str) -> None:
    group, library, _ = opened()
    library.blocked[name].clear()
    calling = Call((lambda: group.send(64)) if name == "ncclSend" else (lambda: group.pass_on(0, 0, 64)))
    assert library.entered.wait(WAIT_S)
    closing = Call(group.close)
    assert closing.runs()
    assert "abort" not in library.log
    library.blocked[name].set()
    assert calling.ended() == "the group was aborted"
    assert closing.ended() == ""
    assert library.log[-1] == "abort"


def test_no_call_begins_after_an_abort() -> None:
    group, library, _ = opened()
    group.abort()
    for call in (lambda: group.send(1), lambda: group.receive(1), lambda: group.pass_on(0, 0, 1)):
        assert Call(call).ended() == "the group was aborted"
    assert library.log == []
    group.close()
    group.close()
    assert library.log == ["abort"]


def test_the_stream_is_looked_at_when_nccl_has_put_the_kernel_on_it() -> None:
    group, library, staging = opened()
    library.states = [IN_PROGRESS, IN_PROGRESS, SUCCESS]
    receiving = Call(lambda: group.receive(64))
    assert staging.looked.wait(WAIT_S)
    assert receiving.runs()
    library.kernels = 0
    assert receiving.ended() == ""
    assert library.log[:5] == ["ncclRecv", "in progress", "in progress", "success", "mark"]


def test_an_error_that_nccl_finds_while_a_kernel_waits_ends_the_call() -> None:
    group, library, _ = opened()
    library.states = [SUCCESS, SUCCESS, RuntimeError("NCCL error: remote process exited")]
    assert Call(lambda: group.receive(64)).ended() == "NCCL error: remote process exited"
    assert Call(lambda: group.receive(64)).ended() == "the group was aborted"


def test_an_opening_that_never_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "OPEN_TIMEOUT_S", 0.02)
    library: Any = Slow()
    library.states = [IN_PROGRESS] * 1000
    group = NcclGroup(library, b"id", 0)
    opening = Call(lambda: group.open(SlowStaging(library)))
    assert opening.ended() == "the other rank did not join the group within 0.02 s"
    group.close()
    assert library.log[-1] == "abort"


def test_an_abort_ends_an_opening() -> None:
    before = set(FOLDER.glob(f"pdflow-{os.getpid()}-*.kv"))
    stand_in = StandIn()
    group = NcclGroup(stand_in, stand_in.ncclGetUniqueId().internal, 0)
    opening = Call(lambda: group.open(HostStaging()))
    assert opening.runs()
    group.close()
    assert opening.ended() == "the group was aborted"
    assert set(FOLDER.glob(f"pdflow-{os.getpid()}-*.kv")) <= before


def test_the_stand_in_tells_a_use_of_what_was_freed() -> None:
    stand_in = StandIn()
    alone = NcclGroup(stand_in, stand_in.ncclGetUniqueId().internal, 0, ranks=1)
    alone.open(HostStaging())
    comm: Any = alone._comm
    alone.close()
    with pytest.raises(RuntimeError, match="has been freed"):
        stand_in.ncclCommGetAsyncError(comm)
    with pytest.raises(RuntimeError, match="has been freed"):
        stand_in.ncclCommAbort(comm)
