"""The memory of this process and the CPUs that it may use.

Linux, macOS and Windows differ here: only POSIX has `resource`, only Linux has /proc and `sched_getaffinity`, and macOS
counts ru_maxrss in bytes where Linux counts KiB. Where the system does not report memory, 0 is returned, so that a
memory limit never stops a search.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path


def used_bytes() -> int:
    """Return the memory that this process holds; without /proc, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_bytes()
    return pages * mmap.PAGESIZE


def peak_bytes() -> int:
    """Return the peak memory of this process; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use; without CPU affinity, of all CPUs."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
