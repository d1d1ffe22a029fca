"""File descriptors that have run out: at most one log line a second, with the limit and how to raise it."""

from __future__ import annotations

import errno
import logging
import resource
from typing import Final

from pdflow.protocol.values import S
from pdflow_runtime.clock import now_ns

log = logging.getLogger(__name__)

EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What accepting or opening a connection fails with where the process or the system has nothing left for it."""


class LineASecond:
    """Says when a line may be logged, at most once a second, and how many were not."""

    def __init__(self) -> None:
        self._next_ns = 0
        self._unlogged = 0

    def more(self) -> str | None:
        """Return what the line must say of those that were not logged; None if there must be no line now."""
        now = now_ns()
        if 0 < self._next_ns - now <= S:  # further ahead it is of another run of trio, whose clock has another zero
            self._unlogged += 1
            return None
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        self._next_ns, self._unlogged = now + S, 0
        return more


class ExhaustionLog:
    """Logs that connections fail for want of resources of the system."""

    def __init__(self) -> None:
        self._lines: Final = LineASecond()

    def add(self, what: str, error: OSError) -> None:
        """Log that `what` failed, if it failed for want of resources and nothing was logged for a second."""
        if error.errno in EXHAUSTED and (more := self._lines.more()) is not None:
            log.error("%s failed: %s%s; %s", what, error.strerror, more, _remedy(error))


class SaturationLog:
    """Logs that all connections of a server are being answered."""

    def __init__(self) -> None:
        self._lines: Final = LineASecond()

    def add(self, connections: int) -> None:
        """Log that a client waits, or was refused, as so many are being answered, if nothing was logged for a
        second."""
        if (more := self._lines.more()) is not None:
            log.warning(
                "all %d connections are being answered: further clients wait or get 503%s; this process may have %d "
                "open files (ulimit -n), three for each: raise serve.connections, and this limit if it is lower",
                *(connections, more, _limit()),
            )


def _remedy(error: OSError) -> str:
    if error.errno != errno.EMFILE:
        return "the whole system lacks it: see /proc/sys/fs/file-max and the free memory"
    return (
        f"this process may have {_limit()} open files, and a request takes three: raise the limit (ulimit -n 65536, "
        "LimitNOFILE= of a systemd unit, docker run --ulimit nofile=65536)"
    )


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


EXHAUSTION: Final = ExhaustionLog()
SATURATION: Final = SaturationLog()
"""Of this process, as the limit is."""
