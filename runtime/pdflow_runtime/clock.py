"""The one place of the live world that reads a clock: trio's, so that tests can put their own in its place."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from pdflow.protocol.values import Instant, S

READINGS: Final = 16
HELD_UP_S: Final = 0.5
"""Whoever wakes up so long after a deadline did not run meanwhile."""

T = TypeVar("T")


def now_ns() -> Instant:
    """This process's monotonic time. Comparable with nothing in any other process."""
    return int(trio.current_time() * S)


def stopwatch_ns() -> int:
    """Monotonic, also where trio does not run: to tell how long something took."""
    return time.monotonic_ns()


def clock_for_threads() -> Callable[[], Instant]:
    """What says the same in a thread that is not trio's. To be asked for in trio's."""
    read = trio.lowlevel.current_clock().current_time
    return lambda: int(read() * S)


def deadline_of(at: Instant) -> float:
    """The same instant as trio counts it."""
    return at / S


async def within(seconds: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """What comes of it, or TooSlowError. If it was this process that did not run, the time says nothing of others,
    whose answer may lie here unread: then it is tried once more."""
    until = trio.current_time() + seconds
    with trio.move_on_at(until):
        return await attempt()
    if trio.current_time() - until < HELD_UP_S:
        raise trio.TooSlowError
    with trio.fail_after(seconds):
        return await attempt()


def wall_offset_ns() -> int:
    """What `now_ns` lacks to be the wall's time, now: processes of one host are compared by it. Of several readings the
    one in which the least time went by: whoever is put aside between two clocks is wrong by milliseconds."""
    readings = []
    for _ in range(READINGS):
        before, wall, after = now_ns(), time.time_ns(), now_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def wall_ns() -> int:
    """Nanoseconds since 1970, of this host: to tell which of two lives began later."""
    return time.time_ns()


def wall_s() -> int:
    """Seconds since 1970, for people: what OpenAI's answers call `created`."""
    return int(time.time())
