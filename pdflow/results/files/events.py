"""events.jsonl: every event handed to an endpoint and every effect it returned, in order, for replays and comparisons.

Format, version 1. UTF-8, one JSON object per line. The first line is the header:

    {"format": "pdflow.events", "version": 1, "world": "simulated", "scenario": "md1", "seed": 1}

Every other line is one event handed to one endpoint, or one effect that it answered with:

    {"t": 12000, "node": "prefill-0.r0", "in":  {"type": "WriteEnded", "op": {...}, "ok": true}}
    {"t": 12000, "node": "prefill-0.r0", "out": {"type": "Send", "to": "decode-0.r0", "message": {"type": "Done", ...}}}

`t` is the `now` given to the endpoint, in ns; it never decreases at one node. Effects follow their event in the order
in which the endpoint returned them. A value is an object with its class as "type" and then its fields in the order of
the class, every field always present; tuples are lists, enums the names of their members, bytes {"hex": "00ff"}.

A reader refuses what it does not know: another format or version, a line that is not of this form, a file that ends in
the middle of a line. New fields in a class are no new version; new keys in a line are.
"""

from __future__ import annotations

import contextlib
import enum
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.results.files.write import OutputError, replacing

FORMAT = "pdflow.events"
VERSION = 1

Direction = Literal["in", "out"]


class EventsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the file."""

    format: str = FORMAT
    version: int = VERSION
    world: str
    scenario: str
    seed: int
    incarnations: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """Of a live run: the incarnation of each engine, drawn there. A simulated run's follow from the scenario."""
    engines: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Of a run without a scenario: how the endpoints of each engine are configured (`wiring/endpoints.py`)."""


class EventLine(msgspec.Struct, frozen=True):
    """One line of the file: `body` is the event or effect as plain data, with its class under "type"."""

    t: int
    node: str
    direction: Direction
    body: dict[str, Any]

    @property
    def type(self) -> str:
        """The name of the event's or effect's class."""
        return str(self.body["type"])


class EventsError(PdflowError):
    """A file is not an events.jsonl that this version can read; the message has the line and what was expected."""

    exit_code = EXIT_BAD_INPUT


class EventsWriter:
    """Writes lines into an open binary file; see `writing_events` for the file itself."""

    def __init__(self, file: BinaryIO, header: EventsHeader, path: Path) -> None:
        self._write = file.write
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._line(header)

    def event(self, t: int, node: str, value: msgspec.Struct, at: int | None = None) -> None:
        """Write that the endpoint `node` was handed `value` at `t`. `at`: by the wall clock, for `merge_events`."""
        line = {"t": t, "node": node, "in": plain(value)}
        self._line(line if at is None else {"at": at, **line})

    def effects(self, t: int, node: str, values: Iterable[msgspec.Struct], at: int | None = None) -> None:
        """Write that the endpoint `node` returned these effects, in this order."""
        for value in values:
            line = {"t": t, "node": node, "out": plain(value)}
            self._line(line if at is None else {"at": at, **line})

    def _line(self, line: Any) -> None:
        try:
            self._write(self._encode(line) + b"\n")
        except OSError as cause:
            raise OutputError(self._path, cause) from cause


@contextlib.contextmanager
def writing_events(path: Path, header: EventsHeader) -> Iterator[EventsWriter]:
    """Open events.jsonl for a run; the file appears under its name only if the block ends without an exception.

    An interrupted run that wants to keep its events leaves the block normally.
    """
    with replacing(path) as file:
        yield EventsWriter(file, header, path)


def plain(value: Any) -> Any:
    """Convert a value to the data that JSON can hold, structs with their class as "type"."""
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return value
    if kind is tuple or kind is list:
        return [plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        omitted = _omitted(kind)
        fields = [(name, getattr(value, name)) for name in value.__struct_fields__]
        written = {name: plain(item) for name, item in fields if name not in omitted or item != omitted[name]}
        return {"type": kind.__name__, **written}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(plain(item) for item in value)
    if isinstance(value, float):
        return value
    raise TypeError(f"{kind.__name__} is not part of {FORMAT} version {VERSION}")


_omitted_of: dict[type[msgspec.Struct], dict[str, Any]] = {}


def _omitted(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the value of each field that is left out where it has this value, as the struct's own encoding does."""
    found = _omitted_of.get(kind)
    if found is None:
        omits = kind.__struct_config__.omit_defaults
        found = _omitted_of[kind] = {
            field.name: field.default
            for field in msgspec.structs.fields(kind)
            if field.default is msgspec.UNSET or (omits and not field.required)
        }
    return found


