"""The only module of the live runtime that reads a clock: trio's, so that tests can put their own in its place."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from pdflow.protocol.values import Instant, S

READINGS: Final = 16
HELD_UP_S: Final = 0.5
"""A process that wakes up so long after a deadline did not run meanwhile."""

stopwatch_ns: Final = time.monotonic_ns
"""Returns a monotonic time, also where trio does not run: to measure how long something took."""

T = TypeVar("T")


def now_ns() -> Instant:
    """This process's monotonic time. Comparable with nothing in any other process."""
    return int(trio.current_time() * S)


def clock_for_threads() -> Callable[[], Instant]:
    """Return a function that reads the clock of `now_ns` in a thread that is not trio's. Call this one in trio's
    thread."""
    read = trio.lowlevel.current_clock().current_time
    return lambda: int(read() * S)


def deadline_of(at: Instant) -> float:
    """Return this instant as trio counts it, in seconds."""
    return at / S


async def within(seconds: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """Await `attempt` for at most `seconds`, and return its result. Raises TooSlowError. If it was this process that
    did not run until long after the deadline, the time says nothing of its peers, whose answer may be here unread:
    `attempt` is then tried once more."""
    until = trio.current_time() + seconds
    with trio.move_on_at(until):
        return await attempt()
    if trio.current_time() - until < HELD_UP_S:
        raise trio.TooSlowError
    with trio.fail_after(seconds):
        return await attempt()


def wall_offset_ns() -> int:
    """Return what must be added to `now_ns` to get the wall clock's time: times of processes of one host are compared
    by it. Of several readings the one that took the least time is used: a process that is descheduled between two
    clocks is wrong by milliseconds."""
    readings = []
    for _ in range(READINGS):
        before, wall, after = now_ns(), time.time_ns(), now_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def wall_ns() -> int:
    """Return nanoseconds since 1970, by this host's clock: to decide which of two incarnations began later."""
    return time.time_ns()


def wall_s() -> int:
    """Return seconds since 1970, for people: what OpenAI's answers call `created`."""
    return int(time.time())


def cpu_ns() -> int:
    """Return the CPU time that this process has used."""
    return time.process_time_ns()


def utc_text(at_ns: int) -> str:
    """Return this time, in ns since 1970, as ISO 8601 writes it in UTC."""
    seconds, rest_ns = divmod(at_ns, S)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest_ns // 1_000_000:03}Z"
