"""The columns of a CSV trace of no published format, found by names that such files commonly have.

Decides which column says what only where one column alone has such a name. Where that leaves a doubt, it suggests
columns to name on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs

from pdflow.scenario.schema.workload import Columns
from pdflow.workload.traces.clock import instant_ns

INPUT_NAMES: Final = frozenset(
    (
        *("inputtokens", "prompttokens", "contexttokens", "requesttokens", "numinputtokens", "numprompttokens"),
        *("numprefilltokens", "inputtoks", "prompttoks", "inputlength", "promptlength", "inputlen", "promptlen"),
        "promptsize",
    )
)
OUTPUT_NAMES: Final = frozenset(
    (
        *("outputtokens", "completiontokens", "generatedtokens", "responsetokens", "numoutputtokens"),
        *("numcompletiontokens", "numgeneratedtokens", "numdecodetokens", "outputtoks", "outputlength"),
        *("completionlength", "responselength", "outputlen", "completionlen", "tokensize"),
    )
)
ARRIVAL_NAMES: Final = frozenset(
    ("timestamp", "arrivaltimestamp", "arrivaltime", "arrivedat", "arrival", "requesttime", "time", "ts")
)
"""Names as `_plain` makes them: lower case, without spaces, underscores and hyphens."""
_UNITS: Final = (("ms", "arrival_ms"), ("ns", "arrival_ns"), ("s", "arrival_s"))
"""Endings of a column's name that say its unit; `ns` and `ms` come before `s`, which they end with."""
_EPOCH_MS: Final = 1e11
_EPOCH_NS: Final = 1e17
"""Numbers from here on are times since 1970 in these units: in seconds they would be thousands of years."""
_HINTS: Final = {
    "input_tokens": ("prompt", "input", "context", "prefill", "in"),
    "output_tokens": ("output", "completion", "generat", "response", "answer", "decode", "out"),
    "arrival": ("time", "arriv", "stamp", "date", "start", "t"),
}
"""Parts of names that make a column worth suggesting: a whole name of two letters, or a part of a longer one."""


def found_columns(header: Sequence[str], first_row: Sequence[str], named: Columns) -> Columns:
    """Return the columns that are named, and for the rest those that a header's names leave no doubt about."""
    found: dict[str, str] = {}
    for key, names in (("input_tokens", INPUT_NAMES), ("output_tokens", OUTPUT_NAMES)):
        matches = [name for name in header if _plain(name) in names]
        if getattr(named, key) is None and len(matches) == 1:
            found[key] = matches[0]
    times = [name for name in header if _without_unit(name) in ARRIVAL_NAMES]
    if not named.arrival and len(times) == 1:
        found[_clock_of(times[0], _cell(header, first_row, times[0]))] = times[0]
    return attrs.evolve(named, **found)


def suggested_columns(header: Sequence[str], first_row: Sequence[str], known: Columns) -> dict[str, str]:
    """Return a column for each key that a trace needs, to be checked by a person: those known, then likely names, then
    numbers in the order of the header. A key without a column left has the placeholder NAME.
    """
    taken = {key: name for key in ("input_tokens", "output_tokens") if (name := getattr(known, key)) is not None}
    arrival = known.arrival or {}
    free = [name for name in header if name not in {*taken.values(), *arrival.values()}]
    for key in _HINTS:
        if key in taken or (key == "arrival" and arrival):
            continue
        likely = [name for name in free if _resembles(name, _HINTS[key])]
        if likely:
            free.remove(likely[0])
            if key == "arrival":
                arrival = {_clock_of(likely[0], _cell(header, first_row, likely[0])): likely[0]}
            else:
                taken[key] = likely[0]
    numbers = [name for name in free if _COUNT(_cell(header, first_row, name))]
    for key in ("input_tokens", "output_tokens"):
        if key not in taken:
            taken[key] = numbers.pop(0) if numbers else "NAME"
    return {**arrival, **{key: taken[key] for key in ("input_tokens", "output_tokens")}}


_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII).fullmatch


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _without_unit(name: str) -> str:
    """Return a plain name without the unit that it ends with, as in arrival_time_ms."""
    words = re.split(r"[\s_-]", name.lower())
    return "".join(words[:-1] if len(words) > 1 and words[-1] in {unit for unit, _ in _UNITS} else words)


def _clock_of(name: str, cell: str) -> str:
    """Return the key of `Columns` for a column of times: by the unit in its name, else by its first value."""
    last = re.split(r"[\s_-]", name.lower())[-1]
    for unit, key in _UNITS:
        if last == unit:
            return key
    if instant_ns(cell) is not None:
        return "arrival_stamp"
    try:
        value = float(cell)
    except ValueError:
        return "arrival_s"
    return "arrival_ns" if value >= _EPOCH_NS else "arrival_ms" if value >= _EPOCH_MS else "arrival_s"


def _resembles(name: str, hints: Sequence[str]) -> bool:
    plain = _plain(name)
    return any(plain == hint if len(hint) <= 2 else hint in plain for hint in hints)


def _cell(header: Sequence[str], row: Sequence[str], name: str) -> str:
    position = header.index(name)
    return row[position].strip() if position < len(row) else ""
