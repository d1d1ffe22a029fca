"""A diagram as text of a fixed width: lifelines on the left, what happens beside them. One request between two ranks
fits into 80 columns."""

from __future__ import annotations

import textwrap

from pdflow_sim.check.counterexamples.diagram import Diagram
from pdflow_sim.check.counterexamples.diagram_lines import Line, Style

GAP = 4
"""Columns at least between the names of two lifelines' middles, enough for an arrow."""
MARKS = {Style.NOTE: "*", Style.PHASE: "o", Style.BLOCKS: "#", Style.IGNORED: ".", Style.BROKEN: "!"}
SHAFTS = {Style.BYTES: ("═", "╪")}
"""Characters of an arrow, and of its crossing with a lifeline. Bytes of one-sided operations are drawn double."""
LEAST = 28
"""Columns for the words, however many lifelines there are."""


def text(diagram: Diagram, width: int = 80) -> str:
    """Draw a diagram in lines of at most `width` columns, unless the lifelines alone take nearly that."""
    middles = _middles(diagram.lifelines)
    left = max(middles.values()) + 2
    text_width = max(LEAST, width - left)
    rows = textwrap.wrap(diagram.title, width)
    rows.append(_names(middles))
    for line in diagram.lines:
        first = f"{line.number:>2} " if line.number is not None else "   "
        wrapped = textwrap.wrap(line.text, text_width, initial_indent=first, subsequent_indent=" " * 5)
        for i, wrapped_line in enumerate(wrapped):
            drawn = _drawn(line, middles) if i == 0 else _bare(middles)
            rows.append(f"{drawn:<{left}}{wrapped_line}".rstrip())
    rows.append(_names(middles))
    rows += _verdict(diagram, width)
    return "\n".join(rows) + "\n"


def _middles(lifelines: tuple[str, ...]) -> dict[str, int]:
    """Return the column of each lifeline."""
    found: dict[str, int] = {}
    at = right = -1
    for name in lifelines:
        at = max(at + GAP, right + 2 + len(name) // 2) if found else len(name) // 2
        right = at + (len(name) - 1) // 2
        found[name] = at
    return found


def _names(middles: dict[str, int]) -> str:
    row = ""
    for name, at in middles.items():
        row = row.ljust(at - len(name) // 2) + name
    return row


def _bare(middles: dict[str, int]) -> str:
    row = [" "] * (max(middles.values()) + 1)
    for at in middles.values():
        row[at] = "│"
    return "".join(row)


def _drawn(line: Line, middles: dict[str, int]) -> str:
    row = list(_bare(middles))
    start = middles[line.at]
    end = start if line.to is None else middles[line.to]
    step = 1 if end >= start else -1
    shaft, crossing = SHAFTS.get(line.style, ("─", "┼"))
    if not line.arrow:
        for at in range(start, end + step, step):
            row[at] = MARKS[line.style] if row[at] == "│" else "─"
        return "".join(row)
    for at in range(start + step, end, step):
        row[at] = shaft if row[at] == " " else crossing
    if line.style is Style.LOST:
        middle = start + 2 * step
        row[middle:end:step] = "x" + _rest(middles, middle + step, end, step)
    else:
        row[end - step] = ">" if step > 0 else "<"
    return "".join(row)


def _rest(middles: dict[str, int], start: int, end: int, step: int) -> str:
    """Return the part of the row that a lost frame does not reach."""
    bare = _bare(middles)
    return "".join(bare[at] for at in range(start, end, step))


def _verdict(diagram: Diagram, width: int) -> list[str]:
    """Return the violated invariant once more, in a box that cannot be missed."""
    last = diagram.lines[-1] if diagram.lines else None
    if last is None or last.style is not Style.BROKEN:
        return []
    wrapped = textwrap.wrap(last.text, width - 6)
    return ["!" * width, *(f"!! {wrapped_line:<{width - 6}} !!" for wrapped_line in wrapped), "!" * width]
