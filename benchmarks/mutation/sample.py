"""A sample of bugs: drawn at random from all sites of one revision, with a seed that is the revision's hash."""

from __future__ import annotations

import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import attrs

from benchmarks.hand_bugs import HAND
from benchmarks.mutation.sites import LEFT_OUT, PACKAGES, Bug, sites

ROOT: Final = Path(__file__).resolve().parents[2]
TYPES: Final = """[mypy]
strict = true
explicit_package_bases = true
mypy_path = $MYPY_CONFIG_FILE_DIR
"""


@attrs.frozen(kw_only=True)
class Sample:
    """Bugs of one revision, in the order in which they were drawn."""

    revision: str
    """The full hash of the commit. Its first 16 digits are the seed."""
    sites: int
    """Number of changes that were considered."""
    refused: int
    """Number of changes that were drawn, and that mypy refuses: nobody would have committed them."""
    bugs: tuple[Bug, ...]

    def save(self, path: Path) -> None:
        lines = [json.dumps({"revision": self.revision, "sites": self.sites, "refused": self.refused})]
        lines += [json.dumps(attrs.asdict(bug)) for bug in self.bugs]
        path.write_text("\n".join(lines) + "\n")


def load(path: Path) -> Sample:
    head, *rest = (json.loads(line) for line in path.read_text().splitlines())
    bugs = tuple(Bug(**(bug | {"lines": tuple(bug["lines"])})) for bug in rest)
    return Sample(**head, bugs=bugs)


def considered(tree: Path) -> list[Bug]:
    """Return every change of a tree that is considered, by file and position."""
    found: list[Bug] = []
    for package in PACKAGES:
        for path in sorted((tree / "pdflow" / package).rglob("*.py")):
            file = path.relative_to(tree / "pdflow").as_posix()
            if not file.startswith(LEFT_OUT):
                found += sites(path, file)
    return found


def extract(revision: str, to: Path) -> None:
    """Write the packages and tests of a revision into an empty folder."""
    command = ["git", "-C", str(ROOT), "archive", revision]
    done = subprocess.run(command, capture_output=True, check=True)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(to, filter="data")


def draw(revision: str, count: int, tree: Path) -> Sample:
    """Draw bugs of a revision that was extracted into `tree`."""
    every = considered(tree)
    random.Random(int(revision[:16], 16)).shuffle(every)
    found: list[Bug] = []
    refused = 0
    with type_checker(tree) as accepts:
        for bug in every:
            if len(found) == count:
                break
            if accepts(bug):
                found.append(bug)
                sys.stderr.write(f"\r\033[K{len(found)} of {count}, {refused} refused by mypy")
                sys.stderr.flush()
            else:
                refused += 1
    sys.stderr.write("\n")
    return Sample(revision=revision, sites=len(every), refused=refused, bugs=tuple(found))


class TypeChecker:
    """mypy's daemon over a copy of the package, which sees one bug at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = time.time()
        self.dmypy = [str(Path(sys.executable).with_name("dmypy")), "--status-file", "status.json"]

    def run(self, *arguments: str) -> int:
        return subprocess.run([*self.dmypy, *arguments], cwd=self.folder, capture_output=True, check=False).returncode

    def __call__(self, bug: Bug) -> bool:
        """Return whether mypy accepts it. The copy is left as it was."""
        changed = self.folder / "pdflow" / bug.file
        source = changed.read_bytes()
        self._write(changed, bug.apply(source))
        accepted = self.check()
        self._write(changed, source)
        return accepted

    def _write(self, path: Path, source: bytes) -> None:
        """Write a file, with a time of its own: mypy takes a file of the same size and second for the same file."""
        path.write_bytes(source)
        self.seconds += 10
        os.utime(path, (self.seconds, self.seconds))

    def check(self) -> bool:
        code = self.run("check", *(f"pdflow/{package}" for package in PACKAGES))
        assert code in (0, 1), f"dmypy ended with {code}"
        return code == 0


@contextmanager
def type_checker(tree: Path) -> Iterator[TypeChecker]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(tree / "pdflow", folder / "pdflow", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        (folder / "mypy.ini").write_text(TYPES)
        checker = TypeChecker(folder)
        checker.run("start", "--", "--config-file", "mypy.ini", "--python-executable", sys.executable)
        try:
            assert checker.check(), "the revision itself has errors of types"
            yield checker
        finally:
            checker.run("stop")


def moved(bug: Bug, before: bytes, now: bytes) -> Bug | None:
    """Return the same change of a later source of its file; None if the lines that it changes have changed."""
    old, new = before.decode().splitlines(keepends=True), now.decode().splitlines(keepends=True)
    first, last = bug.lines[0] - 1, bug.lines[1]
    for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if block.a <= first and last <= block.a + block.size:
            by = block.b - block.a
            shift = sum(len(line.encode()) for line in new[: first + by]) - sum(
                len(line.encode()) for line in old[:first]
            )
            lines = (bug.lines[0] + by, bug.lines[1] + by)
            return attrs.evolve(bug, start=bug.start + shift, end=bug.end + shift, lines=lines)
    return None


def by_hand(tree: Path) -> tuple[Bug, ...]:
    """Return the bugs of benchmarks/hand_bugs.py."""
    found = []
    for name, path, old, new in HAND:
        file = f"protocol/{path}"
        source = (tree / "pdflow" / file).read_text()
        assert source.count(old) == 1, f"{file}: {old!r} stands there {source.count(old)} times"
        start = len(source[: source.index(old)].encode())
        first = source[: source.index(old)].count("\n") + 1
        lines = (first, first + old.rstrip("\n").count("\n"))
        found.append(Bug(file, start, start + len(old.encode()), new, name, "", lines))
    return tuple(found)


def diff(bug: Bug, source: bytes) -> str:
    """Return what is changed, without the head of a patch."""
    before, after = source.decode().splitlines(), bug.apply(source).decode().splitlines()
    lines = list(difflib.unified_diff(before, after, bug.file, bug.file, lineterm="", n=0))
    return "\n".join(lines[3:])
