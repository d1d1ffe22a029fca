"""Bugs that nobody chose, and what catches them: python benchmarks/mutate.py [--seed N] [--bugs N] [--hand]

Draws places of the core's source at random, changes each alone in a copy of the packages, and lets
`sim/pdflow_sim/check` look for up to a minute: the smaller scopes, random walks of both dialects, then the larger
scopes. `--hand` takes those of benchmarks/hand_bugs.py instead. docs/bugs.md is what it said. The copies are the only
place where anything is changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
CORE = "pdflow/protocol"
FILE_PATTERNS = ("producer/*.py", "consumer/*.py", "peers.py")
UNTOUCHED = ("fork", "fingerprint", "armed")
"""What only the checker calls: it would be the checker that is changed."""
SMALL_STATES = 17_000
WALK_S = 16.0


@attrs.frozen
class Bug:
    """One change of one file."""

    file: str
    start: int
    """In bytes of the file, as `end`."""
    end: int
    text: str
    what: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(what is done, the node's new text), for every way in which this node may be wrong."""
    match node:
        case ast.Compare(left, [op], [right]):
            other = ast.Compare(left, [COMPARED[type(op)]()], [right])
            yield "comparison", f"({ast.unparse(other)})"
        case ast.BoolOp(op, values):
            swapped: ast.boolop = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", f"({ast.unparse(ast.BoolOp(swapped, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "not dropped", f"({ast.unparse(operand)})"
        case ast.BinOp(left, op, right) if type(op) in COUNTED:
            yield "operator", f"({ast.unparse(ast.BinOp(left, COUNTED[type(op)](), right))})"
        case ast.Constant(bool() as value):
            yield "constant", str(not value)
        case ast.Constant(int() as number):
            yield "constant", str(number + 1)
        case ast.Call(function, [first, second, *rest], keywords):
            call = ast.Call(function, [second, first, *rest], keywords)
            yield "arguments swapped", ast.unparse(call)
        case ast.Expr(ast.Call()) | ast.Delete() | ast.Continue() | ast.Break():
            yield "statement dropped", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield "statement dropped", "pass"


def conditions(node: ast.AST) -> Iterator[ast.expr]:
    """What this node decides by."""
    if isinstance(node, ast.If | ast.IfExp):
        yield node.test


def visited(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that say what is done: no annotations, decorators, asserts, Notes, nor what only the checker calls."""
    if isinstance(node, ast.FunctionDef) and node.name in UNTOUCHED:
        return
    if isinstance(node, ast.Assert | ast.Raise):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Note", "cast"):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST):
                yield from visited(child)


def sites(file: Path) -> Iterator[Bug]:
    """Every change of one file that is considered."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def bug(node: ast.expr | ast.stmt, what: str, text: str) -> Bug:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Bug(file.relative_to(ROOT / CORE).as_posix(), start, end, text, what)

    bodies = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in (node for body in bodies for node in visited(body)):
        for test in conditions(node):
            yield bug(test, "condition negated", f"(not ({ast.unparse(test)}))")
        if isinstance(node, ast.expr | ast.stmt):
            for what, text in changes(node):
                yield bug(node, what, text)


def shuffled(seed: int) -> list[Bug]:
    """Every change that is considered, each as likely to come first as any other."""
    files = sorted({file for pattern in FILE_PATTERNS for file in (ROOT / CORE).glob(pattern)})
    considered = [bug for file in files for bug in sites(file)]
    random.Random(seed).shuffle(considered)
    return considered


def drawn(seed: int, count: int) -> list[Bug]:
    """The first so many; but not what mypy refuses, which nobody would have committed."""
    considered = shuffled(seed)
    found: list[Bug] = []
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        for bug in considered:
            if len(found) == count:
                break
            if well_typed(bug, Path(folder)):
                found.append(bug)
            else:
                refused += 1
    print(f"seed {seed}: {len(considered)} changes to draw from, {refused} drawn that mypy refuses", flush=True)
    return found


def copied(folder: Path) -> None:
    """The packages, with what mypy wants to know of them."""
    for package in ("pdflow", "sim"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.c"), symlinks=True
        )
    shutil.copy(ROOT / "pyproject.toml", folder)


def well_typed(bug: Bug, folder: Path) -> bool:
    """Whether mypy accepts it, in a copy of the packages that is left as it was."""
    changed = folder / CORE / bug.file
    source, old_s = changed.read_bytes(), changed.stat().st_mtime
    changed.write_bytes(bug.apply(source))
    # mypy takes a file of the same size and second for the same file.
    os.utime(changed, (old_s + 10, old_s + 10))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "-p", "pdflow.protocol"], cwd=folder, capture_output=True, text=True, check=False
    )
    changed.write_bytes(source)
    os.utime(changed, (old_s + 20, old_s + 20))
    assert done.returncode in (0, 1), done.stderr or done.stdout
    return not any(line.startswith(CORE) and ": error: " in line for line in done.stdout.splitlines())


def by_hand() -> list[Bug]:
    from benchmarks.hand_bugs import HAND

    found = []
    for name, file, old, new in HAND:
        source = (ROOT / CORE / file).read_text()
        assert source.count(old) == 1, f"{file}: {old!r} stands there {source.count(old)} times"
        start = len(source[: source.index(old)].encode())
        found.append(Bug(file, start, start + len(old.encode()), new, name))
    return found


def diff(bug: Bug) -> str:
    """What is changed, without the head of a patch."""
    source = (ROOT / CORE / bug.file).read_bytes()
    before, after = source.decode().splitlines(), bug.apply(source).decode().splitlines()
    lines = list(difflib.unified_diff(before, after, bug.file, bug.file, lineterm="", n=0))
    return "\n".join(lines[2:])


def hunted(bug: Bug, budget_s: float) -> dict[str, object]:
    """What catches it, in a process and a copy of the packages of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        changed = Path(folder, CORE, bug.file)
        changed.write_bytes(bug.apply(changed.read_bytes()))
        command = [sys.executable, str(Path(__file__).resolve()), "--search-mutated", str(budget_s)]
        environment = os.environ | {"PYTHONPATH": f"{folder}:{folder}/sim", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=budget_s + 30, check=False
            )
        except subprocess.TimeoutExpired:
            return {"caught": "never ends", "by": "", "seconds": round(time.monotonic() - began, 1)}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        return {"caught": "crash", "by": "import", "what": last, "seconds": round(time.monotonic() - began, 1)}
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def search_mutated(budget_s: float) -> dict[str, object]:
    """Search with the packages that are imported here, until something is found or the time is over."""
    import pdflow
    from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
    from pdflow_sim.check.moves.compose import relation
    from pdflow_sim.check.scopes.catalogue import SCOPES
    from pdflow_sim.check.scopes.named import Named
    from pdflow_sim.check.search.campaign import WalkTask, walks
    from pdflow_sim.check.search.search import explore
    from pdflow_sim.check.state.shadow_state import Broken

    assert Path(str(pdflow.__file__)).is_relative_to(Path.cwd()), f"{pdflow.__file__} is not the copy"
    began = time.monotonic()
    differs: list[str] = []

    def answer(caught: str | None, by: str, what: str = "") -> dict[str, object]:
        spent = round(time.monotonic() - began, 1)
        return {"caught": caught, "by": by, "what": what, "seconds": spent, "other counts": differs}

    def through(named: Named) -> dict[str, object] | None:
        world = relation(named.scope)
        try:
            found = explore(world, tick=lambda _: time.monotonic() > began + budget_s)
        except Broken as broken:
            return answer(broken.name, named.name, broken.what)
        except Exception as error:
            return answer("crash", named.name, repr(error))
        if not found.complete:
            return answer(None, named.name)
        if missed := sorted(named.goals - world.space.checker.seen.keys()):
            return answer("goals not reached", named.name, ", ".join(missed))
        if named.states and (found.states, found.transitions) != (named.states, named.transitions):
            differs.append(f"{named.name}: {found.states} states, not {named.states}")
        return None

    def size(named: Named) -> int:
        """Pairs of faults, whose states are not counted, come after the small scopes."""
        return named.states or SMALL_STATES + 1

    order = sorted((named for named in SCOPES if not named.nightly), key=size)
    for named in order:
        if size(named) <= SMALL_STATES and (ended := through(named)) is not None:
            return ended
    for dialect in (STRICT, VLLM_COMPAT):
        until_s = min(time.monotonic() + WALK_S / 2, began + budget_s)
        walked = walks(WalkTask(dialect=dialect, first=True), range(1, 10_000_000), until_s=until_s)
        for name, failure in walked.failures.items():
            return answer(name, f"walks of {dialect.name}, seed {failure.seed}", failure.what)
    for named in order:
        if size(named) > SMALL_STATES and (ended := through(named)) is not None:
            return ended
    return answer(None, "all of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--bugs", type=int, default=10)
    parser.add_argument("--only", type=int, help="the so manieth of them")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each")
    parser.add_argument("--hand", action="store_true", help="those of hand_bugs.py")
    parser.add_argument("--list", action="store_true", help="only say what would be changed")
    parser.add_argument("--search-mutated", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.search_mutated is not None:
        print(json.dumps(search_mutated(given.search_mutated)))
        return
    sys.path.insert(0, str(ROOT))
    bugs = by_hand() if given.hand else drawn(given.seed, given.bugs)
    for number, bug in enumerate(bugs, 1):
        if given.only not in (None, number):
            continue
        print(f"{number}. {bug.file}: {bug.what}\n{diff(bug)}", flush=True)
        if not given.list:
            print(json.dumps(hunted(bug, given.budget)), flush=True)


if __name__ == "__main__":
    main()
