"""Tasks in processes of their own, each started as a new interpreter.

Not by multiprocessing's start methods: a fork copies the threads' locks of a notebook's kernel, and a spawn runs the
caller's script again, which then needs a guard. A worker ends with its master, in the middle of a task too, and one
that the system ends costs one row.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Self

from pdflow_sim.experiments.rows import SweepRow, SweepTask, row_of


class WorkerPool:
    """Processes that run tasks until the pool is closed. With one job, tasks run in this process."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._stack = ExitStack()
        self._idle: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers at once, in the middle of a task too."""
        self._stack.close()

    def rows(self, tasks: Sequence[SweepTask]) -> Generator[tuple[int, SweepRow], None, None]:
        """Yield each task's position and row, in the order in which they end.

        If it is left before its end, as by Ctrl-C, the pool must be closed: its workers are still busy.
        """
        if self._jobs <= 1:
            yield from ((position, row_of(task)) for position, task in enumerate(tasks))
            return
        self._idle += [Worker(self._stack) for _ in range(min(self._jobs, len(tasks)) - len(self._idle))]
        waiting = deque(enumerate(tasks))
        busy: dict[Connection, tuple[Worker, int]] = {}
        while waiting or busy:
            while waiting and self._idle:
                worker = self._idle.pop()
                position, task = waiting.popleft()
                worker.begin(task)
                busy[worker.pipe] = worker, position
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, position = busy.pop(pipe)
                row = worker.ended()
                self._idle.append(worker if row is not None else Worker(self._stack))
                yield position, row or SweepRow(error=worker.exit_description())


class Worker:
    """One process that runs one task at a time."""

    def __init__(self, stack: ExitStack) -> None:
        self.pipe, theirs = Pipe()
        here = "from pdflow_sim.experiments.workers import work"
        code = f"import sys; sys.path[:] = {sys.path!r}; {here}; work({theirs.fileno()})"
        # A session of its own: Ctrl-C reaches the master alone, which then knows what is done.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,  # ends with this process, however it ends
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        stack.callback(self._end)

    def begin(self, task: SweepTask) -> None:
        """Hand the process a task. If it has ended meanwhile, that is noticed when its row is asked for."""
        try:
            self.pipe.send(task)
        except BrokenPipeError:
            return

    def ended(self) -> SweepRow | None:
        """Return the row of its task; None if the process ended instead."""
        try:
            row: SweepRow = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return row

    def exit_description(self) -> str:
        """Describe how the process ended."""
        code = self._process.wait()
        return (
            f"the worker process was ended by signal {-code}"
            if code < 0
            else f"the worker process ended with exit code {code}"
        )

    def _end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.communicate()


def work(fileno: int) -> None:
    """Run tasks as they come, until the master closes the connection."""
    threading.Thread(target=_end_with_master, daemon=True).start()
    with Connection(fileno) as pipe:
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            pipe.send(row_of(task))


def _end_with_master() -> None:
    """End this process when its master ends. Nothing is ever written to stdin: when reading returns, the other end is
    closed.
    """
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
