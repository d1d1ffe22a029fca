"""Marks of points, and the legend that names them and lines.

Series differ in shape or dashes, never in colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import attrs

from pdflow.results.page.markup import Html, joined, tag

ROW: Final = 15
"""The height of a row of a legend."""
LETTER: Final = 6.2
"""About as wide as a letter of a chart's text."""
RADIUS: Final = 3.3
SMALL: Final = 2.0
"""The radius of a mark, and of one that matters less."""
_SIGN: Final = 22
"""The width of a sign and the space behind it."""
_GAP: Final = 14
_LEFT: Final = 4
_SQUARE: Final = frozenset({"disaggregated"})
"""The series whose marks stand on a corner; those of others are round."""


def mark(x: float, y: float, series: str, *, radius: float = RADIUS, hollow: bool = False, hint: str = "") -> Html:
    """Draw the mark of a point. `hint` is shown when a pointer rests on it."""
    inside = [tag("title", hint)] if hint else []
    name = f"mark {series}{' hollow' if hollow else ''}"
    if series in _SQUARE:
        far = radius * 1.25  # as large as a circle to the eye
        corners = ((x, y - far), (x + far, y), (x, y + far), (x - far, y))
        return tag("polygon", *inside, class_=name, points=" ".join(f"{a:.1f},{b:.1f}" for a, b in corners))
    return tag("circle", *inside, class_=name, cx=f"{x:.1f}", cy=f"{y:.1f}", r=radius)


def ring(x: float, y: float, radius: float = 8.0, hint: str = "") -> Html:
    """Draw a ring around the point that is chosen."""
    inside = [tag("title", hint)] if hint else []
    return tag("circle", *inside, class_="ring", cx=f"{x:.1f}", cy=f"{y:.1f}", r=radius)


@attrs.frozen
class Entry:
    """A row's text, and what stands before it: marks by series, hollow or not, a line of a series, a ring, or a bound,
    which is upright if it is one of x."""

    text: str
    marks: tuple[str, ...] = ()
    hollow: bool = False
    small: bool = False
    line: str | None = None
    ringed: bool = False
    bound: Literal["x", "y"] | None = None

    def signs(self, left: float, middle: float) -> Iterator[Html]:
        """Draw what stands before the text, around the height `middle`."""
        centre = left + _SIGN / 2 - 3
        if self.line is not None:
            ends = {"x1": left, "x2": left + _SIGN - 5, "y1": middle, "y2": middle}
            yield tag("line", class_=f"line {self.line}".strip(), **ends)
        for position, series in enumerate(self.marks):
            at = centre + (position - (len(self.marks) - 1) / 2) * 10
            yield mark(at, middle, series, hollow=self.hollow, radius=SMALL if self.small else RADIUS)
        if self.bound == "x":
            yield tag("line", class_="bound", x1=centre, x2=centre, y1=middle - 6, y2=middle + 6)
        elif self.bound == "y":
            yield tag("line", class_="bound", x1=left, x2=left + _SIGN - 5, y1=middle, y2=middle)
        if self.ringed:
            yield ring(centre, middle, 6.0)


@attrs.frozen
class Legend:
    """Entries in rows of a width; one that does not fit behind the one before begins a row."""

    entries: Sequence[Entry]
    width: float

    @property
    def height(self) -> float:
        """The height of all rows."""
        return ROW * (1 + max((row for _, row, _ in self._placed()), default=-1))

    def drawn(self, top: float) -> Html:
        """Draw it below `top`."""
        fragments: list[Html] = []
        for left, row, entry in self._placed():
            middle = top + ROW * row + ROW / 2
            fragments += entry.signs(left, middle)
            text = _fitting(entry.text, self.width - left - _SIGN)
            fragments.append(tag("text", text, x=left + _SIGN, y=middle + 4))
        return joined(fragments)

    def _placed(self) -> Iterator[tuple[float, int, Entry]]:
        left, row = float(_LEFT), 0
        for entry in self.entries:
            wide = _SIGN + len(entry.text) * LETTER
            if left > _LEFT and left + wide > self.width:
                left, row = float(_LEFT), row + 1
            yield left, row, entry
            left += wide + _GAP


def _fitting(text: str, width: float) -> str:
    most = max(1, int(width / LETTER))
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
