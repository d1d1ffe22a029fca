"""The TOML files of workload models: figures about a trace, and the rules that such a file must keep."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from pdflow.workload.arrivals import RateLevel
from pdflow.workload.lengths import Quantiles
from pdflow.workload.model import Conversations, Lengths, WorkloadModel

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Row = list[float]
_Rows = Annotated[list[list[float]], msgspec.Meta(min_length=1)]


MOST: Final = 1e9
"""The greatest number of tokens, or of seconds: thirty years."""


class ModelFileError(ValueError):
    """The file is not a workload model."""


class _Level(msgspec.Struct):
    window_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e9)]
    relative_rate: _Row


class _Arrivals(msgspec.Struct):
    rate_rps: _Positive
    step_ns: Annotated[int, msgspec.Meta(ge=0, le=10**15)]
    batch_probability: Annotated[float, msgspec.Meta(ge=0, le=0.999)]
    batch_gap_s: _Row
    level: list[_Level]


class _Lengths(msgspec.Struct):
    longest_input_tokens: Annotated[int, msgspec.Meta(ge=1, le=999_999_999)]
    input_tokens: _Row
    output_tokens: _Rows


class _Conversations(msgspec.Struct):
    common_blocks: Annotated[int, msgspec.Meta(ge=0, le=10**6)]
    returns_after_first: _Share | Annotated[list[_Share], msgspec.Meta(min_length=1)]
    returns_after_later: _Share
    edited: _Share
    after_s: _Row
    kept: _Row
    edited_tokens: _Row
    added_tokens: _Row
    output_tokens: _Rows


class _Source(msgspec.Struct):
    title: str


class _File(msgspec.Struct):
    quantile_levels: _Row
    source: _Source
    arrivals: _Arrivals
    lengths: _Lengths
    conversations: _Conversations | None = None


def model_of(name: str, figures: dict[str, Any]) -> WorkloadModel:
    """Make a model of its parsed file. Raises ModelFileError."""
    try:
        return _model(name, msgspec.convert(figures, _File))
    except ValueError as error:
        raise ModelFileError(_where_first(str(error))) from None


def _model(name: str, file: _File) -> WorkloadModel:
    levels, arrivals, lengths, talk = file.quantile_levels, file.arrivals, file.lengths, file.conversations

    def quantiles(values: Sequence[float], least: float = 0.0) -> Quantiles:
        if not all(abs(value) <= MOST for value in (*levels, *values)):
            raise ValueError(f"quantiles must be finite numbers of at most {MOST:g}")
        if values and min(values) < least:
            raise ValueError(f"quantiles begin at {min(values):g}, expected at least {least:g}")
        return Quantiles(levels, values)

    def by_group(value: float | list[float]) -> tuple[float, ...]:
        return tuple(value) if isinstance(value, list) else (value,)

    def rates(values: Sequence[float]) -> Quantiles:
        found = quantiles(values)
        if found.mean <= 0.0:
            raise ValueError("a level's relative_rate is 0, expected a mean of 1")
        return found

    def groups(rows: Sequence[Sequence[float]]) -> tuple[Quantiles, ...]:
        return tuple(quantiles(row, 1.0) for row in rows)

    return WorkloadModel(
        name=name,
        source=file.source.title,
        rate_rps=arrivals.rate_rps,
        levels=tuple(RateLevel(level.window_s, rates(level.relative_rate)) for level in arrivals.level),
        batch_probability=arrivals.batch_probability,
        batch_gap_s=quantiles(arrivals.batch_gap_s),
        step_ns=arrivals.step_ns,
        lengths=Lengths(quantiles(lengths.input_tokens, 1.0), groups(lengths.output_tokens)),
        longest_input_tokens=lengths.longest_input_tokens,
        conversations=None
        if talk is None
        else Conversations(
            common_blocks=talk.common_blocks,
            returns_after_first=by_group(talk.returns_after_first),
            returns_after_later=talk.returns_after_later,
            after_s=quantiles(talk.after_s),
            edited=talk.edited,
            kept=quantiles(talk.kept),
            edited_tokens=quantiles(talk.edited_tokens),
            added_tokens=quantiles(talk.added_tokens, -math.inf),
            output_tokens=groups(talk.output_tokens),
        ),
    )


_LOCATION: Final = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)


def _where_first(message: str) -> str:
    match = _LOCATION.fullmatch(message)
    return message if match is None else f"{match[2]}: {match[1][:1].lower()}{match[1][1:]}"


def model_toml(
    name: str, made_by: str, source: dict[str, str], figures: dict[str, Any], levels: Sequence[float]
) -> str:
    """Return the text of a model file. `made_by` names its origin, in a comment."""
    lines = [
        f"# Workload model {name}: statistics of a trace, without its rows.",
        f"# {made_by}",
        f"quantile_levels = {_row(levels)}",
        "",
        "[source]",
        *(f"{key} = {_text(value)}" for key, value in source.items()),
    ]
    for table, content in figures.items():
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {_row(value)}" for key, value in content.items() if key != "level"]
        if "level" in content and not content["level"]:
            lines.append("level = []")
        for level in content.get("level", []):
            lines += ["", f"[[{table}.level]]", *(f"{key} = {_row(value)}" for key, value in level.items())]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """Format a basic string of TOML, which escapes as JSON does."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _row(value: Any) -> str:
    """Format a number or a nested list of numbers, wrapped."""
    if not isinstance(value, (list, tuple)):
        return repr(value)
    if value and isinstance(value[0], list):
        return "[\n" + "".join(f"  {_row(inner)},\n" for inner in value) + "]"
    numbers = (f"{number:g}" if isinstance(number, float) and number == 0 else repr(number) for number in value)
    return f"[{', '.join(numbers)}]"
