"""The processes of an instance, through /proc: which they are, their CPU time and memory, signals to all of them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Return the process and all that it started, parents first. Empty where it has ended."""
    found, queue = [], [pid]
    while queue:
        one = queue.pop(0)
        with suppress(OSError):
            tasks = list(Path(f"/proc/{one}/task").iterdir())
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
            found.append(one)
            queue.extend(children)
    return found


def titles(pids: list[int]) -> dict[int, str]:
    """Return what each process calls itself: vLLM names its engine core and its workers."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds, user and system, that these processes have taken so far."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def memory_bytes(pids: list[int]) -> int:
    """Return the proportional set size of these processes together."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Send the signal to each process that still runs."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def running(pids: list[int]) -> list[int]:
    """Return those that have not ended: a process that waits to be reaped has."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
    return found
