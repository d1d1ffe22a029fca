"""Merges the events files that the processes of one run have written, each its own, into one events.jsonl.

A process writes `NAME.events.jsonl`, line by line, so one that is killed leaves what it had written. Lines are merged
in the order of time: that of `at`, if they have it, which is then left out, else that of `t`. `at` is the wall clock's
time of this host in ns, where an endpoint's own clock is another: inside vLLM a scheduler's stands still while its
engine does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdflow.results.files.events import EventsHeader
from pdflow.results.files.write import EVENTS_NAME, replacing

_AT = re.compile(rb'^\{"at":(\d+),')


class Turn(NamedTuple):
    """The lines of an event and of its effects, with what orders them: the time, then the file."""

    at: int
    file: int
    lines: list[bytes]


def merge_events(folder: Path, *, remove: bool = True) -> Path:
    """Merge the files of all processes, and `remove` them. Return the merged file. OutputError."""
    files = sorted(folder.glob(f"*.{EVENTS_NAME}"))
    headers = [header for file in files if (header := _header(file)) is not None]
    path = folder / EVENTS_NAME
    if not headers:
        return path
    known: dict[str, int] = {}
    engines: dict[str, Any] = {}
    for header in headers:
        known |= header.incarnations or {}
        engines |= header.engines or {}
    several = len({(name, number) for header in headers for name, number in (header.incarnations or {}).items()})
    whole = msgspec.structs.replace(
        headers[0],
        # Of an engine with several incarnations no one number is right: it names none.
        incarnations=known if several == len(known) else {},
        engines=engines or msgspec.UNSET,
    )
    with replacing(path) as out:
        out.write(msgspec.json.encode(whole) + b"\n")
        for turn in merge(*(_turns(file, number) for number, file in enumerate(files))):
            out.writelines(turn.lines)
    for file in files if remove else ():
        file.unlink()
    return path


def _header(path: Path) -> EventsHeader | None:
    """Return the header of a file; None if its process was killed before it had written one."""
    with path.open("rb") as file:
        try:
            return msgspec.json.decode(file.readline(), type=EventsHeader)
        except msgspec.DecodeError:
            return None


def _turns(path: Path, number: int) -> Iterator[Turn]:
    """Yield the turns of a file. A line that a killed process had not finished is left out."""
    with path.open("rb") as file:
        file.readline()
        turn: Turn | None = None
        for line in file:
            if not line.endswith(b"\n"):
                break
            at = _AT.match(line)
            if at is not None:
                line = b"{" + line[at.end() :]
            if b'"in":' in line[:200]:
                if turn is not None:
                    yield turn
                time = msgspec.json.decode(line, type=_Timed).t if at is None else int(at[1])
                turn = Turn(time, number, [line])
            elif turn is not None:
                turn.lines.append(line)
        if turn is not None:
            yield turn


class _Timed(msgspec.Struct):
    t: int
