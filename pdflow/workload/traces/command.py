"""The commands `pdflow trace`: a report on a trace file, or a model of it."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import get_args

import attrs
import msgspec

from pdflow.errors import EXIT_BAD_INPUT, PdflowError, Problem
from pdflow.scenario.reading.convert import structure
from pdflow.scenario.schema.fields import key_of
from pdflow.scenario.schema.workload import Columns, Trace, TraceFormat
from pdflow.scenario.summary import trace_note
from pdflow.workload.fitting.fit import UnfitError, fit
from pdflow.workload.fitting.fit_arrivals import LEVELS
from pdflow.workload.fitting.statistics import compare
from pdflow.workload.model_file import model_of, model_toml
from pdflow.workload.traces.columns import found_columns, suggested_columns
from pdflow.workload.traces.complaints import TraceError
from pdflow.workload.traces.csv_rows import CSV_FORMATS, cells_of, header_cells
from pdflow.workload.traces.describe import describe
from pdflow.workload.traces.described import described
from pdflow.workload.traces.guess import guess
from pdflow.workload.traces.readers import first_lines, has_arrival_times, is_folder, read_trace
from pdflow.workload.traces.traces import sliced

HERE = Path()
SEED = 0
"""The seed of a generator's requests when it is described."""


class ColumnError(PdflowError):
    """A --column option that is malformed."""

    exit_code = EXIT_BAD_INPUT


@attrs.frozen(kw_only=True)
class TraceOptions:
    """The command line's description of a trace; `columns` are texts KEY=NAME."""

    path: str
    form: TraceFormat | None = None
    columns: Iterable[str] = ()
    dataset: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    command: Sequence[str] = ("pdflow", "trace", "describe")
    """The words of the command that an error repeats, with options that it needs."""

    def trace(self) -> Trace:
        """Return the trace, its format and the columns of a CSV file guessed if not given. Raises TraceError or
        ColumnError.
        """
        columns = _columns(self.columns)
        form: TraceFormat | None = self.form or ("servegen" if is_folder(Path(self.path)) else None)
        if form is None or form == "csv":
            lines = first_lines(Path(self.path))
            form = form or guess(lines) or self._csv(lines, columns)
            if form == "csv":
                columns = self._csv_columns(lines, columns)
        return Trace(
            path=self.path, format=form, columns=columns, dataset=self.dataset, start_s=self.start_s, end_s=self.end_s
        )

    def _csv(self, lines: Sequence[str], columns: Columns) -> TraceFormat:
        """Return csv if columns are named, or if the first line looks like a header. Raises TraceError."""
        names = _header(lines)
        if columns != Columns() or (len(names) > 1 and not any(_NUMBER(name) for name in names)):
            return "csv"
        formats = ", ".join(get_args(TraceFormat))
        run = shlex.join([*self.command, self.path, "--format", "FORMAT"])
        wrong = f"its first line shows no format; run {run}, where FORMAT is one of {formats}"
        raise TraceError([Problem(self.path, "", wrong)])

    def _csv_columns(self, lines: Sequence[str], named: Columns) -> Columns:
        """Return the columns of a CSV file, those that are not named found by their names. Raises TraceError."""
        header, row = _header(lines), (cells_of(lines[1]) or []) if len(lines) > 1 else []
        columns = found_columns(header, row, named)
        if columns.input_tokens is not None and columns.output_tokens is not None:
            return columns
        suggested = suggested_columns(header, row, columns)
        options = [text for key, name in suggested.items() for text in ("--column", f"{key}={name}")]
        wrong = f"the names of its columns ({', '.join(header)}) do not show which of them are the token counts"
        run = shlex.join([*self.command, self.path, *options])
        raise TraceError([Problem(self.path, "", f"{wrong}; run {run}")])


def described_trace(asked: TraceOptions, as_json: bool) -> str:
    """Return the report on a trace, or its figures as JSON. Raises TraceError."""
    trace = asked.trace()
    timed = has_arrival_times(trace, HERE)
    figures = describe(sliced(read_trace(trace, HERE, SEED, timed), trace), timed)
    columns = {key_of(field): name for field in attrs.fields(Columns) if (name := getattr(trace.columns, field.name))}
    if as_json:
        content = {"trace": trace.path, "format": trace.format, "note": trace_note(trace), **figures}
        if columns:
            content["columns"] = columns
        return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"
    of_columns = f"columns {', '.join(f'{key}={name}' for key, name in columns.items())}" if columns else ""
    return described(f"{trace.path} ({trace.format})", figures, trace_note(trace) or of_columns)


def modelled_trace(asked: TraceOptions, name: str, title: str | None) -> tuple[str, str]:
    """Return a model of the trace, as the text of its file, and a table that compares a draw of it with the trace.
    Raises TraceError or UnfitError."""
    trace = asked.trace()
    if not has_arrival_times(trace, HERE):
        hint = ": name their column with --column arrival_s=NAME" if trace.format in CSV_FORMATS else ""
        raise UnfitError(f"{trace.path} has no arrival times, which a model needs{hint}")
    requests = list(sliced(read_trace(trace, HERE, SEED), trace))
    source = {"title": title or f"{len(requests):,} requests, from a trace in {trace.format} format"}
    text = model_toml(name, "Computed by pdflow trace model.", source, fit(requests), LEVELS)
    drawn = model_of(name, tomllib.loads(text)).requests(SEED)
    return text, compare(list(islice(drawn, len(requests))), requests)


def _header(lines: Sequence[str]) -> list[str]:
    return header_cells(lines[0]) if lines else []


_NUMBER = re.compile(r"[\d.]+|", re.ASCII).fullmatch
"""A cell that no header has: a number, or nothing."""


def _columns(assignments: Iterable[str]) -> Columns:
    known = ", ".join(key_of(field) for field in attrs.fields(Columns))
    named = {}
    for text in assignments:
        key, equals, name = text.partition("=")
        if not equals or not name:
            raise ColumnError(f"--column {text}: expected KEY=NAME, where KEY is one of {known}")
        named[key] = name
    columns, complaints = structure(named, Columns)
    if columns is None or complaints:
        problems = "; ".join(f"{'.'.join(map(str, complaint.path))}: {complaint.message}" for complaint in complaints)
        raise ColumnError(f"--column {problems.removeprefix(': ')}")
    return columns
