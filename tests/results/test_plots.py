"""Pictures: what stands on their axes is what the figures say, and they lead back to the scenario."""

from __future__ import annotations

import base64
import io
from itertools import combinations
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from IPython.core.formatters import DisplayFormatter

import pdflow
from pdflow.errors import PdflowError
from pdflow.results import formatting
from pdflow.results.palette import ROLES, SERIES
from pdflow.results.plots import RunFigure
from pdflow.results.records import STAGES, Records
from pdflow.results.result import Result
from pdflow.results.totals import Totals
from pdflow.scenario.schema.scenario import ClassSlo, Slo

SMALL = Path(__file__).resolve().parents[1] / "sim/small.toml"


@pytest.fixture(scope="module")
def push() -> Result:
    return pdflow.simulate(SMALL, overrides={"workload.requests": 200, "slo.ttft_ms": 60})


@pytest.fixture(scope="module")
def pull(push: Result) -> Result:
    return pdflow.simulate(push.plot_ttft().to_scenario().with_({"transfer.method": "nixl-pull"}))


def texts(figure: RunFigure) -> list[str]:
    assert figure._repr_png_().startswith(b"\x89PNG")
    legends = [axes.get_legend() for axes in figure.axes] + figure.legends
    return [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]


def test_a_figure_leads_back_to_its_scenario(push: Result, pull: Result) -> None:
    for figure in (push.plot_ttft(), push.plot_waterfall(), push.plot_timeline()):
        assert figure.to_scenario() == push.scenario
        assert pdflow.simulate(figure.to_scenario()).summary == push.summary
    both = push.plot_waterfall(pull)
    assert both.to_scenario(1).resolved.transfer.method == "nixl-pull"
    with pytest.raises(IndexError):
        both.to_scenario(2)


def test_a_run_of_the_command_has_no_scenario(result: Result) -> None:
    assert result.scenario is None
    with pytest.raises(PdflowError, match="this result has no scenario"):
        result.plot_ttft().to_scenario()


def test_ttft_is_drawn_through_its_percentiles(push: Result, pull: Result) -> None:
    figure = push.plot_ttft(pull)
    [axes] = figure.axes
    line = axes.get_lines()[0]
    at = dict(zip(np.round(np.asarray(line.get_ydata()), 2), np.asarray(line.get_xdata()), strict=True))
    for percent in (50, 90, 99):
        assert at[percent / 100] == pytest.approx(push.summary[f"ttft_p{percent}_ms"])
    # What both have is no label; what differs is.
    assert texts(figure) == ["small", "transfer.method = nixl-pull", "SLO 60 ms"]
    assert axes.get_xlabel() == "TTFT in ms"
    assert texts(push.plot_ttft(pull, labels=["push", "pull"]))[:2] == ["push", "pull"]
    with pytest.raises(ValueError, match="1 labels for 2 runs"):
        push.plot_ttft(pull, labels=["push"])


def test_the_waterfall_adds_up(push: Result, pull: Result) -> None:
    [axes] = push.plot_waterfall().axes
    assert sum(patch.get_width() for patch in axes.patches) == pytest.approx(push.summary["ttft_mean_ms"])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(STAGES)
    figure = push.plot_waterfall(pull, labels=["push", "pull"])
    assert {"prefill", "first_decode"} <= set(texts(figure))
    ends = [patch.get_x() + patch.get_width() for patch in figure.axes[0].patches]
    assert max(ends) == pytest.approx(max(it.summary["ttft_mean_ms"] for it in (push, pull)), rel=0.02)


def test_the_timeline_has_a_line_for_what_there_was(push: Result) -> None:
    figure = push.plot_timeline()
    assert {"in prefill", "decoding", "prefill GPUs at work"} <= set(texts(figure))
    warm = pdflow.simulate(push.scenario.with_({"workload.warmup_s": 1}) if push.scenario else SMALL)
    top, _ = warm.plot_timeline().axes
    assert any(list(np.asarray(line.get_xdata())) == [1, 1] for line in top.get_lines())


