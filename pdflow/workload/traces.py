"""Recorded workloads, line by line: Mooncake's JSON lines and Azure's CSV.

Decides what a line means and what is wrong with it; opening files is `readers.py`. Lines stream, so a trace may be
larger than memory. A bad line is noted and skipped, and the error at the end names all of them, each with its number.

Rules, the same for both formats: times start at 0 with the first request and must not decrease; a length of 0 becomes
1, because a prompt has a token and every request that is served gets a first one.

Formats: Mooncake, kvcache-ai/Mooncake FAST25-release/traces (`timestamp` in ms, `input_length`, `output_length`,
`hash_ids`: one id for each 512 tokens of the prompt, the last block partly filled). Azure, AzurePublicDataset
AzureLLMInferenceDataset2023 and 2024 (TIMESTAMP with up to nine decimals and perhaps a zone, ContextTokens,
GeneratedTokens).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from pdflow.errors import Problem, ScenarioError
from pdflow.protocol.values import MS, S
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request

TraceFormat: TypeAlias = Literal["mooncake", "azure"]

REPORTED: Final = 20
"""Problems of one trace that are told one by one; the rest are counted."""


class TraceError(ScenarioError):
    """Lines of a trace make no sense. `problems` has the first of them, `more` is how many others there are."""

    def __init__(self, problems: Iterable[Problem], more: int = 0) -> None:
        super().__init__(problems)
        self.more = more
        if more:
            self.args = (f"{self}\nand {more} more lines like these",)


class Complaints:
    """What is wrong with a trace, so far."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.problems: list[Problem] = []
        self.more = 0

    def add(self, line: int, message: str) -> None:
        """Note a problem of one line, counted from 1."""
        if len(self.problems) < REPORTED:
            self.problems.append(Problem(f"{self.place}:{line}", "", message))
        else:
            self.more += 1

    def raise_any(self) -> None:
        """Raise TraceError if anything was noted."""
        if self.problems:
            raise TraceError(self.problems, self.more)


def parse(lines: Iterable[str], place: str, form: TraceFormat) -> Iterator[Request]:
    """The requests of a trace whose lines are given. `place` is its name in errors.

    Raises TraceError after the last good line if any was bad, or if there was none.
    """
    return _requests(_mooncake_rows(lines, place) if form == "mooncake" else _azure_rows(lines, place))


_Row: TypeAlias = tuple[int, int, int, tuple[int, ...]]  # (ns on the trace's clock, input, output, prefix)


def _requests(rows: Iterator[_Row]) -> Iterator[Request]:
    start = None
    for index, (at, input_tokens, output_tokens, prefix) in enumerate(rows):
        if start is None:
            start = at
        yield Request(index, at - start, max(1, input_tokens), max(1, output_tokens), prefix)


_Count = Annotated[int, msgspec.Meta(ge=0, le=999_999_999)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=5e12)]  # ms, since 1970 if need be; ns stay in 64 bits
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Hash, ...] = ()


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode


def _mooncake_rows(lines: Iterable[str], place: str) -> Iterator[_Row]:
    complaints, latest = Complaints(place), None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _decode_mooncake(line)
        except (msgspec.DecodeError, UnicodeError) as error:
            complaints.add(number, f"{_plain(str(error))}; {_MOONCAKE_EXPECTED}")
            continue
        at = round(row.timestamp * MS)
        blocks = -(-max(1, row.input_length) // PREFIX_BLOCK_TOKENS)
        if latest is not None and at < latest:
            complaints.add(number, f"timestamp {row.timestamp:g} is before the line above, expected times in order")
        elif len(row.hash_ids) > blocks:
            complaints.add(
                number,
                f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, expected at most {blocks}: "
                f"one for each {PREFIX_BLOCK_TOKENS}",
            )
        else:
            latest = at
            yield at, row.input_length, row.output_length, row.hash_ids
    if latest is None and not complaints.problems:
        complaints.add(1, f"the trace is empty, {_MOONCAKE_EXPECTED}")
    complaints.raise_any()


_MOONCAKE_EXPECTED = (
    'expected {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per 512 tokens]}'
)


_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _azure_rows(lines: Iterable[str], place: str) -> Iterator[_Row]:
    complaints, latest = Complaints(place), None
    numbered = enumerate(lines, start=1)
    header = [name.strip() for name in next(numbered, (1, ""))[1].removeprefix("\ufeff").split(",")]
    if missing := [name for name in _AZURE_COLUMNS if name not in header]:
        complaints.add(1, f"the header lacks {', '.join(missing)}, expected {','.join(_AZURE_COLUMNS)}")
        complaints.raise_any()
    columns = [header.index(name) for name in _AZURE_COLUMNS]
    for number, line in numbered:
        if not line.strip():
            continue
        cells = line.split(",")  # no cell of these files is quoted
        if len(cells) != len(header):
            complaints.add(number, f"{len(cells)} cells, expected {len(header)} as in the header")
            continue
        stamp, prompt, answer = (cells[column].strip() for column in columns)
        at = instant_ns(stamp)
        if at is None:
            complaints.add(number, f"TIMESTAMP is {stamp!r}, expected a time such as 2023-11-16 18:17:03.9799600")
        elif not _COUNT(prompt) or not _COUNT(answer):
            name, value = ("GeneratedTokens", answer) if _COUNT(prompt) else ("ContextTokens", prompt)
            complaints.add(number, f"{name} is {value!r}, expected a whole number of tokens")
        elif latest is not None and at < latest:
            complaints.add(number, f"TIMESTAMP {stamp} is before the line above, expected times in order")
        else:
            latest = at
            yield at, int(prompt), int(answer), ()
    if latest is None and not complaints.problems:
        complaints.add(1, "the trace has a header and no requests")
    complaints.raise_any()


_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII).fullmatch
_STAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?", re.ASCII
).fullmatch
_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def instant_ns(stamp: str) -> int | None:
    """A time stamp in exact ns since 1 March of year 0, in UTC if it names a zone; None if it is none.

    Written out because `datetime` keeps six decimals and Azure's files have seven.
    """
    match = _STAMP(stamp)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
    if not (1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month - 1] and hour < 24 and minute < 60 and second < 60):
        return None
    if month == 2 and day == 29 and (year % 4 or (year % 100 == 0 and year % 400)):
        return None
    # Counting years from March puts the leap day last (Hinnant, chrono-compatible low-level date algorithms).
    years, months = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * years + years // 4 - years // 100 + years // 400 + (153 * months + 2) // 5 + day - 1
    minutes = hour * 60 + minute
    if match[9]:
        offset = int(match[10]) * 60 + int(match[11])
        minutes -= offset if match[9] == "+" else -offset
    fraction = (match[7] or "").ljust(9, "0")
    return ((days * 1440 + minutes) * 60 + second) * S + int(fraction)


_FIELD = re.compile(r" - at `\$\.(\w+)[^`]*`$")


def _plain(message: str) -> str:
    """msgspec's message in this file's words: the field first, and no capital but in a name."""
    field = _FIELD.search(message)
    what = message[: field.start()] if field else message
    if not what.startswith("JSON"):
        what = what[:1].lower() + what[1:]
    return f"{field[1]}: {what}" if field else what
