"""Branches of the protocol that `pdflow check` takes: python -m benchmarks.check_coverage [--walks N] [--page FILE]

Every scope of `pdflow check all`, the data paths of all methods, the routers, the races, and N random walks of each
dialect run here under the package coverage, which counts branches of pdflow/protocol, pdflow/routing and
pdflow/serving. Prints the share that was taken, by file, and every branch that was not: the line that jumps, and the
line that was never reached from it. With --page, writes a page in Markdown, with the reasons of
check_coverage_reasons.toml. Takes some 10 CPU minutes; with --measured, what an earlier call wrote with --json is used,
and nothing is searched.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from coverage import Coverage

ROOT: Final = Path(__file__).resolve().parents[1]
REASONS: Final = Path(__file__).with_name("check_coverage_reasons.toml")
WIDTH: Final = 135
"""Of a line of the page."""
PACKAGES: Final = ("protocol", "routing", "serving")


class Branch(NamedTuple):
    """A branch that was not taken. Line numbers change; a function and the text of its lines seldom do."""

    file: str
    function: str
    line: int
    text: str
    target: str
    """The text of the line that was not reached; "end" for the end of the function."""


class FileCoverage(NamedTuple):
    file: str
    branches: int
    missed: tuple[Branch, ...]


def explored(walks: int, show: Callable[[str], None]) -> None:
    """Search every scope that is not nightly, every method's data path, and walk."""
    from pdflow.methods.catalogue import METHODS
    from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
    from pdflow_sim.check.datapath.rows import row, selected_rows
    from pdflow_sim.check.races.catalogue import RACES
    from pdflow_sim.check.races.verdict import rows as look_at_races
    from pdflow_sim.check.routers.catalogue import SETTINGS
    from pdflow_sim.check.routers.world import RouterWorld
    from pdflow_sim.check.scopes.catalogue import SCOPES
    from pdflow_sim.check.search.campaign import WalkTask
    from pdflow_sim.check.search.campaign import walks as walk
    from pdflow_sim.check.search.forward import explore
    from pdflow_sim.check.search.workers import SearchLimits, search

    chosen = [named for named in SCOPES if not named.nightly]
    for number, named in enumerate(chosen, 1):
        show(f"scope {number} of {len(chosen)}: {named.name}")
        found = search(named, SearchLimits(), lambda *_: None)
        assert found.counterexample is None, f"{named.name} does not hold"
    for method, dialect in selected_rows(list(METHODS), None):
        show(f"data path of {method.name}, {dialect}")
        row(method, dialect)
    for setting in SETTINGS:
        show(f"router: {setting.name}")
        explore(RouterWorld(setting))
    for race in look_at_races(float("inf"), list(RACES), [], time.monotonic):
        show(f"race {race.race.number}")
    for dialect in (STRICT, VLLM_COMPAT):
        show(f"{walks:,} walks of {dialect.name}")
        walk(WalkTask(dialect=dialect), range(1, walks + 1))


def functions(source: str) -> list[tuple[int, int, str]]:
    """Return the first and last lines of all functions, with their qualified names, innermost last."""
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found.append((child.lineno, child.end_lineno or child.lineno, name))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def of_file(measured: Coverage, path: Path) -> FileCoverage:
    analysis: Any = measured._analyze(str(path))
    source = path.read_text("utf-8")
    lines, within = source.splitlines(), functions(source)
    missed = []
    for line, targets in sorted(analysis.missing_branch_arcs().items()):
        name = next((name for first, last, name in reversed(within) if first <= line <= last), "")
        for target in targets:
            there = lines[target - 1].strip() if target > 0 else "end"
            missed.append(Branch(str(path.relative_to(ROOT)), name, line, lines[line - 1].strip(), there))
    return FileCoverage(str(path.relative_to(ROOT)), analysis.numbers.n_branches, tuple(missed))


