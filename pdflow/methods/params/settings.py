"""The kinds of values that configuration files are made of, as lenient as the originals' readers.

vLLM's examples write numbers as texts ("kv_port": "21001", "kv_buffer_size": "8e9"), which pydantic and int() read, and
Mooncake's sizes may have a unit ("4gb", powers of 1024). This module reads what they would read. true and false are
never numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pdflow.methods.params.address import AddressError, split_address
from pdflow.methods.params.errors import ParamsError, shown
from pdflow.methods.params.fields import Kind, mapping
from pdflow.methods.params.kinds import bounded_text, integer, text, within
from pdflow.protocol.wire.checks import Problem
from pdflow.protocol.wire.limits import MAX_NAME_BYTES, MAX_U63

MAX_FILE_CHARS: Final = 1 << 16
"""The most characters of one configuration text. A real one has a few hundred."""

_NUMBER: Final = re.compile(r"\s*(\d{1,20}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?)\s*(b|kb|mb|gb)?\s*\Z", re.ASCII | re.I)
_UNITS: Final = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def loaded(source: object, location: str) -> Mapping[Any, Any]:
    """Return the JSON object that a text holds, or the mapping that the caller has already read from one."""
    if not isinstance(source, (str, bytes)):
        return mapping(source, location)
    if len(source) > MAX_FILE_CHARS:
        raise ParamsError(location, f"has {len(source):,} characters", f"at most {MAX_FILE_CHARS:,}")
    try:
        found = msgspec.json.decode(source)
    except (ValueError, RecursionError) as error:
        # ValueError is every error of msgspec and UTF-8; RecursionError is nesting without end.
        reason = "".join(c if c.isprintable() else "?" for c in str(error)[:100])
        raise ParamsError(location, f"is not JSON ({reason})", "a JSON object") from None
    return mapping(found, location)


def _number(value: Any, units: bool = False) -> Any:
    """Return the number that a text holds, exactly if it is whole; anything else as it is."""
    if not isinstance(value, str) or len(value) > MAX_NAME_BYTES:
        return value
    match = _NUMBER.match(value)
    if match is None or (match[2] and not units):
        return value
    digits, unit = match[1], _UNITS[(match[2] or "").lower()]
    return int(digits) * unit if digits.isdigit() else float(digits) * unit


def _whole(value: Any) -> Any:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _bytes(value: Any, units: bool = False) -> Any:
    number = _number(value, units)
    return int(number) if isinstance(number, float) and math.isfinite(number) else number


def _optional(value: Any) -> Any:
    """Return None for the originals' empty text; any other value as `_whole` reads it."""
    return None if value == "" else _whole(value)


def _truth(value: Any) -> Problem:
    return "" if isinstance(value, bool) else f"is {shown(value)}"


def _amount(value: Any) -> Problem:
    real = type(value) is int or type(value) is float
    return "" if real and 0 < value <= MAX_U63 else f"is {shown(value)}"


def whole(low: int, high: int) -> Kind:
    exact = integer(low, high)
    return Kind(expected=exact.expected, problem=exact.problem, freeze=_whole)


def size(low: int, *, units: bool = False) -> Kind:
    return Kind(
        expected=f"bytes, at least {low}" + (", perhaps with kb, mb or gb" if units else ""),
        problem=lambda value: within(value, low, MAX_U63),
        freeze=lambda value: _bytes(value, units),
    )


def choice(*names: str) -> Kind:
    return Kind(
        expected="one of " + ", ".join(f'"{name}"' for name in names),
        problem=lambda value: "" if isinstance(value, str) and value in names else f"is {shown(value)}",
    )


def _free(value: Any) -> Problem:
    return "" if value == "" else bounded_text(value, MAX_NAME_BYTES)


def _host_port(value: Any) -> Problem:
    problem = bounded_text(value, 2 * MAX_NAME_BYTES)
    if problem:
        return problem
    try:
        split_address(value)
    except AddressError as error:
        return f"is {shown(value)}: {error}"
    return ""


def _names(value: Any) -> Problem:
    if not isinstance(value, tuple) or not 0 < len(value) <= 64:
        return f"is {shown(value)}"
    return next((f"holds an entry that {wrong}" for name in value if (wrong := bounded_text(name, MAX_NAME_BYTES))), "")


TRUTH = Kind(expected="true or false", problem=_truth)
AMOUNT = Kind(expected="a number above 0", problem=_amount, freeze=_number)
TEXT = text("a string", MAX_NAME_BYTES)
MAYBE_EMPTY = Kind(expected=f"a string of at most {MAX_NAME_BYTES} bytes, perhaps empty", problem=_free)
PORT = whole(1, 65_535)
MAYBE_PORT = Kind(expected=PORT.expected, problem=PORT.problem, freeze=_optional)
TIMEOUT = Kind(expected="a number of seconds above 0", problem=_amount, freeze=_number)
ADDRESS = Kind(expected="HOST:PORT", problem=_host_port)
NAMES = Kind(
    expected="a list of 1 to 64 strings",
    problem=_names,
    freeze=lambda value: tuple(value) if isinstance(value, list) else value,
    thaw=list,
)
