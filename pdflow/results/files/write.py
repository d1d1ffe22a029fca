"""Result files on disk, written whole or not at all.

Each file is written beside its place under another name and moved there once it is complete, so that a reader, a
killed run or a full disk never leaves half a file under the name that tools look for. Large files are streamed: memory
does not grow with them. What stands in them is decided in `bench_json`, `records` and `events`.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.results.records import Records

RESULTS_NAME = "results.json"
REQUESTS_NAME = "requests.jsonl"
EVENTS_NAME = "events.jsonl"
TIMELINE_NAME = "timeline.json.gz"
SEEDS_NAME = "seeds.json"
PAGE_NAME = "report.html"
SCENARIO_NAME = "scenario.toml"

_FLUSH_BYTES = 1 << 18
_ITEMS_AT_ONCE = 256


class OutputError(PdflowError):
    """A result file could not be written; nothing of it is left behind."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, path: Path, cause: OSError) -> None:
        self.path = path
        why = cause.strerror or str(cause)
        super().__init__(
            f"{path}: cannot write: {why}. The file was not written; choose another --out, or free space there."
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` only if the block ends without an exception. Raises OutputError where the disk
    refuses."""
    temporary = path.with_name(path.name + ".part")
    try:
        with guarding(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(temporary, "wb", buffering=_FLUSH_BYTES)  # noqa: SIM115 (closed below, where its error is ours)
        try:
            yield file
            with guarding(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # after a failed write close() tries, and fails, again
                file.close()
        with guarding(path):
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def guarding(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal into an error for a person."""
    try:
        yield
    except OSError as cause:
        raise OutputError(path, cause) from cause


def make_folder(path: Path) -> None:
    """Make the folder for a run's files, before the run. Raises OutputError where it cannot be made."""
    with guarding(path):
        path.mkdir(parents=True, exist_ok=True)


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write results.json, one key per line; iterators among the values are written as lists without being held."""
    with replacing(path) as file, guarding(path):
        file.write(b"{")
        for position, (key, value) in enumerate(content.items()):
            file.write(b",\n" if position else b"\n")
            file.write(msgspec.json.encode(key) + b": ")
            if isinstance(value, Iterator):
                _write_list(file, value)
            elif isinstance(value, dict):
                file.write(msgspec.json.format(msgspec.json.encode(value), indent=2))
            else:
                file.write(msgspec.json.encode(value))
        file.write(b"\n}\n")


def _write_list(file: BinaryIO, items: Iterator[Any]) -> None:
    encode = msgspec.json.Encoder().encode
    file.write(b"[")
    batch: list[Any] = []
    separator = b""
    for item in items:
        batch.append(item)
        if len(batch) == _ITEMS_AT_ONCE:
            file.write(separator + encode(batch)[1:-1])
            separator = b","
            batch.clear()
    if batch:
        file.write(separator + encode(batch)[1:-1])
    file.write(b"]")


def request_lines(records: Records) -> Iterator[bytes]:
    """Yield the lines of requests.jsonl, in the order of the workload, each ended by a newline."""
    encode = msgspec.json.Encoder().encode
    for request in range(len(records)):
        yield encode(records.record(request)) + b"\n"


def write_requests(path: Path, records: Records) -> None:
    """Write requests.jsonl: one record per request with the end of every stage, null where it was not reached."""
    with replacing(path) as file, guarding(path):
        file.writelines(request_lines(records))


def write_timeline(
    path: Path, events: Iterable[Mapping[str, Any]], other_data: Mapping[str, Any] | None = None
) -> None:
    """Write timeline.json.gz: a Chrome trace, one event a line, with `other_data`. Equal events give equal bytes."""
    encode = msgspec.json.Encoder().encode
    with replacing(path) as file, guarding(path), gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        packed.write(b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n' % encode(other_data or {}))
        packed.writelines((b",\n" if position else b"") + encode(event) for position, event in enumerate(events))
        packed.write(b"\n]}\n")


def write_text(path: Path, text: str) -> None:
    """Write report.html, or scenario.toml. Bytes of the command line that are not the locale's stay as they are."""
    with replacing(path) as file, guarding(path):
        file.write(text.encode("utf-8", "surrogateescape"))


def remove_file(path: Path) -> None:
    """Remove a file of an earlier run, if there is one. Raises OutputError."""
    with guarding(path):
        path.unlink(missing_ok=True)


def read_requests(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the records of a requests.jsonl, one at a time."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with open(path, "rb") as file:
        for line in file:
            yield decode(line)
