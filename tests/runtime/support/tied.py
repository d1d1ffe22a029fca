"""Becomes another program, which is told to stop (SIGTERM) when the process that has started it ends, however it does:

    python tied.py PARENT COMMAND...

Without, a test or a benchmark that is killed leaves its cluster behind, which serves on. Whatever the cluster has
started itself ends when its stdin does. (Set in a process of its own: between fork and exec Python may not run where
there are threads.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""linux/prctl.h. What is set outlives an exec."""


def tied(*command: str) -> list[str]:
    """The command that runs this one for as long as we live."""
    return [sys.executable, "-IS", str(Path(__file__).resolve()), str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("whoever started this has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
