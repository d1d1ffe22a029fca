"""Latencies of some requests on a real engine, read from a CSV file."""

from __future__ import annotations

import csv
import io
from math import inf, isfinite
from pathlib import Path

import attrs

from pdflow.errors import Problem, ScenarioError

TTFT, TPOT = "ttft_ms", "tpot_ms"


@attrs.frozen
class MeasuredRequest:
    """The measured latencies of one request of the workload, counted from 0 by arrival; None where nothing was
    measured.
    """

    request: int
    ttft_ms: float | None
    tpot_ms: float | None


def read_seen(path: Path, most: int) -> list[MeasuredRequest]:
    """Read a CSV file with the columns request, ttft_ms and tpot_ms, of which one of the last two may be absent or
    empty.

    `most`: requests of the workload. Raises ScenarioError with every bad line.
    """
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")))
        columns, rows = set(reader.fieldnames or ()), [(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as cause:
        raise ScenarioError([Problem(str(path), "", f"cannot be read: {cause}")]) from cause
    if "request" not in columns or not columns & {TTFT, TPOT}:
        raise ScenarioError(
            [Problem(f"{path}:1", "", f"expected the columns request, {TTFT} and {TPOT}, or one of the two")]
        )
    problems: list[Problem] = []
    seen: dict[int, MeasuredRequest] = {}
    for line, row in rows:
        location = f"{path}:{line}"
        number = str(row["request"] or "").strip()
        if not number.isdecimal() or int(number) >= most:
            problems.append(Problem(location, "request", f"{number!r}, expected a number below {most}"))
            continue
        if int(number) in seen:
            problems.append(Problem(location, "request", f"request {number} occurs twice"))
        values = [_positive(row.get(column), location, column, problems) for column in (TTFT, TPOT)]
        seen[int(number)] = MeasuredRequest(int(number), *values)
    if not seen and not problems:
        problems.append(Problem(str(path), "", "has no requests"))
    if problems:
        raise ScenarioError(problems)
    return list(seen.values())


def _positive(text: str | None, location: str, column: str, problems: list[Problem]) -> float | None:
    if text is None or not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not (isfinite(value) and value > 0):
        problems.append(Problem(location, column, f"{text!r}, expected milliseconds above 0"))
        return None
    return value
