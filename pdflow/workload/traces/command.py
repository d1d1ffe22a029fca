"""The commands `pdflow trace`: a report on a trace file, or a model of it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import attrs
import msgspec

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.scenario.reading.convert import structure
from pdflow.scenario.schema.fields import key_of
from pdflow.scenario.schema.workload import Columns, Trace, TraceFormat
from pdflow.scenario.summary import trace_note
from pdflow.workload.fitting.fit import UnfitError, fit
from pdflow.workload.fitting.fit_arrivals import LEVELS
from pdflow.workload.fitting.statistics import compare
from pdflow.workload.model_file import model_of, model_toml
from pdflow.workload.traces.describe import describe
from pdflow.workload.traces.described import described
from pdflow.workload.traces.readers import has_arrival_times, read_trace, trace_of
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

    def trace(self) -> Trace:
        """Return the trace, its format guessed if not given. Raises TraceError or ColumnError."""
        trace = trace_of(self.path, self.form, _columns(self.columns), self.dataset)
        return attrs.evolve(trace, start_s=self.start_s, end_s=self.end_s)


def described_trace(asked: TraceOptions, as_json: bool) -> str:
    """Return the report on a trace, or its figures as JSON. Raises TraceError."""
    trace = asked.trace()
    timed = has_arrival_times(trace, HERE)
    figures = describe(sliced(read_trace(trace, HERE, SEED, timed), trace), timed)
    if as_json:
        content = {"trace": trace.path, "format": trace.format, "note": trace_note(trace), **figures}
        return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"
    return described(f"{trace.path} ({trace.format})", figures, trace_note(trace))


def modelled_trace(asked: TraceOptions, name: str, title: str | None) -> tuple[str, str]:
    """Return a model of the trace, as the text of its file, and a table that compares a draw of it with the trace.
    Raises TraceError or UnfitError."""
    trace = asked.trace()
    if not has_arrival_times(trace, HERE):
        raise UnfitError(f"{trace.path} does not say when requests arrive, which a model needs")
    requests = list(sliced(read_trace(trace, HERE, SEED), trace))
    source = {"title": title or f"{len(requests):,} requests, from a trace in {trace.format} format"}
    text = model_toml(name, "Computed by pdflow trace model.", source, fit(requests), LEVELS)
    drawn = model_of(name, tomllib.loads(text)).requests(SEED)
    return text, compare(list(islice(drawn, len(requests))), requests)


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
