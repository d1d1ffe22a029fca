"""The router's access log: a line for each request that has ended, as text or as JSON, on stderr.

Lines are written by a thread (`process/line_writer.py`), so that serving never waits for them. Nothing that a client
sends can begin a line, or be taken for another field. Prompts and answers are not logged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from pdflow.scenario.schema.serve import AccessLogFormat
from pdflow_runtime.clock import utc_text, wall_ns
from pdflow_runtime.http.ended import EndedRequest
from pdflow_runtime.process.line_writer import LineWriter
from pdflow_runtime.process.logs import logging_to
from pdflow_runtime.router.call_record import CallRecord

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
    """The access log of one router. Args: `form`: "text" or "json"; `model`: the name of the model; `writer` writes the
    lines."""

    def __init__(self, form: AccessLogFormat, model: str, writer: LineWriter) -> None:
        self.encode: Final = msgspec.json.encode if form == "json" else text_of
        self.model: Final = model
        self.writer: Final = writer

    def add(self, ended: EndedRequest) -> None:
        """Log the request, soon."""
        if ended.path in QUIET and 200 <= ended.status < 400:
            return
        self.writer.add(self.encode(line_of(ended, self.model, wall_ns())) + b"\n")


@contextmanager
def logged(form: AccessLogFormat, model: str, dropped: Callable[[int], None]) -> Iterator[AccessLog | None]:
    """Write the router's access log while the context is open. All that the router logs then goes through the writer
    of that log: clients can fill stderr, and nothing may wait for its reader."""
    if form == "off":
        yield None
        return
    with LineWriter(sys.stderr.fileno(), dropped) as writer, logging_to(writer, "router"):
        yield AccessLog(form, model, writer)


def text_of(line: AccessLine) -> bytes:
    """Return the line as key=value pairs, as the other lines of the log."""
    values = msgspec.to_builtins(line)
    begin = f"time={values.pop('time')} level=info component=router logger=access"
    return " ".join((begin, *(f"{name}={_shown(value)}" for name, value in values.items()))).encode()


def _shown(value: object) -> str:
    match value:
        case dict():
            return ",".join(f"{stage}:{ms:g}" for stage, ms in value.items())
        case str():
            return value if _is_plain(value) else json.dumps(value)
        case bool():
            return str(value).lower()
        case _:
            return str(value)


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
