"""What else notices the bugs that no search notices: the unit tests that execute their lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.mutation.sample import moved
from benchmarks.mutation.score import done_before, python, span
from benchmarks.mutation.sites import Bug

TESTED: Final = ("tests/protocol", "tests/routing", "tests/serving", "tests/methods", "tests/wiring")
OTHER_TESTS: Final = ("tests/sim", "tests/check/datapath")
"""Tests that are tried when those fail to notice it."""
CONFIGURATION: Final = """[run]
source = pdflow
dynamic_context = test_function
"""
PYTEST: Final = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not nightly")
HOURS_S: Final = 1_800.0


def measure(tree: Path, path: Path) -> None:
    """Run the unit tests of a tree once; write which of them execute which lines."""
    settings = tree / ".coveragerc-mutation"
    settings.write_text(CONFIGURATION)
    data = path.with_suffix(".coverage")
    command = ["-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={data}"]
    subprocess.run(
        [sys.executable, *command, *PYTEST[:-2], "-m", "not nightly", *TESTED],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": f"{tree}:{tree}/sim:{tree}/runtime"},
        check=True,
    )
    path.write_text(json.dumps(_contexts(tree, data)))


def _contexts(tree: Path, data: Path) -> dict[str, dict[str, list[str]]]:
    from coverage import CoverageData

    read = CoverageData(str(data))
    read.read()
    folder = (tree / "pdflow").resolve()
    found = {}
    for file in read.measured_files():
        by_line = {str(line): [name for name in names if name] for line, names in read.contexts_by_lineno(file).items()}
        found[Path(file).relative_to(folder).as_posix()] = by_line
    return found


def node_ids(tree: Path, contexts: Iterable[str]) -> list[str]:
    """Return the ids for pytest of tests by their contexts, such as "tests.protocol.test_cells.test_done"."""
    found = []
    for context in contexts:
        names = context.split(".")
        for end in range(len(names) - 1, 0, -1):
            file = Path(*names[:end]).with_suffix(".py")
            if (tree / file).is_file():
                found.append("::".join([file.as_posix(), *names[end:]]))
                break
    return found


def first_failure(tree: Path, arguments: Iterable[str]) -> str:
    """Return the first of these tests that fails in a tree, or "" if none does."""
    try:
        python(tree, *PYTEST, *arguments, timeout_s=HOURS_S)
    except subprocess.TimeoutExpired:
        return "never ends"
    except subprocess.CalledProcessError as error:
        lines: list[str] = (error.stdout or "").splitlines()
        return next((line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))), "crash")
    return ""


def noticed(tree: Path, tests: dict[str, Any], file: str, lines: Iterable[int]) -> str:
    """Return the test that notices the bug of a tree, which is in these lines, or "" if none does."""
    by_line = tests.get(file, {})
    contexts = sorted({name for line in lines for name in by_line.get(str(line), ())})
    ids = node_ids(tree, contexts)
    return (first_failure(tree, ids) if ids else "") or first_failure(tree, OTHER_TESTS)


def run_for_survivors(bugs: Sequence[Bug], survivors: Iterable[int], before: Path, tree: Path, results: Path) -> None:
    """Run the tests of each of these bugs that has no verdict yet, and append which test notices it.

    Args:
        before: the tree from which the bugs were drawn.
        tree: the tree that is changed.
    """
    contexts = tree / "tests.json"
    if not contexts.exists():
        measure(tree, contexts)
    tests = json.loads(contexts.read_text())
    known = done_before(results)
    for number in survivors:
        bug = bugs[number]
        path = tree / "pdflow" / bug.file
        source, old = path.read_bytes(), path.stat()
        now = moved(bug, (before / "pdflow" / bug.file).read_bytes(), source)
        if number in known or now is None:
            continue
        path.write_bytes(now.apply(source))
        # A cached .pyc of the same size and second would be taken for this file's.
        os.utime(path, (old.st_atime + 10, old.st_mtime + 10))
        try:
            test = noticed(tree, tests, bug.file, span(now, source))
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        with results.open("a") as out:
            out.write(json.dumps({"bug": number, "test": test}) + "\n")
        print(f"{number}: {test or 'survives'}", flush=True)
