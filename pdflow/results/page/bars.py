"""Horizontal bars as SVG, each with its name above it and its figure behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from pdflow.results.page.chart import Axis
from pdflow.results.page.legend import LETTER
from pdflow.results.page.markup import Html, tag
from pdflow.results.page.picture import Picture

_ROW: Final = 29
_BAR: Final = 10
_LEFT: Final = 8
_TOP: Final = 4
_BOTTOM: Final = 36


@attrs.frozen
class NamedShare:
    """A share (0.3 is 30 %), what it is of, and how it is written."""

    name: str
    share: float
    text: str


@attrs.frozen
class BarChart:
    """Bars from zero, in their order; `unit` says what their lengths are."""

    bars: Sequence[NamedShare]
    width: float
    unit: str

    def picture(self, description: str) -> Picture:
        """Draw it."""
        floor = _TOP + _ROW * len(self.bars)
        top = Axis.up_to(max(0.0, *(bar.share for bar in self.bars)))
        axis = Axis(min(0.0, *(bar.share for bar in self.bars)), top.high)
        # The figure behind the longest bar must fit as well.
        span = self.width - _LEFT - LETTER * max(len(bar.text) for bar in self.bars) - 10

        def across(share: float) -> float:
            return _LEFT + axis.at(share) * span

        drawn: list[Html] = []
        for tick in top.ticks():
            at = across(tick)
            drawn.append(tag("line", class_="rule", x1=at, x2=at, y1=_TOP, y2=floor + 4))
            drawn.append(
                tag("text", f"{tick * 100:g} %", x=at, y=floor + 16, text_anchor="middle" if tick else "start")
            )
        for number, bar in enumerate(self.bars):
            begin, end = sorted((across(0.0), across(bar.share)))
            line = _TOP + _ROW * number
            drawn.append(tag("text", bar.name, class_="strong halo", x=across(0.0) + 3, y=line + 11))
            drawn.append(tag("rect", class_="filled", x=begin, y=line + 15, width=end - begin, height=_BAR))
            drawn.append(tag("text", bar.text, class_="halo", x=end + 5, y=line + 24))
        drawn.append(tag("line", class_="zero", x1=across(0.0), x2=across(0.0), y1=_TOP, y2=floor))
        drawn.append(tag("text", self.unit, x=self.width - 4, y=floor + 31, text_anchor="end"))
        return Picture(self.width, floor + _BOTTOM, tuple(drawn), description)
