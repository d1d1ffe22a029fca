"""The end of a component's process: ordered by a signal, at the end of its supervisor, or by an error."""

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
"""Signals within so long are one signal, sent to a process and to its group."""


async def drain_on_signal(drain: Callable[[], None], drain_s: float, scope: trio.CancelScope) -> None:
    """At the first SIGTERM or SIGINT drain; at a later one, or when that has lasted too long, cancel the scope."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            break
        log.info("shutting down; draining requests for up to %g s", drain_s)
        first_ns = now_ns()
        drain()
        with trio.move_on_after(drain_s):
            async for _ in signals:
                if now_ns() - first_ns > AT_ONCE_NS:
                    break
        log.warning("drain timed out, or a second signal came: stopping now; requests that are still open fail")
        scope.cancel()


async def read_stdin(scope: trio.CancelScope, on_line: Callable[[bytes], None]) -> None:
    """Call `on_line` with each line of stdin; when stdin ends, the process at its other end is gone, and the scope is
    cancelled."""
    rest = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        async for data in stdin:
            *lines, rest = (rest + bytes(data)).split(b"\n")
            for line in lines:
                on_line(line)
    log.info("parent process exited or closed stdin; shutting down")
    scope.cancel()


def run_to_exit_code(run: Callable[[], Awaitable[None]]) -> int:
    """Run the function under trio, and return the exit code; errors go to stderr in the words that they have for
    people."""
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


def exit_text(returncode: int | None) -> str:
    """Return how a process ended, as text for people. `returncode` is that of Popen: negative for a signal."""
    if returncode is None or returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"exited: killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:
        return f"exited: killed by signal {-returncode}"


def end_process(code: int) -> NoReturn:
    """Exit with this code, without what native libraries do when a process exits: NIXL's libnl and the system's, where
    libibverbs1 is installed, crash there, and a process that crashes is started again."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def allow_many_files() -> None:
    """Raise the limit of file descriptors to the most that this process may have: a stream takes three at the router,
    and many systems allow 1,024 unless a process asks for more. Child processes inherit the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors that groups of groups hold."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