def read_events(path: Path) -> tuple[EventsHeader, Iterator[EventLine]]:
    """Return the header, and the lines one at a time, each checked. Raises EventsError with file and line."""
    with open(path, "rb") as file:
        header = _header(path, file.readline())
    return header, _lines(path)


def _header(path: Path, line: bytes) -> EventsHeader:
    try:
        header = msgspec.json.decode(line, type=EventsHeader)
    except msgspec.MsgspecError as error:
        raise EventsError(f"{path}:1: not the header of {FORMAT}: {error}") from error
    if header.format != FORMAT or header.version != VERSION:
        raise EventsError(
            f"{path}:1: {header.format} version {header.version}: expected {FORMAT} version {VERSION};"
            " record the run again with this pdflow"
        )
    return header


def _lines(path: Path) -> Iterator[EventLine]:
    decode = msgspec.json.Decoder().decode
    latest: dict[str, int] = {}
    with open(path, "rb") as file:
        file.readline()
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                raise EventsError(f"{path}:{number}: the file ends in the middle of a line")
            try:
                event = _checked(decode(line))
            except (msgspec.MsgspecError, ValueError) as error:
                raise EventsError(f"{path}:{number}: {error}") from error
            if event.t < latest.get(event.node, 0):
                raise EventsError(f"{path}:{number}: time goes back at {event.node}, to {event.t} ns")
            latest[event.node] = event.t
            yield event


def _checked(line: Any) -> EventLine:
    if not isinstance(line, dict) or not {"t", "node"} <= line.keys():
        raise ValueError('expected an object with "t", "node" and either "in" or "out"')
    direction: Direction = "in" if "in" in line else "out"
    if line.keys() != {"t", "node", direction}:
        raise ValueError(f'expected the keys "t", "node" and either "in" or "out", found {", ".join(sorted(line))}')
    t, node, body = line["t"], line["node"], line[direction]
    if type(t) is not int or t < 0:
        raise ValueError(f'"t" is not a time in ns: {t!r}')
    if not isinstance(node, str):
        raise ValueError(f'"node" is not a name: {node!r}')
    if not isinstance(body, dict) or not isinstance(body.get("type"), str):
        raise ValueError(f'"{direction}" is not a value with a "type"')
    return EventLine(t, node, direction, body)


def rebuild(body: Any, classes: Mapping[str, type[msgspec.Struct]]) -> Any:
    """Return the value that `plain` made this data of. `classes` has every class that may occur, by name.

    Raises ValueError for a class that is not in `classes`, or for fields that are not its own.
    """
    kind = classes.get(body["type"])
    if kind is None:
        raise ValueError(f"unknown class {body['type']}")
    readers, names = _readers(kind), body.keys() - {"type"}
    if not readers.keys() - _omitted(kind).keys() <= names <= readers.keys():
        raise ValueError(f"{kind.__name__} has the fields {', '.join(readers)}, not {', '.join(body)}")
    return kind(**{name: _value(body[name], readers[name], classes) for name in names})


Enums = Mapping[str, enum.Enum]
_readers_of: dict[type[msgspec.Struct], dict[str, Enums]] = {}


def _readers(kind: type[msgspec.Struct]) -> dict[str, Enums]:
    """Return, for each field, the enum members that a string in it may name (none for most fields)."""
    found = _readers_of.get(kind)
    if found is None:
        hints = typing.get_type_hints(kind)
        found = _readers_of[kind] = {name: dict(_members(hints[name])) for name in kind.__struct_fields__}
    return found


def _members(hint: Any) -> Iterator[tuple[str, enum.Enum]]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield from hint.__members__.items()
    for argument in typing.get_args(hint):
        yield from _members(argument)


def _value(data: Any, enums: Enums, classes: Mapping[str, type[msgspec.Struct]]) -> Any:
    if isinstance(data, list):
        return tuple(_value(item, enums, classes) for item in data)
    if isinstance(data, dict):
        if "type" in data:
            return rebuild(data, classes)
        return bytes.fromhex(data["hex"]) if data.keys() == {"hex"} else data
    if isinstance(data, str) and enums:
        return enums.get(data, data)
    return data


def classes_of(*modules: types.ModuleType) -> dict[str, type[msgspec.Struct]]:
    """Return the struct classes that these modules define, by name, for `rebuild`."""
    return {
        name: item
        for module in modules
        for name, item in vars(module).items()
        if isinstance(item, type) and issubclass(item, msgspec.Struct) and item.__module__ == module.__name__
    }
