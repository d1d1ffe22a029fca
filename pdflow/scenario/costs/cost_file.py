"""The canonical cost of a step as a JSON file: its coefficients, the engine they describe, and their source.

It decides the file's keys and their bounds; what the coefficients mean is `pdflow.cost.step`. What measures engines
writes such files, `cost = { model = "measured" }` reads them, and the tables that come with pdflow are of this form.
Reading is as strict as for scenarios: no unknown key, no float for an integer, every problem at once with its path in
the file. Times are whole picoseconds, so that what is written is read back exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs
from attrs import field

from pdflow.cost.step import LinearTable, LinearTime, StepCost
from pdflow.errors import Problem
from pdflow.scenario.reading.convert import structure
from pdflow.scenario.schema.fields import AT_LEAST_ONE, KV_TOKENS, NOT_EMPTY, NOT_NEGATIVE, POSITIVE, Bound, field_doc

FORMAT: Final = "pdflow-step-cost/1"
MOST_BYTES: Final = 1_000_000
MOST_POINTS: Final = 4096
"""Far more than any table needs; what is longer is no cost file."""
PS = Bound(at_least=0, at_most=10**18)
"""Picoseconds of a step: at most eleven days, so that a few thousand steps stay within the 64 bits of an instant."""
PER_TOKEN = Bound(at_least=0, at_most=10**12)
PER_CONTEXT = Bound(at_least=0, at_most=10**9)
PER_POSITION = Bound(at_least=0, at_most=10**6)
"""And so that a million tokens, a billion of context and a million million attended positions do as well."""


@attrs.frozen(kw_only=True)
class MeasuredEngine:
    """The engine that the times describe. A pool that uses them must agree with every key given."""

    gpu: str | None = field(default=None, metadata=field_doc("name of the GPU, as in pools", NOT_EMPTY))
    model: str | None = field(default=None, metadata=field_doc("name of the model", NOT_EMPTY))
    tp: int | None = field(default=None, metadata=field_doc("tensor-parallel size", AT_LEAST_ONE))
    weight_bytes_per_param: float | None = field(default=None, metadata=field_doc("as in [model]", POSITIVE))
    kv_bytes_per_value: int | None = field(default=None, metadata=field_doc("as in [model]", AT_LEAST_ONE))
    software: str | None = field(default=None, metadata=field_doc("engine and version", NOT_EMPTY))
    kv_tokens: int | None = field(
        default=None, metadata=field_doc("KV capacity of one engine in tokens, from the engine's log", KV_TOKENS)
    )


@attrs.frozen(kw_only=True)
class Coefficients:
    """h0 to c2, hw, and those of windows of `StepCost`, each in picoseconds."""

    h0: int = field(metadata=field_doc("time of each step", PS))
    h1: int = field(metadata=field_doc("host time of each decoding sequence", PER_TOKEN))
    hp: int = field(metadata=field_doc("time of each step with a prefill", PS))
    a1: int = field(metadata=field_doc("time of each prefill token", PER_TOKEN))
    a2: int = field(metadata=field_doc("time of each position that a prefill attends to", PER_POSITION))
    c0: int = field(metadata=field_doc("time of each step with a decode", PS))
    c1: int = field(metadata=field_doc("time of each decoding sequence", PER_TOKEN))
    c2: int = field(metadata=field_doc("time of each context token that decodes read", PER_CONTEXT))
    hw: int = field(default=0, metadata=field_doc("additional time of the first step after an idle period", PS))
    window: int | None = field(
        default=None, metadata=field_doc("most positions that aw and cw count of each token or sequence", AT_LEAST_ONE)
    )
    aw: int | None = field(default=None, metadata=field_doc("as a2, in layers that attend to a window", PER_POSITION))
    cw: int | None = field(default=None, metadata=field_doc("as c2, in layers that attend to a window", PER_CONTEXT))

    def __attrs_post_init__(self) -> None:
        if self.window is None and (self.aw or self.cw):
            raise ValueError("has aw or cw without window")


@attrs.frozen(kw_only=True)
class Linear:
    """L(T) by formula: max(slope * T, floor) + allreduce + allreduce_slope * T."""

    slope: int = field(metadata=field_doc("arithmetic, for each token", PER_TOKEN))
    floor: int = field(metadata=field_doc("reading the weights", PS))
    allreduce: int = field(default=0, metadata=field_doc("all-reduces, for each step", PS))
    allreduce_slope: int = field(default=0, metadata=field_doc("all-reduces, for each token", PER_TOKEN))


@attrs.frozen(kw_only=True)
class PiecewiseTable:
    """L(T) by points with straight lines between."""

    tokens: tuple[int, ...] = field(
        metadata=field_doc("numbers of tokens in a step: starts with 1, increasing", NOT_EMPTY)
    )
    ps: tuple[int, ...] = field(metadata=field_doc("L at each of these, never decreasing", NOT_EMPTY))

    def __attrs_post_init__(self) -> None:
        if len(self.tokens) > MOST_POINTS:
            raise ValueError(f"has {len(self.tokens)} points, expected at most {MOST_POINTS}")
        if not PS.holds(max(self.ps)) or max(self.tokens) > 10**9:
            raise ValueError("exceeds a billion tokens or 1,000,000 seconds")
        LinearTable(tokens=self.tokens, ps=self.ps)
        rise, width = self.ps[-1] - self.ps[-2], self.tokens[-1] - self.tokens[-2]
        if not PER_TOKEN.holds(rise // width):
            raise ValueError("ends with a slope of more than a second per token, with which it is extrapolated")


@attrs.frozen(kw_only=True)
class ErrorBar:
    """The error bars of results, in words, printed with each of them."""

    tpot: str | None = field(default=None, metadata=field_doc("error of TPOT", NOT_EMPTY))
    e2e: str | None = field(default=None, metadata=field_doc("error of the time of whole requests", NOT_EMPTY))
    ttft: str | None = field(default=None, metadata=field_doc("error of TTFT", NOT_EMPTY))
    all: str | None = field(default=None, metadata=field_doc("error of all figures", NOT_EMPTY))


@attrs.frozen(kw_only=True)
class MadeFrom:
    """The source of the figures, so that they can be made again."""

    source: str = field(metadata=field_doc("who measured what, and where it is published", NOT_EMPTY))
    licence: str | None = field(default=None, metadata=field_doc("licence of the source", NOT_EMPTY))
    command: str | None = field(default=None, metadata=field_doc("command that wrote this file", NOT_EMPTY))
    fitted_on: tuple[str, ...] = field(default=(), metadata=field_doc("rows to which the coefficients are fitted"))
    held_out: tuple[str, ...] = field(default=(), metadata=field_doc("held-out rows, to which `errors` refers"))
    notes: tuple[str, ...] = field(default=(), metadata=field_doc("caveats"))


@attrs.frozen(kw_only=True)
class RowErrors:
    """The errors of the coefficients on rows that they were not fitted on: |predicted / measured - 1|."""

    of: str = field(metadata=field_doc("which rows", NOT_EMPTY))
    rows: int = field(metadata=field_doc("number of rows", AT_LEAST_ONE))
    median: float = field(metadata=field_doc("share", NOT_NEGATIVE))
    p95: float = field(metadata=field_doc("share", NOT_NEGATIVE))
    max: float = field(metadata=field_doc("share", NOT_NEGATIVE))
    bias: float = field(metadata=field_doc("mean of the signed errors"))


@attrs.frozen(kw_only=True)
class CostFile:
    """The content of a cost file. Exactly one of `linear` and `table` is given."""

    format: Literal["pdflow-step-cost/1"] = field(default=FORMAT, metadata=field_doc("format and version of this file"))
    provenance: str = field(metadata=field_doc("one line about the source of the times; results print it", NOT_EMPTY))
    error_bar: ErrorBar = field(metadata=field_doc("expected errors of results"))
    engine: MeasuredEngine = field(metadata=field_doc("the engine that the times are valid for"))
    step_ps: Coefficients = field(metadata=field_doc("the coefficients"))
    linear_ps: Linear | None = field(default=None, metadata=field_doc("L(T) by formula"))
    table_ps: PiecewiseTable | None = field(default=None, metadata=field_doc("L(T) by points"))
    chunks: bool = field(
        default=True, metadata=field_doc("whether prompts may be cut into chunks to fit the token budget")
    )
    made_from: MadeFrom = field(metadata=field_doc("source of the figures"))
    errors: tuple[RowErrors, ...] = field(default=(), metadata=field_doc("errors against held-out rows"))

    def __attrs_post_init__(self) -> None:
        if (self.linear_ps is None) == (self.table_ps is None):
            raise ValueError("has neither or both of linear_ps and table_ps, expected exactly one")

    def step_cost(self) -> StepCost:
        """Return the cost that engines use."""
        linear, table = self.linear_ps, self.table_ps
        curve: LinearTime | LinearTable
        if table is not None:
            curve = LinearTable(tokens=table.tokens, ps=table.ps)
        else:
            assert linear is not None
            curve = LinearTime(
                slope_ps=linear.slope,
                floor_ps=linear.floor,
                allreduce_ps=linear.allreduce,
                allreduce_slope_ps=linear.allreduce_slope,
            )
        return StepCost(
            **_without_none(attrs.asdict(self.step_ps)),
            linear=curve,
            chunks=self.chunks,
            provenance=self.provenance,
            rel_error=_without_none(attrs.asdict(self.error_bar)),
        )


def cost_file(
    cost: StepCost, engine: MeasuredEngine, made_from: MadeFrom, errors: tuple[RowErrors, ...] = ()
) -> CostFile:
    """Make the file of a cost. Raises ValueError if its coefficients are beyond the form's bounds, or if experts are
    apart from them."""
    if cost.experts is not None:
        raise ValueError("a cost file cannot hold the cost of an engine with ep or dp_attention")
    curve = cost.linear
    windowed = ("window", "aw", "cw")
    names = [name.name for name in attrs.fields(Coefficients) if cost.window or name.name not in windowed]
    file = CostFile(
        provenance=cost.provenance,
        error_bar=ErrorBar(**cost.rel_error),
        engine=engine,
        step_ps=Coefficients(**{name: getattr(cost, name) for name in names}),
        linear_ps=None
        if isinstance(curve, LinearTable)
        else Linear(
            slope=curve.slope_ps,
            floor=curve.floor_ps,
            allreduce=curve.allreduce_ps,
            allreduce_slope=curve.allreduce_slope_ps,
        ),
        table_ps=PiecewiseTable(tokens=curve.tokens, ps=curve.ps) if isinstance(curve, LinearTable) else None,
        chunks=cost.chunks,
        made_from=made_from,
        errors=errors,
    )
    read, problems = read_cost("", written(file))
    if read is None:
        raise ValueError("; ".join(str(problem) for problem in problems))
    return file


def written(file: CostFile) -> str:
    """Return the text of a file, numbers of one table on one line."""
    return _json(_without_none(attrs.asdict(file)), "") + "\n"


def read_cost(location: str, text: str | bytes) -> tuple[CostFile | None, list[Problem]]:
    """Read a file's text as a cost, with everything wrong with it; `location` is the file's name in messages."""
    if len(text) > MOST_BYTES:
        return None, [Problem(location, "", f"is larger than {MOST_BYTES:,} bytes, expected a cost file")]
    try:
        document = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        return None, [Problem(f"{location}:{error.lineno}", "", f"is not JSON: {error.msg}, column {error.colno}")]
    except RecursionError:
        return None, [Problem(location, "", "is nested too deeply")]
    except ValueError as error:
        return None, [Problem(location, "", f"is not JSON: {error}")]
    file, complaints = structure(document, CostFile)
    problems = [Problem(location, _path(complaint.path), complaint.message) for complaint in complaints]
    return (None if problems else file), problems


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key in found if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice[:60]!r} occurs twice in one object")
    return found


def _path(keys: tuple[str | int, ...]) -> str:
    shown = ""
    for key in keys:
        shown += f"[{key}]" if isinstance(key, int) else f".{key}" if shown else key
    return shown


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(inner) if isinstance(inner, dict) else inner
        for key, inner in value.items()
        if inner is not None and inner != ()
    }


def _json(value: Any, indent: str) -> str:
    """Format a value as JSON: objects and lists of texts or objects over lines, lists of numbers on one."""
    inside = indent + "  "
    if isinstance(value, dict):
        rows = [f"{inside}{json.dumps(key)}: {_json(inner, inside)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and not all(isinstance(inner, int) for inner in value):
        rows = [inside + _json(attrs.asdict(inner) if attrs.has(type(inner)) else inner, inside) for inner in value]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
