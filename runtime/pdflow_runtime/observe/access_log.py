"""The router's access log: a line for each request that has ended, as text or as JSON, on stderr.

Lines are collected and written by a thread, so that a slow or full disk, or a reader that stands still, does not stop
serving: what cannot be written is dropped and counted. Nothing that a client sends can begin a line, or be taken for
another field. Prompts and answers are not logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from pdflow.scenario.schema.serve import AccessLogFormat
from pdflow_runtime.clock import utc_text, wall_ns
from pdflow_runtime.http.ended import EndedRequest
from pdflow_runtime.router.call_record import CallRecord

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
"""How long a line waits for others."""
WAITING_BYTES: Final = 4 << 20
"""Of lines that are not written yet: further ones are dropped."""
LAST_S: Final = 1.0
"""Time for the last lines, when the router ends."""
PIPE_BYTES: Final = 4096
"""What a pipe takes in one piece (PIPE_BUF): lines of several processes are not mixed up in it."""
LONGEST: Final = 256
"""Characters of a path or a client's id that are logged."""
MS: Final = 1e6
"""ns"""
QUIET: Final = ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/metrics/cluster", "/admin/engines")
"""Paths whose requests are only logged if they fail: probes, scrapes, and the engines' own reports."""


class AccessLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a line, in their order. Those that a request does not have are left out."""

    time: str
    """When the request had ended: UTC."""
    client: str
    method: str
    path: str
    status: int
    """0: the client was gone before an answer began."""
    outcome: str
    """completed, failed or cancelled; refused: no engine got it; answered: by the router itself."""
    total_ms: float
    id: str = ""
    """The client's x-request-id."""
    key: str = ""
    """The name of the client's API key."""
    code: str = ""
    """Why it failed, as in `pdflow_router_errors_total`."""
    request: str = ""
    """The router's number, with which the names of its attempts begin."""
    model: str = ""
    prefill: str = ""
    decode: str = ""
    attempts: int = 0
    resumed: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    ttft_ms: float = 0.0
    """Until the first piece of the answer: of one that is not streamed, all of it."""
    stages_ms: dict[str, float] = {}
    """As the engines measured them (`pdflow_request_stage_seconds`)."""


def line_of(ended: EndedRequest, model: str, at_ns: int) -> AccessLine:
    """Return the line of a request that ended at this time, in ns since 1970."""
    record = ended.details if isinstance(ended.details, CallRecord) else None
    line = AccessLine(
        time=utc_text(at_ns),
        client=safe(ended.client),
        method=safe(ended.method),
        path=safe(ended.path),
        status=ended.status,
        outcome=_outcome(ended.status) if record is None else record.outcome,
        total_ms=_ms(ended.ended_ns - ended.begun_ns),
        id=safe(ended.given_id),
        key=safe(ended.key_name),
        code=f"http_{ended.status}" if record is None and ended.status >= 400 else "",
    )
    if record is None:
        return line
    return msgspec.structs.replace(
        line,
        code="" if record.outcome == "completed" else record.code,
        request=str(record.number),
        model=model,
        prefill=record.prefill,
        decode=record.decode,
        attempts=record.attempts,
        resumed=record.resumed,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.answer.tokens,
        finish_reason=record.answer.reason,
        ttft_ms=_ms(record.first_ns - ended.begun_ns) if record.first_ns else 0.0,
        stages_ms=record.stages_ms,
    )


class AccessLog:
    """The access log of one router. Args: `form`: "text" or "json"; `model`: the name of the model; `dropped` is called
    with the number of lines that could not be written; `descriptor`: where lines are written."""

    def __init__(
        self, form: AccessLogFormat, model: str, dropped: Callable[[int], None], descriptor: int | None = None
    ) -> None:
        self.encode: Final = msgspec.json.encode if form == "json" else text_of
        self.model: Final = model
        self.dropped: Final = dropped
        self.descriptor: Final = sys.stderr.fileno() if descriptor is None else descriptor
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._torn = False
        """Whether the last line was written in part."""
        self._failed = False
        self._news = trio.Event()

    def add(self, ended: EndedRequest) -> None:
        """Log the request, soon."""
        if ended.path in QUIET and 200 <= ended.status < 400:
            return
        line = self.encode(line_of(ended, self.model, wall_ns())) + b"\n"
        if self._waiting_bytes + len(line) > WAITING_BYTES:
            self.dropped(1)
            return
        self._lines.append(line)
        self._waiting_bytes += len(line)
        self._news.set()

    async def run(self) -> None:
        """Write lines until cancelled, and then those that are left."""
        try:
            while True:
                await self._news.wait()
                await trio.sleep(FLUSH_S)
                self._news = trio.Event()
                await self._flush()
        finally:
            with trio.move_on_after(LAST_S, shield=True):
                await self._flush()

    async def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            lost, reason = await trio.to_thread.run_sync(self._write, lines, abandon_on_cancel=True)
            self._waiting_bytes -= sum(map(len, lines))
            if lost:
                self.dropped(lost)
                if not self._failed:
                    log.warning("the access log cannot be written, and lines are dropped: %s", reason)
            self._failed = bool(lost)

    def _write(self, lines: list[bytes]) -> tuple[int, str]:
        """Write the lines, in a thread. Returns how many are lost, and why."""
        for number, piece in pieces_of(lines):
            data = b"\n" + piece if self._torn else piece
            try:
                while data:
                    written = os.write(self.descriptor, data)
                    self._torn = written < len(data)
                    data = data[written:]
            except OSError as error:
                return len(lines) - number, error.strerror or str(error)
        return 0, ""


def pieces_of(lines: list[bytes]) -> list[tuple[int, bytes]]:
    """Join lines to pieces that a pipe takes at once; with the number of the first line of each."""
    pieces: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines):
        if pieces and len(pieces[-1][1]) + len(line) <= PIPE_BYTES:
            pieces[-1] = pieces[-1][0], pieces[-1][1] + line
        else:
            pieces.append((number, line))
    return pieces


def text_of(line: AccessLine) -> bytes:
    """Return the line as key=value pairs, as the other lines of the log."""
    pairs = ["level=info component=router logger=access"]
    for name, value in msgspec.to_builtins(line).items():
        match value:
            case dict():
                pairs.append(f"{name}=" + ",".join(f"{stage}:{ms:g}" for stage, ms in value.items()))
            case str():
                pairs.append(f"{name}={value if _is_plain(value) else json.dumps(value)}")
            case bool():
                pairs.append(f"{name}={str(value).lower()}")
            case _:
                pairs.append(f"{name}={value}")
    pairs[0], pairs[1] = pairs[1], pairs[0]
    return " ".join(pairs).encode()


def safe(text: str) -> str:
    """Return the text without characters that end a line or control a terminal: they are escaped."""
    shown = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    return shown if shown.isprintable() else shown.encode("unicode_escape").decode("ascii")


def _is_plain(text: str) -> bool:
    return text.isascii() and not any(character in ' "=\\' for character in text)


def _outcome(status: int) -> str:
    if not status:
        return "cancelled"
    return "answered" if status < 400 else "refused"


def _ms(lasted_ns: int) -> float:
    return round(lasted_ns / MS, 3)
