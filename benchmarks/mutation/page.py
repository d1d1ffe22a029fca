"""The scores of the sample: benchmarks/results/mutation.jsonl, and the section of docs/bugs.md made of it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Any, Final

from benchmarks.mutation.sample import ROOT

RESULTS: Final = ROOT / "benchmarks" / "results" / "mutation.jsonl"
REASONS: Final = Path(__file__).with_name("reasons.toml")
Z: Final = 1.96
"""Of a confidence of 95 %."""
Verdict = dict[str, Any]


def interval(hits: int, of: int) -> tuple[float, float]:
    """Return Wilson's interval of a share, with a confidence of 95 %."""
    if not of:
        return 0.0, 1.0
    share, square = hits / of, Z * Z / of
    middle, half = share + square / 2, Z * sqrt((share * (1 - share) + square / 4) / of)
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


def score_text(hits: int, of: int) -> str:
    """Return a share with its interval, such as "31 of 50 (62 %, 48 to 74 %)"."""
    if not of:
        return "-"
    low, high = interval(hits, of)
    return f"{hits} of {of} ({hits / of:.0%}, {low:.0%} to {high:.0%})".replace("%", " %")


def load_results() -> list[Verdict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def load_reasons() -> dict[int, dict[str, str]]:
    """Return what is known of bugs that no search notices, by number: "equivalent", with a proof, or "missed"."""
    return {each.pop("bug"): each for each in tomllib.loads(REASONS.read_text()).get("survivor", [])}


def package_of(verdict: Verdict) -> str:
    file: str = verdict["file"]
    package = file.split("/")[0]
    return "protocol, codecs" if file.startswith("protocol/wire/") else package


def table(verdicts: list[Verdict], reasons: dict[int, dict[str, str]], key: Callable[[Verdict], str]) -> list[str]:
    """Return a table of the scores by a key, with a row for all."""
    lines = [
        "| | bugs | equivalent | caught before | caught now | by a test | survive |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for name in [*sorted({key(one) for one in verdicts}), "all"]:
        rows = [one for one in verdicts if name in (key(one), "all")]
        equal = [one for one in rows if "equivalent" in reasons.get(one["bug"], {})]
        real = [one for one in rows if one not in equal]
        before, now = sum(bool(one["before"]) for one in real), sum(bool(one["now"]) for one in real)
        tested = sum(bool(one.get("test")) for one in real if not one["now"])
        left = len(real) - now - tested
        lines.append(
            f"| {name} | {len(rows)} | {len(equal)} | {score_text(before, len(real))} | {score_text(now, len(real))} "
            f"| {tested} | {left} |"
        )
    return lines


def section(verdicts: list[Verdict], reasons: dict[int, dict[str, str]]) -> str:
    """Return the section of docs/bugs.md, in Markdown."""
    lines = [*table(verdicts, reasons, package_of), ""]
    lines += [*table(verdicts, reasons, lambda one: str(one["operator"])), ""]
    lines += ["| bug | function | change | noticed by |", "| ---: | --- | --- | --- |"]
    for one in verdicts:
        if not one["now"]:
            reason = reasons.get(one["bug"], {})
            why = (
                one.get("test") or ", ".join(f"{kind}: {text}" for kind, text in reason.items()) or "not explained yet"
            )
            lines.append(f"| {one['bug']} | {one['function']} ({one['file']}) | {change(one['diff'])} | {why} |")
    return "\n".join(lines) + "\n"


def change(diff: str) -> str:
    """Return a diff in one cell of a table."""
    removed = [line[1:].strip() for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    old, new = (" ".join(lines).replace("|", "\\|")[:70] for lines in (removed, added))
    return f"`{old}`: `{new}`" if new else f"`{old}` dropped"


def merged(before: Iterable[Verdict], now: Iterable[Verdict], tests: dict[int, str]) -> list[Verdict]:
    """Join the verdicts of both revisions by bug. Bugs that only one has been tried on are left out."""
    late = {one["bug"]: one for one in now}
    found = []
    for one in sorted(before, key=lambda one: int(one["bug"])):
        other = late.get(one["bug"])
        if other is not None:
            row = {key: one[key] for key in ("bug", "file", "function", "operator", "diff")}
            row |= {"before": one["caught"], "before_by": one.get("by", ""), "now": other["caught"]}
            row |= {"now_by": other.get("by", ""), "test": tests.get(one["bug"], "")}
            found.append(row)
    return found
