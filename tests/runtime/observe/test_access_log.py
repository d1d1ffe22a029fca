"""The access log: one line for each request, whatever the client sends, and never in the way of serving."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdflow_runtime.clock import utc_text
from pdflow_runtime.http.ended import EndedRequest
from pdflow_runtime.observe.access_log import AccessLine, AccessLog, line_of, safe, text_of
from pdflow_runtime.observe.passing_answers import EndedAnswer
from pdflow_runtime.process.line_writer import LineWriter
from pdflow_runtime.router.call_record import CallRecord, of_several

MS = 1_000_000
NOON_NS = 1_700_000_000_123 * MS


def ended(path: str = "/v1/completions", status: int = 200, details: object = None, given_id: str = "") -> EndedRequest:
    return EndedRequest("192.0.2.7", "POST", path, status, 1000 * MS, 1250 * MS, given_id, details)


def record() -> CallRecord:
    return CallRecord(
        number=77,
        prompt_tokens=9,
        prefill="prefill-0",
        decode="decode-1",
        outcome="completed",
        code="none",
        attempts=2,
        resumed=True,
        first_ns=1100 * MS,
        stages_ms={"p_queue": 1.5, "transfer": 2.0},
        answer=EndedAnswer(40, "length"),
    )


def test_the_line_of_an_answer() -> None:
    line = line_of(ended(details=record(), given_id="mine"), "tiny", NOON_NS)
    assert msgspec.to_builtins(line) == {
        "time": "2023-11-14T22:13:20.123Z",
        "client": "192.0.2.7",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "completed",
        "total_ms": 250.0,
        "id": "mine",
        "request": "77",
        "model": "tiny",
        "prefill": "prefill-0",
        "decode": "decode-1",
        "attempts": 2,
        "resumed": True,
        "prompt_tokens": 9,
        "output_tokens": 40,
        "finish_reason": "length",
        "ttft_ms": 100.0,
        "stages_ms": {"p_queue": 1.5, "transfer": 2.0},
    }
    text = text_of(line).decode()
    assert text.startswith("time=2023-11-14T22:13:20.123Z level=info component=router logger=access client=192.0.2.7 ")
    assert text.endswith(
        " resumed=true prompt_tokens=9 output_tokens=40 finish_reason=length ttft_ms=100.0 "
        "stages_ms=p_queue:1.5,transfer:2"
    )


@pytest.mark.parametrize(
    ("status", "outcome", "code"), [(200, "answered", ""), (400, "refused", "http_400"), (0, "cancelled", "")]
)
def test_a_request_that_no_engine_gets(status: int, outcome: str, code: str) -> None:
    line = line_of(ended(status=status), "tiny", NOON_NS)
    assert (line.outcome, line.code, line.model) == (outcome, code, "")


@pytest.mark.parametrize(
    "hostile", ["a\nb", "a\r\n{}", "\x1b[2J", "\x9b1m", "\u2028", 'a" outcome=completed b="', "\udc80"]
)
def test_no_client_writes_lines_or_fields(hostile: str) -> None:
    request = ended(path="/" + hostile, status=404, given_id=hostile)
    line = line_of(request, "tiny", NOON_NS)
    for encoded in (text_of(line), msgspec.json.encode(line)):
        assert encoded.decode().isprintable()
    assert msgspec.json.decode(msgspec.json.encode(line), type=AccessLine) == line
    text = text_of(line).decode()
    assert text.count(" outcome=") - text.count('\\" outcome=') == 1
    assert len(safe("x" * 10_000)) < 300


def test_a_probe_is_logged_only_if_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file, LineWriter(file.fileno(), lambda _: None) as writer:
        log = AccessLog("json", "tiny", writer)
        log.add(ended(details=record()))
        log.add(ended(path="/nonsense", status=404))
        log.add(ended(path="/health", status=200))
        log.add(ended(path="/health", status=503))
    lines = [msgspec.json.decode(line, type=AccessLine) for line in path.read_bytes().splitlines()]
    assert [(line.path, line.status) for line in lines] == [
        ("/v1/completions", 200),
        ("/nonsense", 404),
        ("/health", 503),
    ]


def test_the_time_is_utc() -> None:
    assert utc_text(0) == "1970-01-01T00:00:00.000Z"


def test_a_request_for_several_answers_has_one_line() -> None:
    broken = record()
    broken.outcome, broken.code, broken.number, broken.attempts, broken.first_ns = (
        "failed",
        "peer_dead",
        78,
        1,
        1050 * MS,
    )
    cancelled = record()
    cancelled.outcome, cancelled.code = "cancelled", "cancelled"
    line = line_of(ended(details=of_several([record(), cancelled, broken])), "tiny", NOON_NS)
    assert (line.request, line.outcome, line.code, line.attempts) == ("77", "failed", "peer_dead", 5)
    assert (line.prompt_tokens, line.output_tokens, line.ttft_ms) == (27, 120, 50.0)
