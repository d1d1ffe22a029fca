"""`pdflow check`: what is to be checked, with which limits, and what the exit code says."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from pdflow.errors import (
    EXIT_BUDGET,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOT_SO,
    PdflowError,
    Problem,
    ScenarioError,
)
from sim.check import story as stories
from sim.check.crew import Searched, search_all
from sim.check.report import Board, scopes_table
from sim.check.scopes import SCOPES, Named
from sim.check.story import StoryFile
from sim.check.timed import relation


@attrs.frozen(kw_only=True)
class Options:
    """What the command was asked for."""

    dialect: str | None = None
    budget_s: float | None = None
    jobs: int = 1
    seed: int = 1
    out: Path = Path("check")
    large: bool = False
    """The nightly scopes too."""
    only: str | None = None
    """Scopes whose name holds this."""
    json: bool = False

    @property
    def until_s(self) -> float:
        """When the budget ends, on the clock of time.monotonic."""
        return float("inf") if self.budget_s is None else time.monotonic() + self.budget_s


def options(*, budget: float | None, jobs: int | None, out: str, **rest: Any) -> Options:
    """As the command line has them."""
    return Options(budget_s=budget, jobs=jobs or len(os.sched_getaffinity(0)), out=Path(out), **rest)


@attrs.frozen
class Verdict:
    """What one part of a check came to."""

    code: int
    rows: list[dict[str, Any]]


def check(what: str, options: Options) -> int:
    """Run one part, or all; the exit code. Raises ScenarioError for what does not exist."""
    console = Console(stderr=options.json, highlight=False, markup=False, emoji=False)
    parts = list(PARTS) if what == "all" else [what]
    verdicts: dict[str, Verdict] = {}
    code = EXIT_DONE
    try:
        for part in parts:
            if part not in PARTS:
                raise ScenarioError([Problem(part, "", _no_such_part(part))])
            verdicts[part] = PARTS[part](options, console)
    except KeyboardInterrupt:
        console.print("interrupted: what is said above holds, the rest was not looked at")
        code = EXIT_INTERRUPTED
    if options.json:
        _say(json.dumps({name: verdict.rows for name, verdict in verdicts.items()}))
    codes = {verdict.code for verdict in verdicts.values()}
    if code == EXIT_DONE:
        code = next((c for c in (EXIT_NOT_SO, EXIT_BUDGET) if c in codes), EXIT_DONE)
    return code


def _no_such_part(part: str) -> str:
    return f"is nothing to check: expected all, {', '.join(PARTS)} or a scenario file (NAME.toml)"


def chosen(options: Options) -> list[Named]:
    """The scopes that the options name. Raises ScenarioError if there are none."""
    found = [
        named
        for named in SCOPES
        if (options.large or not named.nightly or options.only)
        and (options.dialect is None or named.scope.dialect.name == options.dialect)
        and (options.only is None or options.only.lower() in named.name.lower())
    ]
    if not found:
        raise ScenarioError([Problem("--only", "", f"no scope of this dialect has {options.only!r} in its name")])
    return found


def scopes(options: Options, console: Console) -> Verdict:
    """Every state of every scope."""
    wanted = chosen(options)
    ended: list[Searched] = []
    with Board(len(wanted), quiet=options.json) as board:
        for one in search_all(wanted, options.jobs, options.until_s, board.searching, board.refresh):
            ended.append(one)
            board.ended(one)
    order = {named.name: at for at, named in enumerate(wanted)}
    ended.sort(key=lambda one: order[one.name])
    console.print(scopes_table(ended))
    paths = {one.name: keep(options.out, one.name, one.story) for one in ended if one.story is not None}
    for name, path in paths.items():
        console.print(f"{name}: pdflow check --diagram {path}")
    rows = [
        {
            "scope": one.name,
            "states": one.states,
            "transitions": one.transitions,
            "depth": one.depth,
            "seconds": round(one.seconds, 3),
            "stopped_by": one.stopped_by or None,
            "goals": list(one.goals),
            "missed": list(one.missed),
            "story": str(paths[one.name]) if one.name in paths else None,
        }
        for one in ended
    ]
    if any(one.story or one.missed for one in ended):
        return Verdict(EXIT_NOT_SO, rows)
    return Verdict(EXIT_BUDGET if any(one.stopped_by for one in ended) else EXIT_DONE, rows)


def keep(folder: Path, name: str, story: StoryFile) -> Path:
    """Write a story down; its path. Raises CannotWriteError."""
    path = folder / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stories.write(path, story)
    except OSError as error:
        raise CannotWriteError(f"{path}: cannot be written: {error.strerror}") from error
    return path


class CannotWriteError(PdflowError):
    """A story was found and could not be kept."""


def replay(file: str) -> int:
    """Strictly; 1 if the story still breaks what it broke, or no longer replays."""
    from sim.check.replay import strict

    story = stories.read(file)
    with patched(story.mutant):
        told = strict(relation(story.scope), story)
    if told.mismatch is not None:
        _say(f"{file}: {told.mismatch}", error=True)
        return EXIT_NOT_SO
    if told.verdict is None:
        _say(f"{file}: {len(story.steps)} steps; every invariant holds, and everything ends")
        return EXIT_DONE if story.verdict is None else EXIT_NOT_SO
    _say(f"{file}: {len(story.steps)} steps; {told.verdict.invariant}: {told.verdict.what}")
    return EXIT_NOT_SO


def diagram(file: str) -> int:
    """Mermaid, then fixed-width text."""
    from sim.check.diagram import collect
    from sim.check.diagram_mermaid import mermaid
    from sim.check.diagram_text import text

    story = stories.read(file)
    with patched(story.mutant):
        drawn = collect(story)
    width = min(100, max(80, _columns()))
    _say(text(drawn, width))
    _say("")
    _say(mermaid(drawn))
    return EXIT_DONE


def _say(words: str, error: bool = False) -> None:
    (sys.stderr if error else sys.stdout).write(words + "\n")


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 80


def patched(mutant: str | None) -> Any:
    """With this mutant in place, if there is one."""
    from contextlib import nullcontext

    if mutant is None:
        return nullcontext()
    from sim.check.mutants import named

    return named(mutant).applied()


PARTS: dict[str, Callable[[Options, Console], Verdict]] = {"scopes": scopes}
