"""Logs: one line each, on stderr, as key=value pairs that a person reads and a machine takes apart."""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

LEVELS: Final = {logging.WARNING: "warn", logging.CRITICAL: "fatal"}


class Pairs(logging.Formatter):
    """A formatter of records as key=value pairs. Args: `who`, the component that writes."""

    def __init__(self, who: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self.who: Final = who

    def format(self, record: logging.LogRecord) -> str:
        level = LEVELS.get(record.levelno, record.levelname.lower())
        line = (
            f"time={self.formatTime(record, self.datefmt)}.{int(record.msecs):03} level={level} who={self.who} "
            f"from={record.name} msg={json.dumps(record.getMessage(), ensure_ascii=False)}"
        )
        if record.exc_info:
            line += f" error={json.dumps(self.formatException(record.exc_info))}"
        return line


def log_to_stderr(who: str, level: int = logging.INFO) -> None:
    """Write everything that is logged in this process to stderr, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Pairs(who))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
