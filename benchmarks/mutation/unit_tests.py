"""What else notices the bugs that no search notices: the unit and simulator tests that execute their lines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks.mutation.by_test import SECONDS_FILE
from benchmarks.mutation.sample import moved
from benchmarks.mutation.score import done_before, python, span
from benchmarks.mutation.sites import Bug

FOLDERS: Final = ("protocol", "routing", "serving", "methods", "wiring", "results", "faults", "sim", "check/datapath")
CONFIGURATION: Final = """[run]
source = pdflow
"""
PYTEST: Final = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not nightly")
BUDGET_S: Final = 120.0
"""The tests of one bug, the quickest first, take so long without the bug at most."""
SLOW: Final = 5
"""Tests that use this many times their time are stopped: the bug never ends."""
START_S: Final = 60.0
HERE: Final = Path(__file__).parent
ByLine: TypeAlias = dict[str, dict[str, list[str]]]
"""By file of pdflow and line, the tests that execute it."""


def measure(tree: Path, path: Path) -> None:
    """Run these tests of a tree once; write which of them execute which lines, and how long each takes."""
    settings, data, seconds = (path.with_suffix(suffix) for suffix in (".coveragerc", ".coverage", ".seconds"))
    settings.write_text(CONFIGURATION)
    command = ["-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={data}", *PYTEST]
    subprocess.run(
        [sys.executable, *command, "-p", "by_test", *(f"tests/{folder}" for folder in FOLDERS)],
        cwd=tree,
        env=os.environ
        | {
            "PYTHONPATH": f"{tree}:{tree}/sim:{tree}/runtime:{HERE}",
            "HYPOTHESIS_PROFILE": "ci",
            SECONDS_FILE: str(seconds),
        },
        check=True,
    )
    path.write_text(json.dumps({"seconds": json.loads(seconds.read_text()), "tests": _by_line(tree, data)}))


def _by_line(tree: Path, data: Path) -> ByLine:
    from coverage import CoverageData

    read = CoverageData(str(data))
    read.read()
    folder = (tree / "pdflow").resolve()
    found = {}
    for file in read.measured_files():
        by_line = {str(line): [name for name in names if name] for line, names in read.contexts_by_lineno(file).items()}
        found[Path(file).relative_to(folder).as_posix()] = by_line
    return found


def chosen(measured: dict[str, Any], file: str, lines: Iterable[int]) -> tuple[list[str], float]:
    """Return the tests that execute these lines, the quickest first, and what they take, within BUDGET_S."""
    by_line = measured["tests"].get(file, {})
    seconds: dict[str, float] = measured["seconds"]
    found = {name for line in lines for name in by_line.get(str(line), ()) if name in seconds}
    taken, total = [], 0.0
    for name in sorted(found, key=lambda name: (seconds[name], name)):
        if total + seconds[name] > BUDGET_S:
            break
        taken.append(name)
        total += seconds[name]
    return taken, total


def first_failure(tree: Path, ids: Iterable[str], timeout_s: float) -> str:
    """Return the first of these tests that fails in a tree, or "" if none does."""
    try:
        python(tree, *PYTEST, "-x", *ids, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return "never ends"
    except subprocess.CalledProcessError as error:
        lines: list[str] = (error.stdout or "").splitlines()
        return next((line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))), "crash")
    return ""


def run_for_survivors(
    bugs: Sequence[Bug], survivors: Iterable[int], before: Path, tree: Path, measured: Path, results: Path
) -> None:
    """Run the tests of each of these bugs that has no verdict yet, and append which test notices it.

    Args:
        before: the tree from which the bugs were drawn.
        tree: the tree that is changed.
        measured: what `measure` wrote of that tree.
    """
    tests = json.loads(measured.read_text())
    known = done_before(results)
    for number in survivors:
        bug = bugs[number]
        path = tree / "pdflow" / bug.file
        source, old = path.read_bytes(), path.stat()
        now = moved(bug, (before / "pdflow" / bug.file).read_bytes(), source)
        if number in known or now is None:
            continue
        names, seconds = chosen(tests, bug.file, span(now, source))
        path.write_bytes(now.apply(source))
        # A cached .pyc of the same size and second would be taken for this file's.
        os.utime(path, (old.st_atime + 10, old.st_mtime + 10))
        try:
            test = first_failure(tree, names, SLOW * seconds + START_S) if names else ""
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        with results.open("a") as out:
            out.write(json.dumps({"bug": number, "test": test, "tests": len(names)}) + "\n")
        print(f"{number}: {test or f'survives {len(names)} tests'}", flush=True)


def tested_copy(tree: Path, to: Path) -> Path:
    """Copy a tree whole, for tests that read its examples and pages."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(tree, to, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return to
