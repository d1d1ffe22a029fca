"""What the searches notice of a sample of bugs, bug by bug: resumable, one line of JSON for each bug.

Of a bug, only those searches are made that execute its lines, by `inside.reach`: first those that have noticed it in
another revision, then the quick ones, then the walks.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.mutation.sample import diff, moved
from benchmarks.mutation.sites import Bug

INSIDE: Final = Path(__file__).with_name("inside.py")
QUICK_S: Final = 2.0
"""Searches that take less come before the walks."""
CHANGED: Final = "changed since"
"""The verdict of a bug whose lines the scored revision does not have any more."""
FIXED: Final = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
"""Steps that are recorded in one process are tried in another, where sets have to have the same order."""
HUNT_S: Final = 3_600.0


def python(tree: Path, *arguments: str, given: str = "", timeout_s: float | None = None) -> str:
    """Run a script in a tree, and return what it prints."""
    environment = (
        os.environ | {"PYTHONPATH": f"{tree}:{tree}/sim:{tree}/runtime", "PYTHONDONTWRITEBYTECODE": "1"} | FIXED
    )
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    return done.stdout


def measure_reach(tree: Path, folder: Path, only: str) -> None:
    """Make every search of a tree with one of these texts, between commas, in its name. The folder gets its steps, and
    index.json."""
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(python(tree, str(INSIDE), "reach", str(folder), only))


class Reach:
    """Which searches execute which lines, and what each costs."""

    def __init__(self, folder: Path) -> None:
        self.searches: dict[str, Any] = json.loads((folder / "index.json").read_text())

    def order(self, file: str, lines: range, noticed_by: Container[str] = ()) -> list[dict[str, Any]]:
        """Return the searches that execute lines of a file: those of `noticed_by`, the quick ones, the walks, the
        others."""
        wanted = set(lines)
        found = []
        for name, search in self.searches.items():
            outside = not wanted.isdisjoint(search["outside"].get(file, ()))
            if outside or not wanted.isdisjoint(search["inside"].get(file, ())):
                kept = {key: search[key] for key in ("seconds", "counts", "path")}
                found.append({"name": name, "outside": outside, **kept})

        def rank(search: dict[str, Any]) -> tuple[bool, int, float]:
            name, seconds = search["name"], search["seconds"]
            kind = 1 if name.startswith("walks") else 0 if seconds < QUICK_S else 2
            return name not in noticed_by, kind, seconds

        return sorted(found, key=rank)


def span(bug: Bug, source: bytes) -> range:
    """Return the lines of the innermost statement around a bug; of a compound one, its head and what is changed."""
    first, last = bug.lines
    statements = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= first and last <= (node.end_lineno or node.lineno)
    ]
    inner = max(statements, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(inner, "body", None)
    if isinstance(body, list):
        return range(inner.lineno, max(last, body[0].lineno - 1) + 1)
    return range(inner.lineno, (inner.end_lineno or last) + 1)


def done_before(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a file of verdicts by the bugs' numbers; a line that an interrupt broke off is dropped."""
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                verdict = json.loads(line)
            except ValueError:
                continue
            found[verdict["bug"]] = verdict
    return found


def hunted(bug: Bug, tree: Path, reach: Reach, noticed_by: Container[str]) -> dict[str, Any]:
    """Return what notices a bug of this tree, which is left as it was. The searches of `noticed_by` come first."""
    changed = tree / "pdflow" / bug.file
    source, old = changed.read_bytes(), changed.stat()
    lines = span(bug, source)
    given = {"order": reach.order(bug.file, lines, noticed_by), "file": bug.file, "lines": [*lines]}
    if not given["order"]:
        return {"caught": "", "tried": 0}
    changed.write_bytes(bug.apply(source))
    # A cached .pyc of the same size and second would be taken for this file's.
    os.utime(changed, (old.st_atime + 10, old.st_mtime + 10))
    try:
        answer = python(tree, str(INSIDE), "hunt", given=json.dumps(given), timeout_s=HUNT_S)
    except subprocess.TimeoutExpired:
        return {"caught": "never ends"}
    except subprocess.CalledProcessError as error:
        return {"caught": "crash", "by": "import", "what": str(error.returncode)}
    finally:
        changed.write_bytes(source)
        os.utime(changed, ns=(old.st_atime_ns, old.st_mtime_ns))
    verdict: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return verdict


def score(
    bugs: tuple[Bug, ...],
    before: Path,
    tree: Path,
    reach: Reach,
    results: Path,
    share: tuple[int, int],
    noticed_by: Mapping[int, Container[str]],
) -> None:
    """Hunt every bug that has no verdict yet, and append its verdict.

    Args:
        before: the tree from which the bugs were drawn.
        tree: the tree that is changed.
        share: (k, n): every n-th bug only, from the k-th on, for n processes with a tree and a file each.
        noticed_by: by bug, the searches that have noticed it in other revisions.
    """
    known = done_before(results)
    turn, processes = share
    for number, bug in enumerate(bugs):
        if number in known or number % processes != turn:
            continue
        old = (before / "pdflow" / bug.file).read_bytes()
        file = tree / "pdflow" / bug.file
        now = moved(bug, old, file.read_bytes()) if file.exists() else None
        verdict = {"caught": CHANGED} if now is None else hunted(now, tree, reach, noticed_by.get(number, ()))
        line = {"bug": number, **verdict, "file": bug.file, "function": bug.function, "operator": bug.operator}
        line["diff"] = diff(bug, old)
        with results.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(f"{number}: {bug.file} {bug.function}: {verdict['caught'] or 'survives'}", flush=True)


def working_copy(tree: Path, to: Path) -> Path:
    """Copy the packages of a tree, for one process that changes them, and compile them."""
    shutil.rmtree(to, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for package in ("pdflow", "sim", "runtime"):
        shutil.copytree(tree / package, to / package, ignore=ignored)
    shutil.copy(tree / "pyproject.toml", to)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "pdflow", "sim"], cwd=to, check=True)
    return to
