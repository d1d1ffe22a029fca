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


class ExhaustionLog:
    """Logs that connections fail for want of resources of the system."""

    def __init__(self) -> None:
        self._next_ns = 0
        self._unlogged = 0

    def add(self, what: str, error: OSError) -> None:
        """Log that `what` failed, if it failed for want of resources and nothing was logged for a second."""
        if error.errno not in EXHAUSTED:
            return
        now = now_ns()
        if now < self._next_ns:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        self._next_ns, self._unlogged = now + S, 0
        log.error("%s failed: %s%s; %s", what, error.strerror, more, _remedy(error))


def _remedy(error: OSError) -> str:
    if error.errno != errno.EMFILE:
        return "the whole system lacks it: see /proc/sys/fs/file-max and the free memory"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {limit} open files: raise the limit (ulimit -n 65536, LimitNOFILE= of a systemd unit, "
        "docker run --ulimit nofile=65536); a request takes three"
    )


EXHAUSTION: Final = ExhaustionLog()
"""Of this process, as the limit is."""
