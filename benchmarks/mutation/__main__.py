"""Bugs that nobody chose, and what notices them: python -m benchmarks.mutation COMMAND

    draw      draw a sample of bugs from a revision; its hash is the seed
    reach     make every search of `pdflow check all` of a revision once, and record its steps
    hunt      put each bug of the sample into a revision, and search until something is noticed
    tests     run the unit tests that execute the lines of each bug that no search notices
    page      write benchmarks/results/mutation.jsonl and docs/bugs.md from what has been hunted

Each command can be interrupted and continued. All write into a folder (--work), in which revisions are extracted too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.mutation.page import load_reasons, merged, write
from benchmarks.mutation.sample import ROOT, by_hand, draw, extract, load
from benchmarks.mutation.score import CHANGED, Reach, done_before, measure_reach, score, working_copy
from benchmarks.mutation.unit_tests import measure, run_for_survivors, tested_copy

BEFORE = "1139c5f5"
"""The last commit before the checker's net was widened."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("draw", "reach", "hunt", "tests", "page"))
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--drawn-from", default=BEFORE, metavar="REVISION", help=f"default: {BEFORE}")
    parser.add_argument("--revision", default="HEAD", help="the revision that is searched (default: HEAD)")
    parser.add_argument("--bugs", type=int, default=400, help="size of the sample (default: 400)")
    parser.add_argument("--hand", action="store_true", help="hunt the bugs of benchmarks/hand_bugs.py instead")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="hunt every N-th bug, from number K on")
    parser.add_argument(
        "--only", default="", metavar="TEXT,TEXT", help="reach: only searches with such a text in their names"
    )
    parser.add_argument(
        "--and",
        dest="others",
        action="append",
        default=[],
        metavar="REVISION",
        help="tests, page: a revision whose searches count too; for searches that --revision was not hunted with",
    )
    asked = parser.parse_args()
    work: Path = asked.work.resolve()
    drawn_from, before = tree_of(asked.drawn_from, work)
    sample = work / "sample.jsonl"
    if asked.command == "draw":
        draw(drawn_from, asked.bugs, before).save(sample)
        return 0
    revision, tree = tree_of(asked.revision, work)
    reach = work / f"reach-{revision[:8]}"
    if asked.command == "reach":
        measure_reach(tree, reach, asked.only)
        return 0
    tested = work / f"tests-{revision[:8]}.jsonl"
    late = together(hunted_in(work, each) for each in (revision, *asked.others))
    if asked.command == "page":
        early = hunted_in(work, drawn_from)
        tests = {bug: one["test"] for bug, one in done_before(tested).items()}
        write(merged(early, late if revision != drawn_from else (), tests))
        return 0
    if asked.command == "tests":
        equivalent = {bug for bug, reason in load_reasons().items() if "equivalent" in reason}
        survivors = [one["bug"] for one in late if one["caught"] == "" and one["bug"] not in equivalent]
        measured = work / f"tests-{revision[:8]}.json"
        copy = tested_copy(tree, work / f"tests-{revision[:8]}")
        if not measured.exists():
            measure(copy, measured)
        run_for_survivors(load(sample).bugs, survivors, before, copy, measured, tested)
        return 0
    turn, processes = map(int, asked.share.split("/"))
    copy = working_copy(tree, work / f"copy-{revision[:8]}-{turn}")
    results = work / f"{'hand' if asked.hand else 'hunt'}-{revision[:8]}-{turn}.jsonl"
    if asked.hand:
        score(by_hand(tree), tree, copy, Reach(reach), results, (turn, processes), {})
    else:
        noticed_by = all_noticed_by(work)
        score(load(sample).bugs, before, copy, Reach(reach), results, (turn, processes), noticed_by)
    return 0


def hunted_in(work: Path, revision: str) -> list[dict[str, Any]]:
    """Return the verdicts on a revision, of all processes that hunted."""
    paths = sorted(work.glob(f"hunt-{revision[:8]}-*.jsonl"))
    return [verdict for path in paths for verdict in done_before(path).values()]


def together(hunts: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one verdict on each bug that all hunts have: what one of them noticed it by, if one did. A revision that
    was not hunted with is passed over."""
    first, *others = [{one["bug"]: one for one in hunt} for hunt in hunts if hunt] or [{}]
    found = []
    for bug, verdict in first.items():
        verdicts = [verdict, *(hunt[bug] for hunt in others if bug in hunt)]
        if len(verdicts) == 1 + len(others):
            found.append(next((one for one in verdicts if one["caught"] not in ("", CHANGED)), verdict))
    return found


def all_noticed_by(work: Path) -> dict[int, set[str]]:
    """Return the searches that have noticed each bug of the sample, in whichever revision."""
    found: dict[int, set[str]] = {}
    for path in work.glob("hunt-*.jsonl"):
        for bug, verdict in done_before(path).items():
            if verdict["caught"]:
                found.setdefault(bug, set()).add(verdict.get("by", ""))
    return found


def tree_of(revision: str, work: Path) -> tuple[str, Path]:
    """Return the full hash of a revision, and the folder with its files."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{revision}^{{commit}}"]
    full = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    tree = work / f"tree-{full[:8]}"
    if not tree.exists():
        tree.mkdir(parents=True)
        extract(full, tree)
    return full, tree


if __name__ == "__main__":
    sys.exit(main())
