"""The files of this room: traces, and the bundled models. Nothing else here reads anything."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from pdflow.errors import Problem
from pdflow.workload.arrivals import Level
from pdflow.workload.lengths import Quantiles
from pdflow.workload.model import Conversations, Lengths, Model
from pdflow.workload.request import Request
from pdflow.workload.traces import TraceError, TraceFormat, parse

MODELS = ("mooncake-conversation", "azure-code", "azure-conv")


def read_trace(path: Path, form: TraceFormat) -> Iterator[Request]:
    """The requests of a trace file, streamed. Raises TraceError, after the last good line, if any line is bad."""
    try:
        lines = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise TraceError([Problem(str(path), "", f"{what}, expected a {form} trace")]) from None
    with lines:
        yield from parse(lines, str(path), form)


def check_trace(path: Path, form: TraceFormat, requests: int | None = None) -> None:
    """Read a trace, or its first requests, to the end. Raises TraceError if any line is bad."""
    for _ in islice(read_trace(path, form), requests):
        pass


def load_model(name: str) -> Model:
    """One of MODELS."""
    if name not in MODELS:
        raise ValueError(f"there is no workload model {name!r}, expected one of {', '.join(MODELS)}")
    text = files("pdflow.workload.models").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return model_of(name, tomllib.loads(text))


def model_of(name: str, figures: dict[str, Any]) -> Model:
    """A model from its parsed file."""
    levels = figures["quantile_levels"]
    arrivals, lengths, talk = figures["arrivals"], figures["lengths"], figures.get("conversations")

    def quantiles(values: Sequence[float]) -> Quantiles:
        return Quantiles(levels, values)

    def groups(rows: Sequence[Sequence[float]]) -> tuple[Quantiles, ...]:
        return tuple(quantiles(row) for row in rows)

    return Model(
        name=name,
        source=figures["source"]["title"],
        rate_rps=arrivals["rate_rps"],
        levels=tuple(Level(level["window_s"], quantiles(level["relative_rate"])) for level in arrivals["level"]),
        batch_probability=arrivals["batch_probability"],
        batch_gap_s=quantiles(arrivals["batch_gap_s"]),
        step_ns=arrivals["step_ns"],
        lengths=Lengths(quantiles(lengths["input_tokens"]), groups(lengths["output_tokens"])),
        longest_input_tokens=lengths["longest_input_tokens"],
        conversations=None
        if talk is None
        else Conversations(
            common_blocks=talk["common_blocks"],
            returns_after_first=talk["returns_after_first"],
            returns_after_later=talk["returns_after_later"],
            after_s=quantiles(talk["after_s"]),
            edited=talk["edited"],
            kept=quantiles(talk["kept"]),
            edited_tokens=quantiles(talk["edited_tokens"]),
            added_tokens=quantiles(talk["added_tokens"]),
            output_tokens=groups(talk["output_tokens"]),
        ),
    )
