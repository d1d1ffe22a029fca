"""Pictures: what stands on their axes is what the figures say, and they lead back to the scenario."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import pdflow
from pdflow.errors import PdflowError
from pdflow.results.plots import RunFigure
from pdflow.results.records import STAGES, Records
from pdflow.results.result import Result
from pdflow.results.totals import Totals

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
