"""Where prompts are tokenized: short ones at once, others in a few threads, of which one is kept free of long ones.

A long request waits for one of the threads that long ones may use, in the order of arrival. What waits is bounded by
its bytes: beyond that a request is refused with 429, before its memory is needed a second time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

import trio

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.process.malloc import return_freed_memory

INLINE_BYTES: Final = 4096
"""A longer request is tokenized in a thread: a millisecond's work, ten times what a thread costs."""
LONG_BYTES: Final = 64 << 10
"""A longer request takes tens of milliseconds, and leaves a thread to shorter ones."""
WAITING_BYTES: Final = 32 << 20
"""Of long requests, tokenized or waiting."""
TRIM_BYTES: Final = 512 << 10
"""After a longer request, freed memory is returned to the system."""

Made = TypeVar("Made")


class TokenizerPool:
    """Runs the tokenization of requests. Args: `threads`, at least 2, of which long requests use all but one;
    `waiting_bytes`, of long requests at once."""

    def __init__(self, threads: int | None = None, waiting_bytes: int = WAITING_BYTES) -> None:
        most = threads or min(4, max(2, os.cpu_count() or 2))
        self._threads: Final = trio.CapacityLimiter(most)
        self._long: Final = trio.CapacityLimiter(most - 1)
        self._most_bytes: Final = waiting_bytes
        self._long_bytes = 0

    async def run(self, nbytes: int, work: Callable[[], Made]) -> Made:
        """Return what `work` returns for a request of so many bytes. OpenAIError if too much waits already."""
        if nbytes <= INLINE_BYTES:
            return work()
        if nbytes <= LONG_BYTES:
            return await trio.to_thread.run_sync(work, limiter=self._threads)
        if self._long_bytes and self._long_bytes + nbytes > self._most_bytes:
            raise OpenAIError(429, "too many long prompts are waiting to be tokenized: try again later")
        self._long_bytes += nbytes
        try:
            async with self._long:
                return await trio.to_thread.run_sync(_long(work, nbytes), limiter=self._threads)
        finally:
            self._long_bytes -= nbytes


def _long(work: Callable[[], Made], nbytes: int) -> Callable[[], Made]:
    def run() -> Made:
        try:
            return work()
        finally:
            if nbytes > TRIM_BYTES:
                return_freed_memory()

    return run
