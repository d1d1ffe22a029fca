"""events.jsonl of a live run: what went into every endpoint of every process, and what came out (`results/events.py`).

Each process writes a file of its own, line by line, so that one that is killed leaves what it had come to. Times are
those of the process's clock moved to the wall's, so that parts of one host can be laid into one order, which is done
when the cluster has ended. A life of an engine names its incarnation in its header.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import merge
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from pdflow.protocol.values import Address, Instant
from pdflow.results.events import EventsHeader, EventsWriter
from pdflow.results.write import OutputError, replacing
from pdflow.scenario.schema import Scenario
from runtime.clock import wall_offset_ns
from runtime.node import Node

EVENTS_NAME: Final = "events.jsonl"


@contextmanager
def recording(folder: Path | None, scenario: Scenario, node: Node, incarnation: int) -> Iterator[None]:
    """Write what this node's endpoints hear and answer into the folder, if there is one. OutputError."""
    if folder is None:
        yield
        return
    path = folder / f"{node.name}-{incarnation:016x}.{EVENTS_NAME}"
    # The router has no lives that anybody could tell apart.
    lives = {node.name: incarnation} if incarnation else {}
    header = EventsHeader(world="live", scenario=scenario.name, seed=scenario.seed, incarnations=lives)
    offset = wall_offset_ns()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("wb", buffering=0)
    except OSError as cause:
        raise OutputError(path, cause) from cause
    with file:
        writer = EventsWriter(file, header, path)

        def observe(address: Address, event: Any, effects: tuple[Any, ...], now: Instant) -> None:
            writer.event(now + offset, address, event)
            writer.effects(now + offset, address, effects)

        node.observe = observe
        yield


class Turn(NamedTuple):
    """An event's line and those of its effects, with what orders them: the time, then the file."""

    t: int
    file: int
    lines: list[bytes]


def join(folder: Path) -> Path:
    """All parts' files as one, in the order of time; they are removed then. OutputError."""
    parts = sorted(folder.glob(f"*.{EVENTS_NAME}"))
    headers = [header for part in parts if (header := _header(part)) is not None]
    path = folder / EVENTS_NAME
    if not headers:
        return path
    known: dict[str, int] = {}
    for header in headers:
        known |= header.incarnations or {}
    one_each = len(known) == sum(1 for header in headers if header.incarnations)
    with replacing(path) as out:
        # Of an engine with several lives no one number is right: it names none.
        whole = msgspec.structs.replace(headers[0], incarnations=known if one_each else {})
        out.write(msgspec.json.encode(whole) + b"\n")
        for turn in merge(*(_turns(part, number) for number, part in enumerate(parts))):
            out.writelines(turn.lines)
    for part in parts:
        part.unlink()
    return path


def _header(path: Path) -> EventsHeader | None:
    """None for a file whose process died before it had written anything."""
    with path.open("rb") as file:
        try:
            return msgspec.json.decode(file.readline(), type=EventsHeader)
        except msgspec.DecodeError:
            return None


def _turns(path: Path, number: int) -> Iterator[Turn]:
    """What a killed process had not finished writing is left out."""
    with path.open("rb") as file:
        file.readline()
        turn: Turn | None = None
        for line in file:
            if not line.endswith(b"\n"):
                break
            if b'"in":' in line[:200]:
                if turn is not None:
                    yield turn
                turn = Turn(msgspec.json.decode(line, type=_Timed).t, number, [line])
            elif turn is not None:
                turn.lines.append(line)
        if turn is not None:
            yield turn


class _Timed(msgspec.Struct):
    t: int
