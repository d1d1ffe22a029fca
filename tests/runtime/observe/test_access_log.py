"""The access log: one line for each request, whatever the client sends, and never in the way of serving."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import trio

from pdflow_runtime.clock import utc_text
from pdflow_runtime.http.ended import EndedRequest
from pdflow_runtime.observe import access_log
from pdflow_runtime.observe.access_log import AccessLine, AccessLog, line_of, pieces_of, safe, text_of
from pdflow_runtime.observe.passing_answers import EndedAnswer
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


def test_lines_go_to_a_pipe_whole() -> None:
    lines = [b"%d" % number * 700 + b"\n" for number in range(10)]
    pieces = pieces_of(lines)
    assert b"".join(piece for _, piece in pieces) == b"".join(lines)
    assert all(len(piece) <= 4096 for _, piece in pieces)
    assert [first for first, _ in pieces] == [0, 5]


@pytest.mark.trio
async def test_lines_are_written_soon_and_at_the_end(tmp_path: Path) -> None:
    lost: list[int] = []
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    log = AccessLog("json", "tiny", lost.append, descriptor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        log.add(ended(details=record()))
        with trio.fail_after(5):
            while not path.read_bytes():
                await trio.sleep(0.01)
        log.add(ended(path="/nonsense", status=404))
        log.add(ended(path="/health", status=200))
        log.add(ended(path="/health", status=503))
        nursery.cancel_scope.cancel()
    os.close(descriptor)
    lines = [msgspec.json.decode(line, type=AccessLine) for line in path.read_bytes().splitlines()]
    assert [(line.path, line.status) for line in lines] == [
        ("/v1/completions", 200),
        ("/nonsense", 404),
        ("/health", 503),
    ]
    assert lost == []


@pytest.mark.trio
async def test_a_full_disk_loses_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[int] = []
    descriptor = os.open("/dev/full", os.O_WRONLY)
    log = AccessLog("text", "tiny", lost.append, descriptor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        for _ in range(3):
            log.add(ended())
        with trio.fail_after(5):
            while not lost:
                await trio.sleep(0.01)
        log.add(ended())
        nursery.cancel_scope.cancel()
    os.close(descriptor)
    assert sum(lost) == 4
    assert caplog.text.count("access log cannot be written") == 1


@pytest.mark.trio
async def test_a_reader_that_stands_still_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is full, its thread waits, and the router ends all the same."""
    monkeypatch.setattr(access_log, "WAITING_BYTES", 200_000)
    monkeypatch.setattr(access_log, "LAST_S", 0.1)
    lost: list[int] = []
    reader, writer = os.pipe()
    log = AccessLog("text", "tiny", lost.append, writer)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.run)
            for number in range(4000):
                log.add(ended())
                if number % 100 == 0:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert sum(lost) > 1000
    os.close(reader)
    await trio.sleep(0.05)
    os.close(writer)


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
    line = line_of(ended(details=of_several([record(), broken, record()])), "tiny", NOON_NS)
    assert (line.request, line.outcome, line.code, line.attempts) == ("77", "failed", "peer_dead", 5)
    assert (line.prompt_tokens, line.output_tokens, line.ttft_ms) == (27, 120, 50.0)