def measure(walks: int, show: Callable[[str], None]) -> list[FileCoverage]:
    sources = [str(ROOT / "pdflow" / package) for package in PACKAGES]
    measured = Coverage(branch=True, source=sources, data_file=None, config_file=False)
    measured.start()
    try:
        explored(walks, show)
    finally:
        measured.stop()
    paths = sorted(path for package in PACKAGES for path in (ROOT / "pdflow" / package).rglob("*.py"))
    return [found for path in paths if (found := of_file(measured, path)).branches]


class Reason(NamedTuple):
    title: str
    pattern: str
    why: str

    def fits(self, branch: Branch) -> bool:
        text = f"{branch.file} {branch.function}: {branch.text} -> {branch.target}"
        return re.search(self.pattern, text) is not None


def page(found: list[FileCoverage], walks: int) -> str:
    """Return the page, in Markdown."""
    reasons = [Reason(**each) for each in tomllib.loads(REASONS.read_text())["reason"]]
    missed = [branch for each in found for branch in each.missed]
    by_reason: dict[str, list[Branch]] = {reason.title: [] for reason in reasons}
    unexplained = []
    for branch in missed:
        reason = next((each for each in reasons if each.fits(branch)), None)
        (unexplained if reason is None else by_reason[reason.title]).append(branch)
    total = sum(each.branches for each in found)
    intro = (
        f"`python -m benchmarks.check_coverage --walks {walks} --page FILE` writes this page: the branches of "
        "`pdflow/protocol`, `pdflow/routing` and `pdflow/serving` that the scopes of `pdflow check all`, the data "
        f"paths, the routers, the races and {walks:,} walks of each dialect take together. {total - len(missed):,} of "
        f"{total:,} are taken."
    )
    lines = [
        "# Branches that the checker takes",
        "",
        *textwrap.wrap(intro, WIDTH, break_on_hyphens=False),
        "",
        "| file | branches | taken |",
        "| --- | ---: | ---: |",
        *(f"| {each.file} | {each.branches} | {each.branches - len(each.missed)} |" for each in found),
        "",
        "## Why the others are not",
    ]
    for reason in reasons:
        branches = by_reason[reason.title]
        if branches:
            text = f"**{reason.title}** ({_branches(len(branches))}). {reason.why}"
            lines += ["", *textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
    if not unexplained:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"## Not explained yet ({_branches(len(unexplained))})",
        "",
        "| function | line | never followed by |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {branch.function} ({Path(branch.file).name}) | `{_cell(branch.text)}` | `{_cell(branch.target)}` |"
        for branch in unexplained
    ]
    return "\n".join(lines) + "\n"


def saved(found: list[FileCoverage]) -> str:
    """Return what was measured as JSON, for `load`."""
    files = [[each.file, each.branches, [branch._asdict() for branch in each.missed]] for each in found]
    return json.dumps(files, indent=1) + "\n"


def load(path: Path) -> list[FileCoverage]:
    files = json.loads(path.read_text())
    return [FileCoverage(file, total, tuple(Branch(**one) for one in missed)) for file, total, missed in files]


def _branches(count: int) -> str:
    return f"{count} branch" if count == 1 else f"{count} branches"


def _cell(text: str) -> str:
    """Return code as the cell of a table takes it."""
    return text.partition("  # ")[0].replace("|", "\\|")[:80]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--walks", type=int, default=10_000, help="random walks of each dialect (default: 10,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to FILE")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="take what was measured from FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of the documents to FILE")
    asked = parser.parse_args()

    def show(what: str) -> None:
        sys.stderr.write(f"\r\033[K{what[:100]}")

    found = measure(asked.walks, show) if asked.measured is None else load(asked.measured)
    sys.stderr.write("\r\033[K")
    for each in found:
        taken = each.branches - len(each.missed)
        print(f"{each.file}: {taken} of {each.branches} branches")
        for branch in each.missed:
            print(f"    {branch.line} {branch.function}: {branch.text}  ->  {branch.target}")
    branches, missed = sum(each.branches for each in found), sum(len(each.missed) for each in found)
    print(f"in all: {branches - missed:,} of {branches:,} branches, {1 - missed / branches:.1%}")
    if asked.json is not None:
        asked.json.write_text(saved(found))
    if asked.page is not None:
        asked.page.write_text(page(found, asked.walks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
