"""Tables of figures that are split where they are wider than the terminal, and names with texts behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pdflow.results import formatting

WIDEST: Final = 80
_LABEL: Final = 13
_LEAST_COLUMN: Final = 9
_SHARE: Final = 8


def tables(
    corner: str, labels: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]], width: int
) -> Iterator[RenderableType]:
    """Yield the columns as one table, or as several if one is too wide; the first column stands in each of them."""
    rest, first = list(columns[1:]), columns[0]
    begun = False
    while rest or not begun:
        table = Table(box=None, padding=(0, 0), pad_edge=False, header_style="dim")
        table.add_column(corner, width=max(_LABEL, *(len(label) + 1 for label in labels)), style="bold")
        chosen, used = [first], max(_LABEL, *(len(label) + 1 for label in labels)) + _width(first)
        while rest and (used + _width(rest[0]) <= width or len(chosen) == 1):
            used += _width(rest[0])
            chosen.append(rest.pop(0))
        for column in chosen:
            table.add_column(column[0], justify="right", width=_width(column), no_wrap=True)
        for row, label in enumerate(labels):
            last = "bold" if label in ("TTFT", "so far") else ""
            table.add_row(label, *(column[1][row] for column in chosen), style=last)
        if begun:
            yield ""
        begun = True
        yield table


def _width(column: tuple[str, Sequence[str]]) -> int:
    least = _SHARE if column[0] == "share" else _LEAST_COLUMN
    return max(least, len(column[0]) + 1, *(len(cell) + 1 for cell in column[1]))


def waits(rows: Sequence[tuple[str, str]], width: int) -> Iterator[RenderableType]:
    """Yield what each stage waited for, wrapped behind its name."""
    for name, text in rows:
        lines = wrap(formatting.plain(text), max(width - _LABEL, _LEAST_COLUMN))
        for position, line in enumerate(lines):
            yield Text.assemble((f"{'' if position else name:<{_LABEL}}", "bold"), line)


def paragraph(text: str, width: int, style: str = "") -> Iterator[Text]:
    """Yield a text in lines of at most this width."""
    for line in wrap(text, width):
        yield Text(line, style=style)


def wrap(text: str, width: int) -> list[str]:
    """Return the text in lines of at most this width, broken at spaces; a longer word has a line of its own."""
    lines = [""]
    for each in text.split(" "):
        joined = f"{lines[-1]} {each}" if lines[-1] else each
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(each)
    return lines
