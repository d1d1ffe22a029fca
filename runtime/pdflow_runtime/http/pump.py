"""Passing streams on while trio waits: what a server sends goes to a function as it comes, without a task switch.

A task that waits for a socket has trio arm it anew for each wait, and is then run in a pass of trio's loop: that takes
as long as passing a chunk on. Here a socket stays registered in an epoll of the pump's as long as its flow lasts. When
trio is about to wait (`before_io_wait`, an instrument's hook), the pump waits in its place, for its own sockets and for
trio's epoll among them, and returns to trio once that has events, a deadline has come, or a task has become runnable.

No other process may take what trio waits for: trio would find nothing, and wait for its next deadline without the pump.
(Of an inherited listener, which two routers have for a moment when one replaces the other, that is a second at most.)

trio does not publish its epoll. If it is not where it was in trio 0.35, a task waits for the pump's, and each turn is a
pass of trio's loop.
"""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import outcome
import trio
from trio.lowlevel import Abort, current_task, notify_closing, reschedule, wait_readable, wait_task_rescheduled

from pdflow.protocol.values import S
from pdflow_runtime.clock import deadline_of, now_ns, stopwatch_ns
from pdflow_runtime.http.sockets import receive_now
from pdflow_runtime.tls_socket import is_buffered

Take: TypeAlias = Callable[[bytes], bool]
"""Takes the next bytes, b"" for the end, without waiting. False: no more for now, as it must return for the end. It may
cancel its own task. Other tasks that it wakes without returning False may run after the next event or deadline only."""

_TURN: Final = 64
"""Sockets in one turn. trio's epoll is one of the pump's descriptors, and has its turn like any other."""
_LATER_NS: Final = 1_000
"""More than the difference by rounding between trio's clock and `stopwatch_ns`: a deadline must be over when the pump
has waited for it."""
_pumps: Final = trio.lowlevel.RunVar["Pump"]("pdflow's pump")


async def carry(sock: socket.socket, take: Take) -> None:
    """Give `take` what the socket receives until it returns False. An exception of `take` is raised here, as is
    OSError."""
    if is_buffered(sock) and not _pass_on(sock, take):
        return
    try:
        pump = _pumps.get()
    except LookupError:
        pump = Pump()
        _pumps.set(pump)
    await pump.carry(sock, take)


class Pump(trio.abc.Instrument):
    """That of one run of trio: it blocks the run's thread while trio has nothing to do, so there can be only one."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._flows: dict[int, tuple[trio.lowlevel.Task, socket.socket, Take]] = {}
        self._trio, self._next_deadline = _internals_of_trio()
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: trio.lowlevel.Task | None = None
        """The task that closes the epoll at the end."""
        self._failure: BaseException | None = None
        self._woken = False
        """Whether trio is kept from waiting, since a task has become runnable."""
        if self._trio is not None:
            self._epoll.register(self._trio, select.EPOLLIN)
            trio.lowlevel.add_instrument(self)
        trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        epoll = self._epoll
        try:
            if self._trio is not None:
                await self._until_failure()
            while True:
                await wait_readable(epoll.fileno())
                self._turn(0)
        finally:
            self._waiting = None
            with suppress(KeyError):  # it has failed
                trio.lowlevel.remove_instrument(self)
            notify_closing(epoll.fileno())
            epoll.close()

    async def _until_failure(self) -> None:
        if self._failure is None:
            self._waiting = current_task()
            await wait_task_rescheduled(lambda _: Abort.SUCCEEDED)
        assert self._failure is not None
        raise self._failure

    def before_io_wait(self, timeout: float) -> None:
        """Pass on what comes until trio has something to do. Without flows, trio waits as always."""
        if not self._flows:
            return
        try:
            if timeout == 0:
                self._turn(0)
            else:
                self._wait(timeout)
        except BaseException as error:
            # trio would only log it, and go on without the pump.
            self._fail(error)
        self._woken = False

    def _fail(self, error: BaseException) -> None:
        """End this run of trio with the error."""
        trio.lowlevel.remove_instrument(self)
        self._failure = error
        if self._waiting is not None:
            reschedule(self._waiting)
        self._token.run_sync_soon(_nothing)

    def _wait(self, timeout: float) -> None:
        until_ns = stopwatch_ns() + int(timeout * S) + _LATER_NS
        while self._turn(timeout):
            timeout = (until_ns - stopwatch_ns()) / S
            if timeout <= 0:
                if self._next_deadline() <= deadline_of(now_ns()):
                    self._wake()
                # Else trio may wait as long again: it was for idleness alone (trio.testing).
                return

    def _turn(self, timeout: float) -> bool:
        """Pass on what is there, or is first to come in time. False if trio has something to do: it will not wait."""
        idle = True
        for fd, _ in self._epoll.poll(timeout, _TURN):
            if fd == self._trio:
                idle = False
            elif fd in self._flows:
                self._step(fd)
        return idle and not self._woken

    async def carry(self, sock: socket.socket, take: Take) -> None:
        fd = sock.fileno()
        self._epoll.register(fd, select.EPOLLIN)
        self._flows[fd] = current_task(), sock, take

        def abort(_: object) -> Abort:
            self._forget(fd)
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    def _step(self, fd: int) -> None:
        flow = task, sock, take = self._flows[fd]
        try:
            if _pass_on(sock, take):
                return
            result: outcome.Outcome[None] = outcome.Value(None)
        except Exception as error:
            result = outcome.Error(error)
        if self._flows.get(fd) is flow:  # else `take` has cancelled the task
            self._forget(fd)
            reschedule(task, result)
        self._wake()

    def _wake(self) -> None:
        """Keep trio from waiting: what it waits for was settled before a task became runnable."""
        if self._trio is not None and not self._woken:
            self._woken = True
            self._token.run_sync_soon(_nothing)

    def _forget(self, fd: int) -> None:
        del self._flows[fd]
        with suppress(OSError, ValueError):  # the run ends, and the epoll was closed before
            self._epoll.unregister(fd)


def _pass_on(sock: socket.socket, take: Take) -> bool:
    """Give `take` what is there now, decrypted bytes included; False if it takes no more for now."""
    while (data := receive_now(sock)) is not None:
        if not take(data):
            return False
        if not is_buffered(sock):
            break
    return True


def _nothing() -> None:
    pass


def _internals_of_trio() -> tuple[int | None, Callable[[], float]]:
    """Return the descriptor of the epoll by which this run of trio waits, None if it is not found, and a function that
    returns the time of the next deadline. (The public statistics have that time, too, but look at all sockets.)"""
    from trio._core import _run

    try:
        runner = _run.GLOBAL_RUN_CONTEXT.runner
        return runner.io_manager._epoll.fileno(), runner.deadlines.next_deadline
    except AttributeError:
        return None, lambda: math.inf
