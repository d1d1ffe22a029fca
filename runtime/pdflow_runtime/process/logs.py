"""Logs: one line each, on stderr, as key=value pairs that a person reads and a machine takes apart."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pdflow_runtime.process.line_writer import LineWriter

LEVELS: Final = {logging.WARNING: "warn", logging.CRITICAL: "fatal"}


class Pairs(logging.Formatter):
    """A formatter of records as key=value pairs. Args: `component`, whose process writes them."""

    def __init__(self, component: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self.component: Final = component

    def format(self, record: logging.LogRecord) -> str:
        level = LEVELS.get(record.levelno, record.levelname.lower())
        line = (
            f"time={self.formatTime(record, self.datefmt)}.{int(record.msecs):03} level={level} "
            f"component={self.component} logger={record.name} msg={json.dumps(record.getMessage(), ensure_ascii=False)}"
        )
        if record.exc_info:
            line += f" error={json.dumps(self.formatException(record.exc_info))}"
        return line


def log_to_stderr(component: str, level: int = logging.INFO) -> None:
    """Write everything that is logged in this process to stderr, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Pairs(component))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)


class Queued(logging.Handler):
    """Gives what is logged to a writer, so that the thread that logs never waits for who reads the log."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer: Final = writer

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.add(self.format(record).encode(errors="backslashreplace") + b"\n")


@contextmanager
def logging_to(writer: LineWriter, component: str) -> Iterator[None]:
    """Give everything that is logged in this process to the writer while the context is open."""
    root = logging.getLogger()
    before = root.handlers
    queued = Queued(writer)
    queued.setFormatter(Pairs(component))
    root.handlers = [queued]
    try:
        yield
    finally:
        root.handlers = before
