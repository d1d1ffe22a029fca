"""Parsing of a trace's times to exact nanoseconds on the trace's own clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

from pdflow.protocol.values import MS, S

MOST_NS: Final = 1 << 62
"""Seconds since 1970 in nanoseconds are within it, with a hundred years to come."""

_STAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?", re.ASCII
).fullmatch
_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DECIMAL = re.compile(r"(\d{1,13})(?:\.(\d{0,40}))?", re.ASCII).fullmatch
_SCIENTIFIC = re.compile(r"\d{1,12}(?:\.\d{0,40})?[eE][+-]?\d\d?", re.ASCII).fullmatch
_WHOLE = re.compile(r"\d{1,19}", re.ASCII).fullmatch


def instant_ns(stamp: str) -> int | None:
    """Parse a time stamp to exact ns since 1 March of year 0, in UTC if it names a zone; None if it is none.

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


def seconds_ns(text: str) -> int | None:
    """Parse a decimal number of seconds, to the nearest nanosecond; None if it is none or negative."""
    return _scaled(text, S)


def milliseconds_ns(text: str) -> int | None:
    """Parse a decimal number of milliseconds, to the nearest nanosecond; None if it is none or negative."""
    return _scaled(text, MS)


def nanoseconds_ns(text: str) -> int | None:
    """Parse a whole number of nanoseconds."""
    return int(text) if _WHOLE(text) and int(text) <= MOST_NS else None


def _scaled(text: str, unit_ns: int) -> int | None:
    match = _DECIMAL(text)
    if match is not None:
        fraction = match[2] or ""
        at = int(match[1]) * unit_ns + (2 * int(fraction or 0) * unit_ns + 10 ** len(fraction)) // (
            2 * 10 ** len(fraction)
        )
    elif _SCIENTIFIC(text):
        at = round(Fraction(text) * unit_ns)
    else:
        return None
    return at if at <= MOST_NS else None


CLOCKS: Final[Mapping[str, tuple[Callable[[str], int | None], str]]] = {
    "arrival_s": (seconds_ns, "seconds such as 17.25"),
    "arrival_ms": (milliseconds_ns, "milliseconds such as 17250"),
    "arrival_ns": (nanoseconds_ns, "a whole number of nanoseconds"),
    "arrival_stamp": (instant_ns, "a time such as 2023-11-16 18:17:03.9799600"),
}
"""The parser of a column of times, by the key that names the column, and the form that it expects."""
