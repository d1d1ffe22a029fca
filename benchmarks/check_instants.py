"""Comparisons of instants in the protocol, and the scopes that take each outcome: python -m benchmarks.check_instants

Scopes without clocks have `now = 0` and no back-off, so a comparison such as `cell.lease_until <= now` always ends in
the same way there. This script rewrites pdflow/protocol, pdflow/serving and pdflow/routing while they are imported:
each comparison, `min` and `max` of instants records its outcome. It searches the scopes with clocks (`horizon`), and
prints a row per comparison: its function, its text, and for each dialect a scope that takes both outcomes, or else one
for each. For `min` and `max` the outcome "true" means that the first argument is returned. With --all it also searches
nightly scopes (minutes); --only selects scopes by words in their names.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("protocol", "routing", "serving")
OUTSIDE: Final = ("invariants", "deadlines.py", "wire")
"""Parts of pdflow/protocol that no scope runs: the simulator's oracle, the heap of deadlines, the codecs."""
POLICIES: Final = ("heartbeats.py", "scaling.py", "hedging.py", "admission.py", "governed.py")
"""Policies of the router, which scopes do not run."""
INSTANTS: Final = ("now", "until", "at", "silent_since")
LIMIT: Final = 5_000_000
RECORDED: Final = "_pdflow_recorded_"


class Site(NamedTuple):
    """A comparison in the code."""

    file: str
    function: str
    text: str
    line: int


class Recorder:
    """Collects the outcomes of each comparison, and the scopes that take each."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.taken: list[dict[tuple[str, bool], list[str]]] = []
        self.dialect = self.scope = ""

    def site(self, site: Site) -> int:
        self.sites.append(site)
        self.taken.append({})
        return len(self.sites) - 1

    def compared(self, number: int, outcome: Any) -> Any:
        scopes = self.taken[number].setdefault((self.dialect, bool(outcome)), [])
        if not scopes or scopes[-1] != self.scope:
            scopes.append(self.scope)
        return outcome

    def chosen(self, number: int, result: Any, *values: Any) -> Any:
        self.compared(number, result == values[0])
        return result

    def cell(self, number: int, dialect: str) -> str:
        """Return a cell of the table: the first scope that takes both outcomes; else, of each, the first."""
        true, false = (self.taken[number].get((dialect, outcome), []) for outcome in (True, False))
        both = [scope for scope in true if scope in false]
        if both or not (true or false):
            return both[0] if both else "-"
        if true and false:
            return f"true: {true[0]}; false: {false[0]}"
        return f"always {'true' if true else 'false'}"


RECORDER: Final = Recorder()


def _is_instant(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in INSTANTS or name.endswith(("_until", "_at"))


class Rewriter(ast.NodeTransformer):
    """Makes each comparison of instants record its outcome."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.within: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._named(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._named(node)

    def _named(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        self.within.append(node.name)
        self.generic_visit(node)
        self.within.pop()
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        ordered = all(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops)
        if not ordered or not any(map(_is_instant, ast.walk(node))):
            return node
        return self._call("compared", node, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        chooses = isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) > 1
        if not chooses or not any(map(_is_instant, ast.walk(node))):
            return self.generic_visit(node)
        return self._call("chosen", node, node, *node.args)

    def _call(self, how: str, at: ast.expr, *values: ast.expr) -> ast.AST:
        number = RECORDER.site(Site(self.file, ".".join(self.within), ast.unparse(at), at.lineno))
        attribute = ast.Attribute(ast.Name(RECORDED, ast.Load()), how, ast.Load())
        return ast.copy_location(ast.Call(attribute, [ast.Constant(number), *values], []), at)


def _instrumented(path: Path) -> bool:
    inside = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    return len(inside) > 2 and inside[0] == "pdflow" and inside[1] in PACKAGES and not set(inside) & set(OUTSIDE)


def instrument() -> None:
    """Rewrite the protocol's modules when they are imported. Call it before the first import of pdflow."""
    sys.pycache_prefix = tempfile.mkdtemp(prefix="check-instants-")
    compile_plain: Callable[..., Any] = SourceFileLoader.source_to_code

    def compile_recorded(self: SourceFileLoader, data: Any, path: Any, **options: Any) -> Any:
        if not isinstance(data, bytes) or not _instrumented(Path(path)):
            return compile_plain(self, data, path, **options)
        import builtins

        setattr(builtins, RECORDED, RECORDER)
        tree = Rewriter(str(Path(path).relative_to(ROOT))).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    SourceFileLoader.source_to_code = compile_recorded  # type: ignore[method-assign,assignment]


def search_scopes(nightly: bool, words: str, show: Callable[[str], None]) -> None:
    from pdflow_sim.check.moves.compose import relation
    from pdflow_sim.check.scopes.catalogue import SCOPES
    from pdflow_sim.check.search.search import explore

    for named in SCOPES:
        if not named.scope.horizon or (named.nightly and not nightly) or words not in named.name:
            continue
        show(named.name)
        RECORDER.scope, RECORDER.dialect = named.name, named.scope.dialect.name
        explore(relation(named.scope), named.max_states or LIMIT, lively=False)


def table() -> list[str]:
    """Return a row for each comparison that scopes can reach, in Markdown."""
    lines = ["| comparison | strict | vllm-compat |", "| --- | --- | --- |"]
    for site, number in sorted(zip(RECORDER.sites, range(len(RECORDER.sites)), strict=True)):
        if Path(site.file).name not in POLICIES:
            where = f"`{site.function.rpartition('.')[2]}: {site.text}`"
            lines.append(f"| {where} | {RECORDER.cell(number, 'strict')} | {RECORDER.cell(number, 'vllm-compat')} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="search nightly scopes too")
    parser.add_argument("--only", default="", metavar="WORDS", help="only scopes with these words in their names")
    asked = parser.parse_args()
    instrument()
    search_scopes(asked.all, asked.only, lambda name: print(name, file=sys.stderr, flush=True))
    print("\n".join(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
