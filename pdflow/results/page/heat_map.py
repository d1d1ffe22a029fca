"""A heat map as SVG: the value is written in each cell, so that its colour is only what the eye finds it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from pdflow.results.page.legend import LETTER
from pdflow.results.page.markup import Html, tag
from pdflow.results.page.picture import Picture

CellKey: TypeAlias = tuple[int, int]
"""A column and a row of a heat map: the numbers that stand at them."""

_TALL: Final = 26
_LEAST_WIDE: Final = 44
_LEFT: Final = 30
_TOP: Final = 20
_BOTTOM: Final = 34
_RIGHT: Final = 4
_STRONGEST: Final = 0.5
"""The opacity of the highest value: text on it must stay readable, light or dark."""
_FAINTEST: Final = 0.04


@attrs.frozen
class HeatCell:
    """A value and how it is written; `hint` is shown when a pointer rests on it."""

    value: float
    text: str
    hint: str = ""


@attrs.frozen
class HeatMap:
    """Cells by column and row. `most` is the value of the strongest colour; the cell at `best` is outlined."""

    columns: Sequence[int]
    rows: Sequence[int]
    """The lowest first."""
    cells: Mapping[CellKey, HeatCell]
    most: float
    x_unit: str
    y_unit: str
    best: CellKey | None = None

    def picture(self, description: str) -> Picture:
        """Draw it."""
        wide = max(_LEAST_WIDE, *(LETTER * len(cell.text) + 14 for cell in self.cells.values()))
        width = max(_LEFT + wide * len(self.columns) + _RIGHT, LETTER * max(len(self.x_unit), len(self.y_unit)) + _LEFT)
        height = _TOP + _TALL * len(self.rows) + _BOTTOM
        floor = _TOP + _TALL * len(self.rows)
        drawn = [tag("text", self.y_unit, x=2, y=12)]
        for number, row in enumerate(reversed(self.rows)):
            drawn.append(tag("text", f"{row}", x=_LEFT - 6, y=_TOP + _TALL * (number + 0.5) + 4, text_anchor="end"))
        for number, column in enumerate(self.columns):
            drawn.append(tag("text", f"{column}", x=_LEFT + wide * (number + 0.5), y=floor + 14, text_anchor="middle"))
        drawn.append(tag("text", self.x_unit, x=_LEFT, y=floor + 29))
        # The outlined one last, over the edges of its neighbours.
        for key in sorted(self.cells, key=lambda key: key == self.best):
            left = _LEFT + wide * self.columns.index(key[0])
            top = _TOP + _TALL * (len(self.rows) - 1 - self.rows.index(key[1]))
            drawn += self._cell(self.cells[key], left, top, wide, outlined=key == self.best)
        return Picture(width, height, tuple(drawn), description)

    def _cell(self, cell: HeatCell, left: float, top: float, wide: float, *, outlined: bool) -> list[Html]:
        share = cell.value / self.most if self.most > 0 else 0.0
        opacity = _FAINTEST + (_STRONGEST - _FAINTEST) * min(1.0, max(0.0, share))
        box = {"x": left, "y": top, "width": wide, "height": _TALL}
        hint = [tag("title", cell.hint)] if cell.hint else []
        middle = {"x": left + wide / 2, "y": top + _TALL / 2 + 4}
        drawn = [
            tag("rect", *hint, class_="heat", fill_opacity=f"{opacity:.2f}", **box),
            tag("text", cell.text, class_="strong", text_anchor="middle", pointer_events="none", **middle),
        ]
        if outlined:
            inner = {"x": left + 1, "y": top + 1, "width": wide - 2, "height": _TALL - 2}
            drawn.append(tag("rect", class_="best", **inner))
        return drawn
