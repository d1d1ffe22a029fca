"""Settings of glibc's malloc that keep freed memory in the process: by default glibc returns large pieces to the kernel
at once.

A step's scores and contexts are megabytes, each for a moment. To have their pages anew, zeroed, each time takes longer
than to compute with them: 32 sequences at 1,000 tokens take 2.3 times as long (benchmarks/engine_speed.py).
"""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_MAX: Final = -4
M_ARENA_MAX: Final = -8
"""From malloc.h."""


def keep_what_is_freed() -> None:
    """Keep freed memory for the whole process, which is an engine's: it stays as large as it once had to be."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_ARENA_MAX, 1)
