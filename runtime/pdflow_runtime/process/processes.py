"""How a part's process comes to its end: told to by a signal, left alone by whoever started it, or with an error."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Final, NoReturn

import trio

from pdflow.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, PdflowError
from pdflow.protocol.values import MS
from pdflow_runtime.clock import now_ns
from pdflow_runtime.transports.base import TransportError

log = logging.getLogger(__name__)
AT_ONCE_NS: Final = 500 * MS
"""What comes within so long is one signal, sent to a process and to its group."""


async def drain_on_signal(drain: Callable[[], None], drain_s: float, scope: trio.CancelScope) -> None:
    """At the first SIGTERM or SIGINT drain; at a later one, or when that has lasted too long, cancel the scope."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            break
        log.info("told to stop: what has begun may end within %g s", drain_s)
        first_ns = now_ns()
        drain()
        with trio.move_on_after(drain_s):
            async for _ in signals:
                if now_ns() - first_ns > AT_ONCE_NS:
                    break
        log.warning("not everything has ended: stopping all the same")
        scope.cancel()


async def read_stdin(scope: trio.CancelScope, on_line: Callable[[bytes], None]) -> None:
    """Each line of it; when it ends, whoever had the other end is gone, and the scope is cancelled."""
    rest = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        async for data in stdin:
            *lines, rest = (rest + bytes(data)).split(b"\n")
            for line in lines:
                on_line(line)
    log.info("whoever started this has let go of it: stopping")
    scope.cancel()


def run_to_exit_code(run: Callable[[], Awaitable[None]]) -> int:
    """trio.run, and the exit code; what went wrong goes to stderr in the words that it has for people."""
    code = EXIT_DONE
    allow_many_files()
    try:
        trio.run(run)
    except* (PdflowError, TransportError, OSError) as errors:
        code = EXIT_BAD_INPUT
        for error in leaves(errors):
            sys.stderr.write(f"{error}\n")
            code = getattr(error, "exit_code", code)
    except* KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    return code


def end_process(code: int) -> NoReturn:
    """Leave as this code, without what native libraries do when a process exits: NIXL's libnl and the system's, where
    libibverbs1 is installed, crash there, and who ends by a crash is started again."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def allow_many_files() -> None:
    """A stream takes three at the router, and many systems allow a process 1,024 unless it asks for what it may have.
    Processes that are started from here have as many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors that groups of groups hold."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
