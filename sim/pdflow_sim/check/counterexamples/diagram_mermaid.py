"""A diagram as a Mermaid sequenceDiagram, which GitHub and many others draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdflow.protocol.ids import engine_of
from pdflow_sim.check.counterexamples.diagram import Diagram
from pdflow_sim.check.counterexamples.diagram_lines import CLIENT, ROUTER, WIRE, Line, Style
from pdflow_sim.check.state.cluster import ORPHAN, SECOND

ARROWS = {Style.CALL: "->>", Style.SENT: "-)", Style.LOST: "-x", Style.BYTES: "-->>"}
RED = "rgb(255, 205, 205)"
ESCAPES = str.maketrans({"#": "#35;", ";": "#59;", "<": "#lt;", ">": "#gt;", "\n": " "})


def mermaid(diagram: Diagram) -> str:
    """Return the Mermaid text of a diagram, without a fence around it."""
    return "\n".join(_rows(diagram)) + "\n"


def _rows(diagram: Diagram) -> Iterator[str]:
    yield "sequenceDiagram"
    yield f"    title {_escaped(diagram.title)}"
    yield f"    actor {CLIENT}"
    yield f"    participant {ROUTER}"
    yield from _engine("prefill engine", diagram.prefill)
    yield f"    participant {WIRE}"
    yield from _engine("decode engine", diagram.decode)
    for lines in _together(diagram.lines):
        line = lines[0]
        if line.arrow:
            yield f"    {_id(line.at)}{ARROWS[line.style]}{_id(line.to or line.at)}: {_text(line)}"
        else:
            yield from _note(line, "<br/>".join(map(_text, lines)))


def _together(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Group consecutive notes of one step at one lifeline into one note, which halves the length of the picture."""
    group: list[Line] = []
    for line in lines:
        if group and (line.arrow or line.number is not None or _group_key(line) != _group_key(group[0])):
            yield group
            group = []
        group.append(line)
    if group:
        yield group


def _group_key(line: Line) -> tuple[bool, str, str | None, bool]:
    """Return the key by which notes are grouped; a violation stays alone."""
    return line.arrow, line.at, line.to, line.style is Style.BROKEN


def _engine(name: str, lifelines: tuple[str, ...]) -> Iterator[str]:
    engines = {engine_of(lifeline.removeprefix(ORPHAN).removeprefix(SECOND)) for lifeline in lifelines}
    yield f"    box {name}{'s' if len(engines) > 1 else ''}"
    for lifeline in lifelines:
        yield f"    participant {_id(lifeline)} as {lifeline}"
    yield "    end"


def _note(line: Line, text: str) -> Iterator[str]:
    over = _id(line.at) + (f",{_id(line.to)}" if line.to else "")
    if line.style is Style.BROKEN:
        yield f"    rect {RED}"
    yield f"    Note over {over}: {text}"
    if line.style is Style.BROKEN:
        yield "    end"


def _text(line: Line) -> str:
    return _escaped(line.text if line.number is None else f"{line.number}. {line.text}")


def _id(lifeline: str) -> str:
    """Return a lifeline's name as Mermaid's grammar accepts it."""
    return lifeline.replace(".", "_").replace(" ", "_")


def _escaped(text: str) -> str:
    return text.translate(ESCAPES)
