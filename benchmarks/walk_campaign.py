"""Many random walks over several sittings: python benchmarks/walk_campaign.py FILE [--until SEED] [--jobs N]

Walks the seeds from 0 on, in batches of 200,000, in each of which the seeds of a cluster follow each other. FILE gets
one line of JSON per batch: its seeds, runs, moves, CPU seconds, the commit, and how often each invariant broke. A
further call goes on where FILE ends; Ctrl-C loses the batch that is under way, and nothing else. The commit of a tree
with uncommitted changes is marked with "+". With --again, batches in which something broke are walked again, once it
is repaired; their lines then say what was `found` before. With --summary OUT the totals of FILE are written, and
nothing is walked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pdflow.protocol.dialect import DIALECTS
from pdflow_sim.check.scopes.fields import described
from pdflow_sim.check.search.campaign import WalkTask, walks
from pdflow_sim.check.search.swarm import ERA

ROOT = Path(__file__).resolve().parents[1]
BATCH = ERA
"""Seeds of one line."""
UNTIL = 10_000_000
"""Seeds of a whole campaign."""
SUMMED = ("runs", "wide_runs", "moves", "cpu_s", "wide_cpu_s")


class CampaignError(Exception):
    """A file that no campaign has written, or one of another dialect."""


def lines_of(file: Path, dialect: str) -> list[dict[str, Any]]:
    """Return the batches that a file has. Raises CampaignError."""
    lines: list[dict[str, Any]] = []
    texts = file.read_text().splitlines() if file.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            first = line["first_seed"]
        except (ValueError, TypeError, KeyError):
            raise CampaignError(f"{file}:{number}: is no line of a campaign; remove it") from None
        if line["dialect"] != dialect:
            raise CampaignError(f"{file}:{number}: is of {line['dialect']}, not of {dialect}")
        if first != (lines[-1]["next_seed"] if lines else 0):
            raise CampaignError(f"{file}:{number}: begins at seed {first}, which is not where the line before ended")
        lines.append(line)
    return lines


def commit() -> str:
    """Return the commit of this tree, with "+" if something in it is not committed; "" outside of a repository."""
    try:
        head, changes = (_git("rev-parse", "--short=10", "HEAD"), _git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + "+" * bool(changes)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def batch(dialect: str, seeds: range, jobs: int) -> dict[str, Any]:
    """Walk these seeds, and return their line."""
    found = walks(WalkTask(dialect=DIALECTS[dialect]), seeds, jobs=jobs, grouped=True)
    failures = [
        {"seed": each.seed, "invariant": each.invariant, "what": each.what, "scope": described(each.scope)}
        for each in found.failures.values()
    ]
    return {
        "dialect": dialect,
        "first_seed": seeds[0],
        "next_seed": seeds[-1] + 1,
        "runs": found.runs,
        "wide_runs": found.wide_runs,
        "moves": found.moves,
        "cpu_s": round(found.cpu_s, 1),
        "wide_cpu_s": round(found.wide_cpu_s, 1),
        "commit": commit(),
        "broken": found.broken,
        "failures": failures,
    }


def walk_again(file: Path, lines: list[dict[str, Any]], jobs: int) -> None:
    """Walk the batches in which something broke, and replace their lines. What they found is kept in `found`."""
    for at, line in enumerate(lines):
        if line["broken"]:
            found = [*line.get("found", []), {name: line[name] for name in ("commit", "broken", "failures")}]
            new = batch(line["dialect"], range(line["first_seed"], line["next_seed"]), jobs)
            lines[at] = {**new, "found": found}
            file.write_text("".join(json.dumps(each) + "\n" for each in lines))
            print(f"seeds {line['first_seed']:,} to {line['next_seed'] - 1:,}: {new['broken'] or 'nothing broken'}")


def summary(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the totals of a campaign, and the seeds of each commit."""
    lines = list(lines)
    broken: Counter[str] = Counter()
    found = [failure for line in lines for earlier in line.get("found", []) for failure in earlier["failures"]]
    commits: list[dict[str, Any]] = []
    for line in lines:
        broken.update(line["broken"])
        if not commits or commits[-1]["commit"] != line["commit"]:
            commits.append({"commit": line["commit"], "first_seed": line["first_seed"]})
        commits[-1]["next_seed"] = line["next_seed"]
    totals: dict[str, Any] = {name: sum(line[name] for line in lines) for name in SUMMED}
    return {
        "dialect": lines[0]["dialect"] if lines else "",
        **{name: round(total, 1) for name, total in totals.items()},
        "broken": dict(broken),
        "found": found,
        "commits": commits,
    }


def main(arguments: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("file", type=Path)
    parser.add_argument("--dialect", choices=("strict", "vllm-compat"), default="strict")
    parser.add_argument("--until", type=int, default=UNTIL, help="the seed before which the campaign ends")
    parser.add_argument("--batch", type=int, default=BATCH, help="seeds of one line")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="walk the batches again in which something broke")
    parser.add_argument("--summary", type=Path, help="write the totals to this file, and walk nothing")
    options = parser.parse_args(arguments)
    try:
        lines = lines_of(options.file, options.dialect)
    except CampaignError as error:
        sys.exit(str(error))
    if options.summary is not None:
        options.summary.write_text(json.dumps(summary(lines), indent=1) + "\n")
        return 0
    if options.again:
        walk_again(options.file, lines, options.jobs)
        return int(any(line["broken"] for line in lines))
    seed = lines[-1]["next_seed"] if lines else 0
    while seed < options.until:
        began = time.monotonic()
        try:
            line = batch(options.dialect, range(seed, min(seed + options.batch, options.until)), options.jobs)
        except KeyboardInterrupt:
            print(f"interrupted; the next call goes on at seed {seed:,}")
            return 130
        with options.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        seed = line["next_seed"]
        broken = line["broken"] or "nothing broken"
        print(
            f"{seed:,} of {options.until:,} seeds; the last in {time.monotonic() - began:,.0f} s; {broken}", flush=True
        )
        lines.append(line)
    return int(any(line["broken"] for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
