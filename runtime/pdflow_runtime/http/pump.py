"""A pump that passes on all streams of a server, by one task with an epoll of its own.

trio arms a socket anew for each wait and runs the task that waited: that is half of what passing a chunk on costs.
Here a socket stays registered as long as its flow lasts, trio waits for the epoll alone, and what is ready is passed
on in one turn, without a task switch for each (32 streams on a busy machine: 24 instead of 39 us per chunk).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import TypeAlias

import outcome
import trio
from trio.lowlevel import Abort, current_task, notify_closing, reschedule, wait_readable, wait_task_rescheduled

from pdflow_runtime.http.sockets import receive_now

Take: TypeAlias = Callable[[bytes], bool]
"""Takes the next bytes, b"" for the end, without waiting. False: no more for now."""

_TURN = 64
"""Sockets in one turn; then other tasks run."""


class Pump:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._flows: dict[int, tuple[trio.lowlevel.Task, socket.socket, Take]] = {}

    async def run(self, scope: trio.CancelScope) -> None:
        """Run until that scope is cancelled; `carry` stands still without it."""
        epoll = self._epoll
        try:
            with scope:
                while True:
                    await wait_readable(epoll.fileno())
                    for fd, _ in epoll.poll(0, _TURN):
                        self._step(fd)
        finally:
            notify_closing(epoll.fileno())
            epoll.close()

    async def carry(self, sock: socket.socket, take: Take) -> None:
        """Give `take` what the socket receives until it returns False. An exception of `take` is raised here, as is
        OSError."""
        fd = sock.fileno()
        self._flows[fd] = current_task(), sock, take
        self._epoll.register(fd, select.EPOLLIN)

        def abort(_: object) -> Abort:
            self._forget(fd)
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    def _step(self, fd: int) -> None:
        task, sock, take = self._flows[fd]
        try:
            data = receive_now(sock)
            if data is None or take(data):
                return
            result: outcome.Outcome[None] = outcome.Value(None)
        except Exception as error:
            result = outcome.Error(error)
        self._forget(fd)
        reschedule(task, result)

    def _forget(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._flows[fd]
