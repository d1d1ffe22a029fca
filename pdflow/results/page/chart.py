"""Charts as SVG: axes with round ticks, lines, areas and points. Nothing of what they show is decided here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs

from pdflow.results.page.legend import RADIUS, Legend, mark, ring
from pdflow.results.page.markup import Html, joined, tag
from pdflow.results.page.picture import Picture

Point: TypeAlias = tuple[float, float]

WIDTH: Final = 400
_LEFT: Final = 40
_RIGHT: Final = 12
_TOP: Final = 8
_BOTTOM: Final = 32
_LINE: Final = 13
"""The height of a line of a chart's text."""
_LETTER: Final = 6.5
"""About as wide as a figure or letter of a chart's text."""


@attrs.frozen
class Axis:
    """An axis from `low` to `high`, logarithmic if `log`."""

    low: float
    high: float
    log: bool = False
    least: float = 0.0
    """The smallest step between its ticks: 1 where there are no halves."""

    @staticmethod
    def up_to(high: float, least: float = 0.0) -> Axis:
        """Return an axis from 0 to the first round number not below `high`."""
        if high <= 0:
            return Axis(0, 1)
        step = _round_step(max(high / 5, least))
        return Axis(0, step * math.ceil(high / step - 1e-9), least=least)

    @staticmethod
    def around(low: float, high: float) -> Axis:
        """Return an axis for these values: logarithmic where they lie more than ten times apart, else from 0."""
        return Axis(low, high, log=True) if low > 0 and 10 * low < high else Axis.up_to(high)

    def at(self, value: float) -> float:
        """Return the position of a value on the axis, as a share of its length."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round numbers on the axis: 1, 2 and 5 of each power of ten while these are few, else the powers."""
        if not self.log:
            step = _round_step(max((self.high - self.low) / 5, self.least))
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [step * index for index in range(first, last + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if math.log10(self.high / self.low) < 2.5 else (1,)
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def _round_step(least: float) -> float:
    """Return the least of 1, 2, 5, 10, 20... that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


@attrs.frozen
class Chart:
    """A frame to draw in: `x` and `y`, and what their figures are called. The legend and `y_unit` stand above it, and
    add to `height`."""

    x: Axis
    y: Axis
    height: int
    x_unit: str
    percent: bool = False
    y_unit: str = ""
    legend: Legend | None = None
    width: int = WIDTH

    def project(self, point: Point) -> Point:
        """Return the position of a point, in the picture's units."""
        return self._across(point[0]), self._down(point[1])

    def line(self, points: Sequence[Point], series: str = "") -> Html:
        """Draw a line through the points."""
        return tag("polyline", class_=f"line {series}".strip(), points=_pairs(map(self.project, points)))

    def mark(self, point: Point, series: str, *, radius: float = RADIUS, hollow: bool = False, hint: str = "") -> Html:
        """Draw a point of a series."""
        return mark(*self.project(point), series, radius=radius, hollow=hollow, hint=hint)

    def ring(self, point: Point, hint: str = "") -> Html:
        """Draw a ring around the point that is chosen."""
        return ring(*self.project(point), hint=hint)

    def area(self, points: Sequence[Point]) -> Html:
        """Fill the area between the points and the axis below them."""
        corners = [(points[0][0], 0.0), *points, (points[-1][0], 0.0)]
        return tag("polygon", class_="wash", points=_pairs(map(self.project, corners)))

    def bound(self, value: float, label: str = "", row: int = 0) -> Html:
        """Draw a line at a value of `x`, and its name, if it has one, on the side with more space. Names of several
        lines stand in rows, the first lowest.
        """
        across = self._across(value)
        left = across > self.width / 2
        rule = tag("line", class_="bound", x1=across, x2=across, y1=self._ceiling, y2=self._floor)
        if not label:
            return rule
        where = {"x": across + (-5 if left else 5), "y": self._floor - 6 - row * _LINE}
        anchor = "end" if left else "start"
        return joined((rule, tag("text", label, class_="label halo", text_anchor=anchor, **where)))

    def level(self, value: float) -> Html:
        """Draw a line at a value of `y`."""
        down = self._down(value)
        return tag("line", class_="bound", x1=_LEFT, x2=self.width - _RIGHT, y1=down, y2=down)

    def drawing(self, drawn: Sequence[Html], description: str) -> Picture:
        """Return the chart. `description` is its text for screen readers."""
        above: list[Html] = []
        if self.legend is not None:
            above.append(self.legend.drawn(0.0))
        if self.y_unit:
            above.append(tag("text", self.y_unit, x=2, y=self._ceiling - 9))
        whole = (*above, *self._across_ticks(), *self._down_ticks(), *drawn)
        return Picture(self.width, self._floor + _BOTTOM, whole, description)

    def picture(self, drawn: Sequence[Html], description: str) -> Html:
        """Return the chart as an element of a page."""
        return self.drawing(drawn, description).inline()

    @property
    def _ceiling(self) -> float:
        """The top of the frame."""
        return _TOP + (0.0 if self.legend is None else self.legend.height) + (_LINE + 3 if self.y_unit else 0)

    @property
    def _floor(self) -> float:
        """The bottom of the frame."""
        return self._ceiling + self.height - _TOP - _BOTTOM

    def _across(self, value: float) -> float:
        return _LEFT + self.x.at(value) * (self.width - _LEFT - _RIGHT)

    def _down(self, value: float) -> float:
        return self._ceiling + (1 - self.y.at(value)) * (self._floor - self._ceiling)

    def _across_ticks(self) -> list[Html]:
        """Draw the ticks of `x`, without labels that would overlap the one before."""
        floor, free = self._floor, 0.0
        found = [tag("line", class_="rule", x1=_LEFT, x2=self.width - _RIGHT, y1=floor, y2=floor)]
        for tick in self.x.ticks():
            text, at = _figure(tick), self._across(tick)
            half = len(text) * _LETTER / 2
            found.append(tag("line", class_="rule", x1=at, x2=at, y1=floor, y2=floor + 4))
            if at - half >= free and at + half <= self.width:
                found.append(tag("text", text, x=at, y=floor + 15, text_anchor="middle"))
                free = at + half + _LETTER
        return [*found, tag("text", self.x_unit, x=self.width - _RIGHT, y=floor + _BOTTOM - 4, text_anchor="end")]

    def _down_ticks(self) -> list[Html]:
        found = []
        for tick in self.y.ticks():
            at = self._down(tick)
            text = f"{tick * 100:g} %" if self.percent else _figure(tick)
            found.append(tag("line", class_="rule", x1=_LEFT, x2=self.width - _RIGHT, y1=at, y2=at))
            found.append(tag("text", text, x=_LEFT - 5, y=at + 4, text_anchor="end"))
        return found


def _pairs(points: map[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _figure(value: float) -> str:
    """Format a tick's number without needless digits, short enough to stand beside an axis."""
    if value >= 10_000:
        return f"{value / 1_000_000:g}M" if value >= 1_000_000 else f"{value / 1_000:g}k"
    return f"{value:,.6g}"
