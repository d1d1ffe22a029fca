"""The scores of the sample: benchmarks/results/mutation.jsonl, and the section of docs/bugs.md made of it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Any, Final

from benchmarks.mutation.sample import ROOT
from benchmarks.mutation.score import CHANGED

RESULTS: Final = ROOT / "benchmarks" / "results" / "mutation.jsonl"
PAGE: Final = ROOT / "docs" / "bugs.md"
BEGIN: Final = "<!-- sample -->\n"
END: Final = "<!-- /sample -->"
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
    """Return a table of the scores by a key, with a row for all. A bug that was not tried on a revision counts in no
    score of it."""
    lines = [
        "| | bugs | equivalent | caught before | caught now | of the others, by a test |",
        "| --- | ---: | ---: | --- | --- | ---: |",
    ]
    for name in [*sorted({key(one) for one in verdicts}), "all"]:
        rows = [one for one in verdicts if name in (key(one), "all")]
        real = [one for one in rows if "equivalent" not in reasons.get(one["bug"], {})]
        scores = [_score(real, when) for when in ("before", "now")]
        tested = sum(bool(one["test"]) for one in real if one["now"] == "")
        lines.append(f"| {name} | {len(rows)} | {len(rows) - len(real)} | {scores[0]} | {scores[1]} | {tested} |")
    return lines


def _score(verdicts: list[Verdict], when: str) -> str:
    tried = [one[when] for one in verdicts if one[when] is not None and one[when] != CHANGED]
    return score_text(sum(caught != "" for caught in tried), len(tried))


def section(verdicts: list[Verdict], reasons: dict[int, dict[str, str]]) -> str:
    """Return the section of docs/bugs.md, in Markdown."""
    lines = [*table(verdicts, reasons, package_of), ""]
    lines += [*table(verdicts, reasons, lambda one: str(one["operator"])), ""]
    lines += ["| bug | function | change | noticed by |", "| ---: | --- | --- | --- |"]
    for one in verdicts:
        if one["now"] == "":
            reasons_text = ", ".join(f"{kind}: {text}" for kind, text in reasons.get(one["bug"], {}).items())
            why = one["test"] or reasons_text or "not explained yet"
            lines.append(f"| {one['bug']} | {one['function']} ({one['file']}) | {change(one['diff'])} | {why} |")
    return "\n".join(lines) + "\n"


def change(diff: str) -> str:
    """Return a diff in one cell of a table."""
    removed = [line[1:].strip() for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    old, new = (" ".join(lines).replace("|", "\\|")[:70] for lines in (removed, added))
    return f"`{old}`: `{new}`" if new else f"`{old}` dropped"


def merged(before: Iterable[Verdict], now: Iterable[Verdict], tests: dict[int, str]) -> list[Verdict]:
    """Join the verdicts of both revisions by bug; None where a bug has not been tried."""
    early, late = ({one["bug"]: one for one in verdicts} for verdicts in (before, now))
    found = []
    for bug in sorted({*early, *late}):
        first, second = early.get(bug), late.get(bug)
        row = {key: (first or second or {})[key] for key in ("bug", "file", "function", "operator", "diff")}
        row["before"], row["before_by"] = _of(first)
        row["now"], row["now_by"] = _of(second)
        found.append(row | {"test": tests.get(bug, "")})
    return found


def _of(verdict: Verdict | None) -> tuple[str | None, str]:
    return (None, "") if verdict is None else (verdict["caught"], verdict.get("by", ""))


def write(verdicts: list[Verdict]) -> None:
    """Write the results, and the section of the page."""
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in verdicts))
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert tail, f"{PAGE} has no section of the sample"
    PAGE.write_text(f"{head}{BEGIN}{section(verdicts, load_reasons())}{END}{tail}")
