"""Sliders edit the scenario that they are of, and the table has the figures of both runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import pdflow
from pdflow.errors import MissingBackendError
from pdflow.results import formatting
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.whatif import FIGURES, Slider, WhatIfRuns, panel
from tests.support.html_reader import PageReader

SMALL = Path(__file__).parent / "small.toml"


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return Scenario.load(SMALL, {"workload.requests": 40, "slo": {"ttft_ms": 50}, "network.preset": "rdma-400g"})


@pytest.fixture(scope="module")
def what(scenario: Scenario) -> WhatIfRuns:
    return WhatIfRuns(scenario, requests=30)


def test_every_value_of_every_slider_is_a_scenario(what: WhatIfRuns) -> None:
    pools = [f"{pool.name} engines" for pool in what.scenario.resolved.pools]
    assert list(what.sliders) == ["requests/s", *pools, "Gb/s per NIC", "tokens per block"]
    for name, slider in what.sliders.items():
        assert list(slider.values) == sorted(set(slider.values))
        assert what.edits({name: slider.own}) == {}, "its own value changes nothing"
        for value in slider.values:
            edited = what.scenario.with_(what.edits({name: value}))
            assert (edited == what.scenario) == (value == slider.own)


def test_sliders_change_what_they_are_called(what: WhatIfRuns) -> None:
    p, d, *_ = what.scenario.resolved.pools
    rate = what.sliders["requests/s"].own
    moved = {
        "requests/s": 2 * rate,
        f"{p.name} engines": 3,
        f"{d.name} engines": 4,
        "Gb/s per NIC": 100,
        "tokens per block": 64,
    }
    resolved = what.scenario.with_(what.edits(moved)).resolved
    assert [pool.replicas for pool in resolved.pools] == [3, 4]
    assert {pool.block_size for pool in resolved.pools} == {64}
    assert resolved.network.bandwidth_bytes_per_s == 12.5e9
    arrival = resolved.workload.arrival
    assert arrival is not None
    assert arrival.rate_rps == pytest.approx(2 * rate)


def test_figures_are_those_of_the_two_runs(what: WhatIfRuns) -> None:
    moved = {"requests/s": what.sliders["requests/s"].values[-1]}
    before = pdflow.simulate(what.scenario).summary
    after = pdflow.simulate(what.scenario.with_(what.edits(moved))).summary
    assert before["requests"] == 30
    assert after["ttft_p99_ms"] > before["ttft_p99_ms"]
    rows = {name: cells for name, *cells in what.rows(moved)}
    assert list(rows) == list(FIGURES)
    for name, (figure, text) in FIGURES.items():
        assert rows[name][:2] == [text(before[figure]), text(after[figure])]
    gain = after["ttft_p99_ms"] / before["ttft_p99_ms"] - 1
    assert rows["TTFT p99, ms"][2] == f"{gain * 100:+.0f} %"
    points = 100 * (after["slo_attainment"] - before["slo_attainment"])
    assert rows["SLO met by"][2] == f"{points:+.1f} points"
    assert what.result(moved) is what.result(dict(moved)), "a setting is run once"
    own = {slider.name: slider.own for slider in what.sliders.values()}
    assert what.result(own) is what.result({})


def test_what_has_no_rate_or_no_service_level_does_without(scenario: Scenario) -> None:
    closed = scenario.with_({"workload.arrival": {"process": "closed", "concurrency": 2}, "slo": None})
    what = WhatIfRuns(closed, requests=10)
    assert "requests/s" not in what.sliders
    names = [name for name, *_ in what.rows({})]
    assert "SLO met by" not in names
    assert "TTFT p99, ms" in names
    mixed = scenario.with_({f"pool.{scenario.resolved.pools[0].name}.block_size": 64})
    assert "tokens per block" not in WhatIfRuns(mixed, requests=10).sliders


def test_a_refused_setting_shows_the_reason(scenario: Scenario) -> None:
    what = WhatIfRuns(scenario, requests=10)
    what.sliders["engines"] = Slider("engines", 1, (1, 2), lambda value: {"pool.nowhere.replicas": value})
    read = PageReader(what.html({"engines": 2}))
    assert "nowhere" in read.text
    assert not [name for name, _ in read.elements if name == "table"]


def test_without_the_extra_the_error_names_it(what: WhatIfRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(MissingBackendError, match=r"ipywidgets is not installed: pip install"):
        panel(what)


def test_a_slider_that_moves_runs_again(scenario: Scenario) -> None:
    pytest.importorskip("ipywidgets", reason="the extra `notebook` is not installed")
    box = pdflow.whatif(scenario, requests=20)
    *controls, shown = box.children
    before = shown.value
    what = WhatIfRuns(scenario, requests=20)
    assert [control.description for control in controls] == list(what.sliders)
    assert before == what.html({name: slider.own for name, slider in what.sliders.items()})
    controls[0].value = what.sliders["requests/s"].values[-1]
    p99 = what.result({"requests/s": controls[0].value}).summary["ttft_p99_ms"]
    assert formatting.number(p99) in PageReader(shown.value).text
    assert "workload.arrival.rate_rps" in shown.value
    controls[0].value = what.sliders["requests/s"].own
    assert shown.value == before
