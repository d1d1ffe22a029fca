"""A drawing that is to be an element of a page, or a file of its own that any program opens."""

from __future__ import annotations

from typing import Final

import attrs

from pdflow.results.page.markup import Html, tag
from pdflow.results.page.style import CHART_CLASS, chart_style

_FILE_SCALE: Final = 1.6
"""A file is shown so many times as large as it was drawn for a telephone."""
_MARGIN: Final = 10
_HEADING: Final = 18
"""The height of a file's heading."""
_HEADING_LETTER: Final = 7
"""The mean width of a letter there, in bold; a map of few cells is narrower than its heading."""


@attrs.frozen
class Picture:
    """A drawing `width` by `height` units large. `description` is its text for screen readers."""

    width: float
    height: float
    drawn: tuple[Html, ...]
    description: str

    def inline(self, width_px: float | None = None) -> Html:
        """Return it as an element of a page: as wide as there is space, or that many pixels if there is as much."""
        fixed = {} if width_px is None else {"style": f"width:{width_px:.0f}px;max-width:100%"}
        box = f"0 0 {self.width:g} {self.height:g}"
        return tag("svg", *self.drawn, viewBox=box, role="img", aria_label=self.description, **fixed)

    def file(self, heading: str = "") -> str:
        """Return it as a file with a heading, which follows the reader's system in being light or dark."""
        above = _MARGIN + (_HEADING if heading else 0)
        width = max(self.width, len(heading) * _HEADING_LETTER) + 2 * _MARGIN
        height = self.height + above + _MARGIN
        box = f"{-_MARGIN} {-above} {width:g} {height:g}"
        ground = tag("rect", class_="ground", x=-_MARGIN, y=-above, width=width, height=height)
        lines = [tag("text", heading, class_="strong heading", x=2, y=-_HEADING / 2)] if heading else []
        whole = tag(
            "svg",
            tag("title", self.description),
            tag("style", Html(chart_style())),
            ground,
            *lines,
            *self.drawn,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=box,
            width=width * _FILE_SCALE,
            height=height * _FILE_SCALE,
            role="img",
            class_=CHART_CLASS,
        )
        return f"{whole}\n"
