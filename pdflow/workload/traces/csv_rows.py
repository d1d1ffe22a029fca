"""CSV traces: a header, then a line for each request. The published formats differ in the names of columns only.

Sources: Azure, AzurePublicDataset AzureLLMInferenceDataset2023 and 2024 (times with up to nine decimals and perhaps a
zone). BurstGPT, HPMLL/BurstGPT (seconds since the first day's midnight; a request that failed has 0 response tokens and
is left out here, for nothing is known of what it asked for). vidur, microsoft/vidur data/processed_traces.
LLMServingSim, casys-kaist/LLMServingSim workloads. splitwise-sim, Mutinifni/splitwise-sim traces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from pdflow.scenario.schema.workload import Columns, Trace, TraceFormat
from pdflow.workload.request import Row
from pdflow.workload.traces.clock import CLOCKS
from pdflow.workload.traces.complaints import Complaints

PUBLISHED: Final[Mapping[TraceFormat, Columns]] = {
    "azure": Columns(arrival_stamp="TIMESTAMP", input_tokens="ContextTokens", output_tokens="GeneratedTokens"),
    "burstgpt": Columns(arrival_s="Timestamp", input_tokens="Request tokens", output_tokens="Response tokens"),
    "vidur": Columns(arrival_s="arrived_at", input_tokens="num_prefill_tokens", output_tokens="num_decode_tokens"),
    "llmservingsim": Columns(arrival_ns="arrival_time_ns", input_tokens="input_toks", output_tokens="output_toks"),
    "splitwise": Columns(arrival_s="arrival_timestamp", input_tokens="prompt_size", output_tokens="token_size"),
}
CSV_FORMATS: Final[frozenset[TraceFormat]] = frozenset((*PUBLISHED, "csv"))

_COUNT = re.compile(r"([0-9]{1,9})(?:\.0*)?", re.ASCII).fullmatch
CLASS: Final = re.compile(r"[\w.+:@/-][\w .+:@/-]{0,63}").fullmatch
"""The form of a class's name, which stands in tables and in keys of results."""
CLASS_EXPECTED: Final = "expected a name of up to 64 letters, digits, spaces and any of . + : @ / - _"
_CELL = re.compile(r'\s*(?:"((?:[^"]|"")*)"\s*|([^",]*))(?:,|$)')


def columns_of(trace: Trace) -> Columns:
    """Return the columns of a CSV trace: those that the scenario names, and for the rest the format's own."""
    own = trace.columns
    published = PUBLISHED.get(trace.format, Columns())
    if own.arrival:
        published = attrs.evolve(published, arrival_s=None, arrival_ms=None, arrival_ns=None, arrival_stamp=None)
    values = {field.name: getattr(own, field.name) for field in attrs.fields(Columns)}
    return attrs.evolve(published, **{name: column for name, column in values.items() if column is not None})


def header_cells(line: str) -> list[str]:
    """Return the names in a header."""
    return [name.strip() for name in cells_of(line.removeprefix("\ufeff")) or ()]


def cells_of(line: str) -> list[str] | None:
    """Return the cells of a line, quotes taken off; None if a quoted one does not end on its line."""
    if '"' not in line:
        return line.rstrip("\r\n").split(",")
    text, at, cells = line.rstrip("\r\n"), 0, []
    while at <= len(text):
        match = _CELL.match(text, at)
        if match is None:
            return None
        cells.append(match[2] if match[1] is None else match[1].replace('""', '"'))
        if match.end() == len(text) and not match[0].endswith(","):
            break
        at = match.end()
    return cells


def csv_rows(lines: Iterable[str], location: str, trace: Trace, timed: bool) -> Iterator[Row]:
    """Yield the rows of a CSV trace; without times, if the instants come from elsewhere."""
    complaints, latest = Complaints(location), None
    numbered = enumerate(lines, start=1)
    header = header_cells(next(numbered, (1, ""))[1])
    columns = _ColumnIndexes.of(columns_of(trace), header, timed, complaints)
    drop_failures, some = trace.format == "burstgpt", False
    for number, line in numbered:
        if not line.strip():
            continue
        cells = cells_of(line)
        if cells is None:
            complaints.add(number, "a quoted cell does not end on this line, expected one line per request")
            continue
        if len(cells) != len(header):
            complaints.add(number, f"{len(cells)} cells, expected {len(header)} as in the header")
            continue
        row = columns.row(cells, header, complaints, number)
        if row is None:
            continue
        at = row[0]
        if latest is not None and at < latest:
            name, text = header[columns.arrival], cells[columns.arrival].strip()
            complaints.add(number, f"{name} {text} is earlier than the line above, expected times in order")
            continue
        latest, some = at, True
        if not (drop_failures and row[2] == 0):
            yield row
    if not some and not complaints.problems:
        complaints.add(1, "the trace has a header but no requests")
    complaints.raise_any()


@attrs.frozen
class _ColumnIndexes:
    """The indices of the columns in a line; below 0 for those that are not needed."""

    arrival: int
    clock: str
    input_tokens: int
    output_tokens: int
    class_: int

    @staticmethod
    def of(columns: Columns, header: Sequence[str], timed: bool, complaints: Complaints) -> _ColumnIndexes:
        """Find the columns in a header. Raises TraceError if the header lacks one, or if no name was given for it."""
        clock, arrival = next(iter(columns.arrival.items()), ("", None)) if timed else ("", None)
        unnamed = [key for key in ("input_tokens", "output_tokens") if getattr(columns, key) is None]
        if timed and arrival is None:
            unnamed.insert(0, "arrival_s")
        if unnamed:
            raise complaints.refuse(1, f"the column of {' and of '.join(unnamed)} is not named; name it in columns")
        asked = [arrival, columns.input_tokens, columns.output_tokens, columns.class_]
        names = [name for name in asked if name is not None]
        if missing := [name for name in names if name not in header]:
            hint = "; for a trace without times, set workload.arrival" if arrival in missing else ""
            expected = f"expected {','.join(names)}"
            raise complaints.refuse(1, f"the header lacks {', '.join(missing)}, {expected}{hint}")
        at, prompt, answer, class_ = (-1 if name is None else header.index(name) for name in asked)
        return _ColumnIndexes(at, clock, prompt, answer, class_)

    def row(self, cells: Sequence[str], header: Sequence[str], complaints: Complaints, number: int) -> Row | None:
        """Return the row of one line; if it is none, return None and add a complaint."""
        at, class_ = 0, ""
        if self.arrival >= 0:
            text = cells[self.arrival].strip()
            read, expected = CLOCKS[self.clock]
            instant = read(text)
            if instant is None:
                complaints.add(number, f"{header[self.arrival]} is {_shown(text)}, expected {expected}")
                return None
            at = instant
        prompt, answer = _COUNT(cells[self.input_tokens].strip()), _COUNT(cells[self.output_tokens].strip())
        if prompt is None or answer is None:
            column = self.output_tokens if prompt else self.input_tokens
            wrong = _shown(cells[column].strip())
            complaints.add(number, f"{header[column]} is {wrong}, expected a whole number of tokens")
            return None
        if self.class_ >= 0:
            class_ = cells[self.class_].strip()
            if class_ and not CLASS(class_):
                complaints.add(number, f"{header[self.class_]} is {_shown(class_)}, {CLASS_EXPECTED}")
                return None
        return at, int(prompt[1]), int(answer[1]), (), class_


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
