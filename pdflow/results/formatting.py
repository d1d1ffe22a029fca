"""Numbers as text for people: in fitting units, with three or four significant digits."""

from __future__ import annotations

import re
from typing import Final

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Characters that move a terminal's cursor, turn its text around, or cannot be encoded."""


def plain(text: str) -> str:
    """Return a name from an untrusted source as one line that is safe to print."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def count(number: int) -> str:
    """Format a count with its thousands separated: 50,000."""
    return f"{number:,}"


def decimals_for(largest: float) -> int:
    """Return the decimals with which a row of numbers up to `largest` shows about four digits."""
    return 3 if largest < 10 else 2 if largest < 100 else 1 if largest < 10_000 else 0


def number(value: float) -> str:
    """Format a number with about four digits, thousands separated."""
    return f"{value:,.{decimals_for(abs(value))}f}" if value else "0"


def percent(fraction: float) -> str:
    """Format a share as per cent, without rounding almost-all up to all or almost-none down to none."""
    value = fraction * 100
    if 99.95 <= value < 100:
        return "> 99.9 %"
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.0f} %" if value in (0.0, 100.0) else f"{value:.1f} %"


def size(amount: float) -> str:
    """Format bytes in powers of ten: 1.21 TB."""
    value, unit = float(amount), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value /= 1_000
        unit += 1
    if unit == 0:
        return f"{value:.0f} B"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {_UNITS[unit]}"


def duration(ns: int) -> str:
    """Format a duration: 12.3 s, 8 min 20 s, 1 h 44 min."""
    seconds = ns / 1e9
    if seconds < 100:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 6_000:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3_600:,} h {whole % 3_600 // 60} min"
