"""glibc's malloc in a process that must not stay as large as its largest request was: the router's.

By default glibc raises the size from which it maps memory by itself, and returns at once, to that of the largest piece
that was freed: after one body of 15 MB, such bodies lie in a heap that rarely shrinks. Each thread has its own heap.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from functools import cache
from pathlib import Path
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
GROWN_BYTES: Final = 16 << 20
"""What makes a collection worth its time, in which nothing else runs: 5 to 40 ms."""


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
    returned only by a trim. Runs until it is cancelled.

    If the process has grown nevertheless, the garbage collector runs first: a few objects in a circle may hold the
    bodies of large requests, and are too few for it to run by itself.
    """
    collected = resident_bytes()
    while True:
        await trio.sleep(TRIM_EVERY_S)
        return_freed_memory()
        if resident_bytes() > collected + GROWN_BYTES:
            gc.collect()
            return_freed_memory()
            collected = resident_bytes()
        collected = min(collected, resident_bytes())


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * mmap.PAGESIZE


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        assert library.mallopt
        assert library.malloc_trim
    except (AttributeError, OSError):
        return None
    return library
