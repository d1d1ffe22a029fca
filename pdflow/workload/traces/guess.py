"""The format of a trace, guessed from its first lines where that is certain."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from pdflow.scenario.schema.workload import TraceFormat
from pdflow.workload.traces.csv_rows import PUBLISHED, header_cells

_WINDOW = re.compile(r"\d+(\.\d+)?,[\d.e+-]+,[\d.e+-]*,(Gamma|Weibull|),[\d.e+-]*,[\d.e+-]*\s*", re.ASCII).fullmatch
_CONVERSATIONS = re.compile(r'\[?\s*\{[^{}]*"conversations"\s*:').match


def guess(lines: Sequence[str]) -> TraceFormat | None:
    """Return the format of a trace that begins with these lines; None if that is not certain."""
    text = "".join(lines).removeprefix("\ufeff").lstrip()
    first = text.partition("\n")[0]
    if text.startswith(("{", "[")):
        return _of_json(first, text)
    header = set(header_cells(first))
    for form, columns in PUBLISHED.items():
        if {columns.input_tokens, columns.output_tokens} <= header:
            return form
    return "servegen" if _WINDOW(first) else None


def _of_json(first: str, text: str) -> TraceFormat | None:
    if _CONVERSATIONS(text):
        return "sharegpt"
    try:
        entry = msgspec.json.decode(first)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    if {"timestamp", "input_length", "output_length"} <= entry.keys():
        return "mooncake"
    return "vllm-custom" if {"prompt", "output_tokens"} <= entry.keys() else None
