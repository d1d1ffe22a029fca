"""The output of `pdflow check`: progress during a search, tables after it. Fits 80 columns; no name is cut."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdflow_sim.check.search.search import Coverage
from pdflow_sim.check.search.workers import Searched


class Watched:
    """Base of displays of progress on stderr; shows nothing if `quiet`, or where stderr is no terminal."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.live = None if quiet or not console.is_terminal else Live(console=console, transient=True)
        self.began = time.monotonic()

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()


class Board(Watched):
    """Displays the progress of every search under way."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.total = total
        self.done = 0
        self.states = 0
        self.now: dict[str, tuple[Coverage, int]] = {}

    def searching(self, name: str, coverage: Coverage, memory_bytes: int) -> None:
        self.now[name] = (coverage, memory_bytes)
        self.refresh()

    def ended(self, one: Searched) -> None:
        self.now.pop(one.name, None)
        self.done += 1
        self.states += one.states
        self.refresh()

    def refresh(self) -> None:
        if self.live is None:
            return
        spent = time.monotonic() - self.began
        states = self.states + sum(coverage.states for coverage, _ in self.now.values())
        lines = [f"{self.done} of {self.total} scopes · {states:,} states · {states / spent:,.0f}/s · {spent:,.0f} s"]
        for name, (coverage, memory_bytes) in self.now.items():
            figures = f"{coverage.states:,} states, frontier {coverage.frontier:,}, depth {coverage.depth}"
            lines.append(f"  {figures}, {memory_bytes / 1e6:,.0f} MB: {name}")
        self.live.update(Text("\n".join(lines)))


class Counter(Watched):
    """Displays progress as one line of text."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.title = title

    def show(self, text: str) -> None:
        if self.live is not None:
            self.live.update(Text(f"{self.title}: {text} · {time.monotonic() - self.began:,.0f} s"))


def scopes_table(ended: Sequence[Searched]) -> Table:
    """Return a table with a row for each scope, and the totals."""
    table = Table(box=None, pad_edge=False, show_footer=False)
    table.add_column("scope", overflow="fold")
    for title in ("states", "transitions", "depth", "states/s"):
        table.add_column(title, justify="right")
    table.add_column("")
    for one in ended:
        speed = f"{one.states / one.seconds:,.0f}" if one.seconds else ""
        table.add_row(
            one.name, f"{one.states:,}", f"{one.transitions:,}", str(one.depth), speed, Text(_result(one), _style(one))
        )
    states, transitions = sum(one.states for one in ended), sum(one.transitions for one in ended)
    held = sum(one.holds for one in ended)
    table.add_section()
    truncated = sum(one.truncated for one in ended)
    totals = f"{held} of {len(ended)} hold" + f", {truncated} truncated" * (truncated > 0)
    table.add_row(totals, f"{states:,}", f"{transitions:,}", "", "", "")
    return table


def reductions(ended: Sequence[Searched]) -> list[str]:
    """Return a line for each scope that was searched with reductions, and one with the probability that any two states
    have one hash."""
    lines = [f"{one.name}: {', '.join(one.reductions)}" for one in ended if one.reductions]
    odds = sum(one.odds for one in ended)
    return [*lines, f"64-bit hashing; collision probability <= {odds:.0e}"]


def liveness(ended: Sequence[Searched]) -> str:
    """Return a line with the number of scopes by what was shown of their runs without further faults."""
    counts = Counts(one.liveness for one in ended if one.holds)
    return "after the last fault: " + ", ".join(f"{what}: {count}" for what, count in counts.most_common())


def needless(ended: Sequence[Searched]) -> str:
    """Return a line with the number of scopes in which L9 was judged, themselves or in a scope whose part is equal."""
    here = {one.name for one in ended if one.needless_states}
    states = sum(one.needless_states or 0 for one in ended)
    judged = sum(one.needless_in in here for one in ended)
    return f"needless failures (L9): judged for {judged} of {len(ended)} scopes, in {states:,} states of {len(here)}"


def _result(one: Searched) -> str:
    if one.counterexample is not None:
        verdict = one.counterexample.verdict
        return f"{verdict.invariant if verdict else '?'} broken in {len(one.counterexample.steps)} steps"
    if one.missed:
        return f"goals not reached: {', '.join(one.missed)}"
    if one.truncated:
        return "truncated"
    return f"stopped: {one.stopped_by}" if one.stopped_by else "holds"


def _style(one: Searched) -> str:
    return "bold red" if one.counterexample or one.missed else "yellow" if one.stopped_by or one.truncated else ""


def print_counterexample(console: Console, title: str, counterexample: Sequence[str]) -> None:
    """Print the moves that lead to a finding, and last what is wrong."""
    console.print(f"\n{title}", soft_wrap=True)
    for number, line in enumerate(counterexample, 1):
        console.print(f"{number:4}  {line}", soft_wrap=True)
