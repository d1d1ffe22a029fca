"""glibc's malloc in a process that must not stay as large as its largest request was: the router's.

By default glibc raises the size from which it maps memory by itself, and returns at once, to that of the largest piece
that was freed: after one body of 15 MB, such bodies lie in a heap that rarely shrinks. Each thread has its own heap.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import trio

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""From malloc.h."""
MAPPED_BYTES: Final = 256 << 10
TRIMMED_BYTES: Final = 1 << 20
ARENAS: Final = 2
TRIM_EVERY_S: Final = 10.0
"""A trim takes a few milliseconds."""


def limit_heap() -> None:
    """Return large pieces to the system when they are freed, and use few heaps; no-op with another C library."""
    library = _library()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, TRIMMED_BYTES)
        library.mallopt(M_ARENA_MAX, ARENAS)


def return_freed_memory() -> None:
    """Return what is free in all heaps to the system; no-op with another C library."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


async def keep_returning() -> None:
    """Return freed memory every few seconds: free pieces lie between those of connections that are still open, and are
    returned only by a trim. Runs until it is cancelled."""
    while True:
        await trio.sleep(TRIM_EVERY_S)
        return_freed_memory()


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        assert library.mallopt
        assert library.malloc_trim
    except (AttributeError, OSError):
        return None
    return library
