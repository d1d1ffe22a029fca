"""Connections between other processes, treated as networks treat them, from outside: the served code knows nothing.

A socket of another process is borrowed (pidfd_getfd: Linux, and processes of one's own or root), and is cut, emptied or
slowed. Only what connects two of the given processes is touched: streams between ranks, a transport's TCP and unix
streams, HTTP between router and engines, UCX's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

PIDFD_GETFD: Final = 438
SO_MAX_PACING_RATE: Final = 47
UNPACED: Final = (1 << 64) - 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class End(NamedTuple):
    """A socket as its process knows it."""

    pid: int
    fd: int


class Wire(NamedTuple):
    """A connection: who connected or accepted is not told apart."""

    ends: tuple[End, End]
    kind: str
    """ "tcp" or "unix"."""


def wires(pids: Iterable[int]) -> list[Wire]:
    """All connections between two different ones of these processes."""
    at: dict[int, End] = {}
    for pid in pids:
        at |= {inode: End(pid, fd) for fd, inode in _sockets(pid)}
    pairs = [("tcp", *pair) for pair in _tcp()] + [("unix", *pair) for pair in _unix()]
    return [
        Wire((at[one], at[other]), kind)
        for kind, one, other in pairs
        if one in at and other in at and at[one].pid != at[other].pid
    ]


def disconnect(wire: Wire) -> None:
    """It ends. What has arrived may still be read."""
    with _borrowed(wire) as ends:
        for end in ends:
            _shut(end)


def lose(wire: Wire) -> int:
    """It ends, and so many bytes that were under way never arrive: frames break off in the middle, and are gone.

    Both processes stand still meanwhile, so that nobody reads on behind what is lost."""
    lost = 0
    with _borrowed(wire) as ends, _still(wire):
        for end in ends:
            try:
                while data := end.recv(1 << 20, socket.MSG_DONTWAIT):
                    lost += len(data)
            except OSError:
                pass  # nothing more is there
        for end in ends:
            _shut(end)
    return lost


def pace(wire: Wire, bytes_per_second: int = UNPACED) -> None:
    """Bytes are held back to that rate, both ways. Of TCP only."""
    with _borrowed(wire) as ends:
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second.to_bytes(8, sys.byteorder))


@contextmanager
def _borrowed(wire: Wire) -> Iterator[list[socket.socket]]:
    """Both ends, as sockets of this process. OSError if one is gone."""
    found: list[socket.socket] = []
    try:
        for end in wire.ends:
            pidfd = os.pidfd_open(end.pid)
            try:
                fd = _libc.syscall(PIDFD_GETFD, pidfd, end.fd, 0)
            finally:
                os.close(pidfd)
            if fd < 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            found.append(socket.socket(fileno=fd))
        yield found
    finally:
        for borrowed in found:
            borrowed.close()


@contextmanager
def _still(wire: Wire) -> Iterator[None]:
    pids = [end.pid for end in wire.ends]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        end.shutdown(socket.SHUT_RDWR)


def _sockets(pid: int) -> Iterator[tuple[int, int]]:
    """(fd, inode)"""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                yield int(link.name), int(target[8:-1])
    except OSError:
        return  # the process ends, or closes that one


def _tcp() -> Iterator[tuple[int, int]]:
    """Inodes of both ends of what is established on this host."""
    known: dict[tuple[str, str], int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "01":
            known[fields[1], fields[2]] = int(fields[9])
    for one, other in known:
        if one < other and (other, one) in known:
            yield known[one, other], known[other, one]


def _unix() -> Iterator[tuple[int, int]]:
    """The same of unix streams; /proc does not say who is whose peer."""
    lines = subprocess.run(["ss", "-xnH"], check=True, capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        fields = line.split()
        if fields[0] == "u_str" and fields[1] == "ESTAB":
            one, other = int(fields[5]), int(fields[7])
            if one < other:
                yield one, other
