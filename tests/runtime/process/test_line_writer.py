"""Lines are written by a thread, in order, and never stop who logs them."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from pdflow_runtime.process import line_writer
from pdflow_runtime.process.line_writer import LineWriter, pieces_of
from pdflow_runtime.process.logs import logging_to


def test_lines_go_to_a_pipe_whole() -> None:
    lines = [b"%d" % number * 700 + b"\n" for number in range(10)]
    pieces = pieces_of(lines)
    assert b"".join(piece for _, piece in pieces) == b"".join(lines)
    assert all(len(piece) <= 4096 for _, piece in pieces)
    assert [first for first, _ in pieces] == [0, 5]


def test_a_batch_that_is_being_written_and_the_lines_behind_it_are_all_written_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_writer, "LAST_S", 30.0)
    monkeypatch.setattr(line_writer, "FLUSH_S", 0.0)
    writing, write = threading.Event(), os.write
    received: list[bytes] = []

    def noted(descriptor: int, data: bytes) -> int:
        writing.set()
        return write(descriptor, data)

    monkeypatch.setattr("pdflow_runtime.process.line_writer.os.write", noted)
    reader, descriptor = os.pipe()
    lines = [b"%05d" % number * 20 + b"\n" for number in range(3000)]

    def read() -> None:
        with os.fdopen(reader, "rb") as file:
            received.append(file.read())

    reading = threading.Thread(target=read)
    with LineWriter(descriptor, lambda _: pytest.fail("a line is lost")) as writer:
        for line in lines[:2000]:
            writer.add(line)
        assert writing.wait(10)
        for line in lines[2000:]:
            writer.add(line)
        reading.start()
    os.close(descriptor)
    reading.join(10)
    assert received == [b"".join(lines)]


def test_a_full_disk_loses_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[int] = []
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with LineWriter(descriptor, lost.append) as writer:
        for _ in range(3):
            writer.add(b"a line\n")
    os.close(descriptor)
    assert sum(lost) == 3
    assert caplog.text.count("the log cannot be written") == 1


def test_a_reader_that_stands_still_stops_nobody_who_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is full, the writer's thread waits in it, and all that is logged is dropped and counted."""
    monkeypatch.setattr(line_writer, "WAITING_BYTES", 200_000)
    monkeypatch.setattr(line_writer, "LAST_S", 0.1)
    lost: list[int] = []
    reader, descriptor = os.pipe()
    with LineWriter(descriptor, lost.append) as writer, logging_to(writer, "router"):
        for number in range(4000):
            writer.add(b"x" * 100 + b"\n")
            logging.getLogger("test").warning("number %d", number)
    assert sum(lost) > 1000
    os.close(reader)
    writer._thread.join(10)
    os.close(descriptor)


def test_what_is_logged_is_a_line_of_the_component(tmp_path: Path) -> None:
    path, before = tmp_path / "log", logging.getLogger().handlers
    with path.open("wb") as file, LineWriter(file.fileno(), lambda _: None) as writer, logging_to(writer, "router"):
        logging.getLogger("test").warning("two\nlines \udc80")
    assert path.read_text().endswith('level=warn component=router logger=test msg="two\\nlines \\udc80"\n')
    assert logging.getLogger().handlers is before
