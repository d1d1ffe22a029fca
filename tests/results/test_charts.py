"""Charts as SVG: what is drawn stands in the frame, labels do not overlap, and colours differ enough to be read."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.results.page.bars import BarChart, NamedShare
from pdflow.results.page.chart import Axis, Chart
from pdflow.results.page.heat_map import CellKey, HeatCell, HeatMap
from pdflow.results.page.legend import LETTER, ROW, Entry, Legend
from pdflow.results.page.picture import Picture
from pdflow.results.page.style import DARK, LIGHT

SVG = "{http://www.w3.org/2000/svg}"


def root_of(picture: Picture) -> ET.Element:
    return ET.fromstring(picture.file("A <chart>"))


def texts(root: ET.Element) -> list[tuple[float, float, str]]:
    """The left end, the base line and the text of each text, by about how wide its letters are."""
    found = []
    for element in root.iter(f"{SVG}text"):
        text = "".join(element.itertext())
        x, width = float(element.get("x") or 0), len(text) * LETTER
        left = {"middle": x - width / 2, "end": x - width}.get(element.get("text-anchor") or "", x)
        found.append((left, float(element.get("y") or 0), text))
    return found


def overlapping(root: ET.Element) -> list[tuple[str, str]]:
    """Texts on the same line of which one begins before the other ends."""
    ordered = sorted(texts(root), key=lambda it: (it[1], it[0]))
    return [
        (one, other)
        for (left, line, one), (begin, base, other) in pairwise(ordered)
        if base - line < 9 and left < begin + len(other) * LETTER and begin < left + len(one) * LETTER - 1
    ]


@given(st.lists(st.text("abcdefgh", min_size=1, max_size=70), min_size=1, max_size=8), st.floats(200, 500))
def test_no_entry_of_a_legend_overlaps_another_or_leaves_the_picture(names: list[str], width: float) -> None:
    legend = Legend([Entry(name, ("aggregated",)) for name in names], width)
    chart = Chart(Axis(0, 1), Axis(0, 1), 100, "x", y_unit="y", legend=legend, width=int(width))
    picture = chart.drawing([], "described")
    root = root_of(picture)
    assert not overlapping(root)
    # The heading and the ticks are not the legend's.
    for left, line, text in texts(root):
        if line < legend.height and text.rstrip("\N{HORIZONTAL ELLIPSIS}")[:1] in "abcdefgh":
            assert left + len(text) * LETTER <= width + LETTER
    assert legend.height <= ROW * len(names)
    assert picture.height == pytest.approx(100 + legend.height + 16)


def test_a_file_has_a_heading_a_ground_and_both_sets_of_colours() -> None:
    root = root_of(Chart(Axis(0, 1), Axis(0, 1), 100, "s").drawing([], "A & B"))
    assert root.findtext(f"{SVG}title") == "A & B"
    assert "A <chart>" in [text for _, _, text in texts(root)]
    style = root.findtext(f"{SVG}style") or ""
    assert style.count("prefers-color-scheme: dark") == 1
    for colours in (LIGHT, DARK):
        assert f"fill: {colours['ground']}" in style


@given(st.floats(0, 0.9), st.floats(0.01, 1e6))
def test_ticks_begin_where_the_axis_does(low: float, span: float) -> None:
    axis = Axis(low, low + span)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7 or span < 0.02
    assert all(-1e-9 <= axis.at(tick) <= 1 + 1e-9 for tick in ticks)


def test_series_differ_in_more_than_colour() -> None:
    chart = Chart(Axis(0, 1), Axis(0, 1), 100, "s")
    one, other = (chart.mark((0.5, 0.5), series) for series in ("aggregated", "disaggregated"))
    assert one.startswith("<circle")
    assert other.startswith("<polygon")


def heat_map(columns: int, rows: int) -> Picture:
    cells: dict[CellKey, HeatCell] = {
        (p, d): HeatCell(p * d, f"{p * d:,.3f}~") for p in range(1, columns + 1) for d in range(1, rows + 1)
    }
    keys = (columns, rows)
    return HeatMap(
        range(1, columns + 1), range(1, rows + 1), cells, columns * rows, "number of P", "number of D", keys
    ).picture("described")


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 5), (12, 12)])
def test_values_of_a_heat_map_stay_in_their_cells(columns: int, rows: int) -> None:
    picture = heat_map(columns, rows)
    root = root_of(picture)
    assert not overlapping(root)
    boxes = [it for it in root.iter(f"{SVG}rect") if it.get("class") == "heat"]
    assert len(boxes) == columns * rows
    values = [it for it in root.iter(f"{SVG}text") if it.get("class") == "strong"]
    for box, value in zip(boxes, values, strict=True):
        assert len(value.text or "") * LETTER < float(box.get("width") or 0)
        assert float(box.get("x") or 0) + float(box.get("width") or 0) <= picture.width
    (best,) = (it for it in root.iter(f"{SVG}rect") if it.get("class") == "best")
    assert float(best.get("x") or 0) == max(float(box.get("x") or 0) for box in boxes) + 1
    assert float(best.get("y") or 0) == min(float(box.get("y") or 0) for box in boxes) + 1


@given(st.lists(st.floats(-0.9, 30, allow_subnormal=False), min_size=1, max_size=12))
def test_bars_and_their_figures_stay_in_the_picture(shares: list[float]) -> None:
    bars = [NamedShare("a lever", share, f"{share * 100:+.0f} %") for share in shares]
    picture = BarChart(bars, 360, "gain").picture("described")
    root = root_of(picture)
    drawn = [it for it in root.iter(f"{SVG}rect") if it.get("class") == "filled"]
    assert len(drawn) == len(shares)
    for box in drawn:
        assert float(box.get("x") or 0) >= 0
    for left, line, text in texts(root):
        assert left >= -LETTER
        assert left + len(text) * LETTER <= picture.width + 2 * LETTER
        assert line <= picture.height


def luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    wide = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    channels = [int(wide[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_colours_can_be_read(colours: dict[str, str]) -> None:
    """The limits of WCAG 2.1: 4.5 for text, 3 for what is drawn."""
    for name in ("text", "dim", "bound"):
        assert contrast(colours[name], colours["ground"]) >= 4.5
    for name in ("ink", "aggregated", "disaggregated"):
        assert contrast(colours[name], colours["ground"]) >= 2.95
    (strongest,) = (it for it in root_of(heat_map(1, 1)).iter(f"{SVG}rect") if it.get("class") == "heat")
    share = float(strongest.get("fill-opacity") or 0)
    assert contrast(colours["text"], mixed(colours["ink"], colours["ground"], share)) >= 4.5


def mixed(colour: str, ground: str, share: float) -> str:
    wide = [it if len(it) == 7 else "#" + "".join(2 * digit for digit in it[1:]) for it in (colour, ground)]
    channels = [[int(it[at : at + 2], 16) for at in (1, 3, 5)] for it in wide]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in zip(*channels, strict=True))