def test_a_role_has_one_colour_in_both_panels(push: Result) -> None:
    top, bottom = push.plot_timeline().axes
    colours = {line.get_label(): line.get_color() for axes in (top, bottom) for line in axes.get_lines()}
    assert colours["in prefill"] == colours["prefill GPUs at work"] == ROLES["prefill"]
    assert colours["decoding"] == colours["decode GPUs at work"] == ROLES["decode"]
    dashes = {line.get_label(): line.get_linestyle() for line in top.get_lines()}
    assert dashes["in prefill"] == dashes["decoding"] == "-"
    assert dashes["waiting for prefill"] == ":", "what has the colour of another line has other dashes"


def test_an_aggregated_engine_has_a_colour_too() -> None:
    alone = pdflow.simulate(SMALL.with_name("alone.toml"), overrides={"workload.requests": 50})
    assert {line.get_color() for axes in alone.plot_timeline().axes for line in axes.get_lines()} == {
        ROLES["aggregated"]
    }


def test_lines_of_the_slo_are_drawn_wherever_there_is_one(push: Result) -> None:
    [axes] = push.plot_waterfall().axes
    assert [list(np.asarray(line.get_xdata())) for line in axes.get_lines()] == [[60, 60]]
    assert "SLO 60 ms" in [text.get_text() for text in axes.texts]
    far = attrs.evolve(push, header=attrs.evolve(push.header, slo=Slo(ttft_ms=1e6)))
    [axes] = far.plot_waterfall().axes
    assert not axes.get_lines(), "the bars would shrink to nothing"
    assert "SLO 1e+06 ms \N{RIGHTWARDS ARROW}" in [text.get_text() for text in axes.texts]
    assert axes.get_xlim()[1] < 1e5
    classes = {"chat": ClassSlo(ttft_ms=30), "batch": ClassSlo(e2e_ms=10)}
    several = attrs.evolve(push, header=attrs.evolve(push.header, class_slos=classes))
    assert texts(several.plot_ttft())[1:] == ["SLO of chat 30 ms", "SLO 60 ms"]


def test_figures_have_alternative_texts(push: Result, pull: Result) -> None:
    summary = push.summary
    ttft = push.plot_ttft(pull, labels=["push", "pull"]).alt
    assert ttft.startswith("Distribution of the time to first token. push: median ")
    assert ttft.endswith("SLO 60 ms.")
    waterfall = push.plot_waterfall().alt
    assert waterfall.startswith(
        f"Mean time to first token by stage. small: {formatting.number(summary['ttft_mean_ms'])} ms"
    )
    timeline = push.plot_timeline()
    assert "in prefill: " in timeline.alt
    assert "decode GPUs at work: " in timeline.alt
    data, metadata = DisplayFormatter().format(timeline)
    assert metadata["image/png"] == {"alt": timeline.alt}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "text/plain" in data


SEEN_BY = {
    # Machado, Oliveira, Fernandes (2009), severity 1.0, of linear RGB.
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    "most": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}


@pytest.mark.parametrize("sight", SEEN_BY)
@pytest.mark.parametrize("colours", [tuple(ROLES.values()), SERIES], ids=["roles", "series"])
def test_colours_can_be_told_apart_by_everybody(colours: tuple[str, ...], sight: str) -> None:
    seen = [lab(colour, np.array(SEEN_BY[sight])) for colour in colours]
    for (one, a), (other, b) in combinations(zip(colours, seen, strict=True), 2):
        assert np.linalg.norm(a - b) > 12, f"{one} and {other}; a difference of 2.3 is just noticeable"


def lab(colour: str, sight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """CIE L*a*b* of what is seen of an sRGB colour."""
    srgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(
        sight @ linear, 0, 1
    )
    x, y, z = np.cbrt(xyz / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_of_nothing_there_are_empty_pictures(result: Result) -> None:
    nothing = Result.of(result.header, Records(), {}, Totals())
    for figure in (nothing.plot_ttft(), nothing.plot_waterfall(), nothing.plot_timeline()):
        figure.savefig(io.BytesIO(), format="png")


def test_a_cell_of_a_notebook(push: Result) -> None:
    cell = push._repr_html_()
    assert "The SLO was met by" in cell
    assert all(f">{stage}<" in cell for stage in STAGES)
    assert "<script" not in cell
    assert "<h1>small</h1>" in cell
    hostile = pdflow.simulate(SMALL, overrides={"workload.requests": 1, "scenario.name": "<script>"})
    assert "<script" not in hostile._repr_html_()
