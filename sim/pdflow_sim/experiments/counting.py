"""The bar that counts the runs of an experiment."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn


def counting(console: Console, unit: str, *more: ProgressColumn, watched: bool) -> Progress:
    """Return a bar that counts in this unit, with more columns at its end; it shows nothing unless `watched`, on a
    terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        *more,
        console=console,
        transient=True,
        disable=not watched or not console.is_terminal,
    )
