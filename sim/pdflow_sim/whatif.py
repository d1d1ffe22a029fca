"""`pdflow.whatif`: sliders that simulate a scenario again, and its figures next to those of the unchanged scenario.

A slider is a list of values and the edits that each of them makes. `WhatIfRuns` simulates and compares, without
widgets; `panel` shows it in a notebook, by the extra `notebook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from pdflow.errors import PdflowError, ScenarioError
from pdflow.results import formatting
from pdflow.results.extra import notebook_extra
from pdflow.results.page.cell import framed
from pdflow.results.page.markup import Html, table, tag
from pdflow.results.result import Result
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.plan.traffic import Traffic
from pdflow_sim.run import simulate

if TYPE_CHECKING:
    from ipywidgets import VBox

FACTORS: Final = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4)
"""Of the scenario's rate."""
GBITS: Final = (5, 10, 25, 50, 100, 200, 400, 800)
BLOCK_SIZES: Final = (8, 16, 32, 64, 128)

FIGURES: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "TTFT p50, ms": ("ttft_p50_ms", formatting.number),
    "TTFT p99, ms": ("ttft_p99_ms", formatting.number),
    "ITL p50, ms": ("itl_p50_ms", formatting.number),
    "ITL p99, ms": ("itl_p99_ms", formatting.number),
    "SLO met by": ("slo_attainment", formatting.percent),
    "goodput, requests/s": ("goodput_rps", formatting.number),
    "completed, requests/s": ("requests_per_s", formatting.number),
}
"""The rows of the table: the figure of `Result.summary`, and how it is written."""


@attrs.frozen
class Slider:
    """A quantity that can be changed: its values in ascending order, and the scenario's own, which edits nothing."""

    name: str
    own: float
    values: tuple[float, ...]
    edits: Callable[[float], Mapping[str, Any]]

    @staticmethod
    def around(name: str, own: float, values: tuple[float, ...], edits: Callable[[float], Mapping[str, Any]]) -> Slider:
        """Return a slider with the scenario's own value among the values."""
        return Slider(name, own, tuple(sorted({*values, own})), edits)


def sliders_of(scenario: Scenario, requests: int) -> Iterator[Slider]:
    """Yield the sliders of a scenario; none for what it does not have, such as the rate of a closed loop."""
    try:
        traffic = Traffic.of(scenario, requests)
    except ScenarioError:
        pass
    else:
        rates = tuple(traffic.rate * factor for factor in FACTORS)
        yield Slider.around("requests/s", traffic.rate, rates, lambda rate: _at_rate(traffic, rate))
    pools, network = scenario.resolved.pools, scenario.resolved.network
    for pool in pools:
        counts = tuple(range(1, max(2 * pool.replicas, 4) + 1))
        yield Slider.around(f"{pool.name} engines", pool.replicas, counts, _whole([f"pool.{pool.name}.replicas"]))
    if network.bandwidth_bytes_per_s is not None:
        own = network.bandwidth_bytes_per_s * 8 / 1e9
        yield Slider.around(
            "Gb/s per NIC", own, GBITS, lambda gbits: {"network.bandwidth_bytes_per_s": int(gbits * 1e9 / 8)}
        )
    sizes = {pool.block_size for pool in pools}
    if len(sizes) == 1:
        keys = [f"pool.{pool.name}.block_size" for pool in pools]
        yield Slider.around("tokens per block", sizes.pop(), BLOCK_SIZES, _whole(keys))


def _at_rate(traffic: Traffic, rate: float) -> Mapping[str, Any]:
    edits = traffic.edits(rate, traffic.requests)
    return {key: value for key, value in edits.items() if key != "workload.requests"}  # the runs have as many already


def _whole(keys: Iterable[str]) -> Callable[[float], Mapping[str, Any]]:
    return lambda value: dict.fromkeys(keys, int(value))


class WhatIfRuns:
    """A scenario with sliders. Runs are short: the first `requests` requests; each setting is run once."""

    def __init__(self, scenario: Scenario, requests: int) -> None:
        own = scenario.resolved.workload.requests
        self.scenario = scenario.with_({"workload.requests": requests if own is None else min(own, requests)})
        self.sliders = {slider.name: slider for slider in sliders_of(self.scenario, requests)}
        self._results: dict[tuple[tuple[str, float], ...], Result] = {}

    def edits(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Return the edits of the sliders that are not at the scenario's own value, by their names."""
        moved = self._moved(values)
        return {key: value for name, at in moved.items() for key, value in self.sliders[name].edits(at).items()}

    def _moved(self, values: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in values.items() if value != self.sliders[name].own}

    def result(self, values: Mapping[str, float]) -> Result:
        """Simulate the scenario with the sliders at these values. Raises ScenarioError."""
        key = tuple(sorted(self._moved(values).items()))
        if key not in self._results:
            edited = self.scenario.with_(self.edits(values))
            self._results[key] = simulate(edited.resolved, written=edited, quiet=True).result
        return self._results[key]

    def rows(self, values: Mapping[str, float]) -> Iterator[tuple[str, str, str, str]]:
        """Yield each figure unchanged, changed, and the difference."""
        before, after = self.result({}).summary, self.result(values).summary
        for name, (figure, text) in FIGURES.items():
            old, new = before[figure], after[figure]
            if old is not None and new is not None:
                yield name, text(old), text(new), _difference(old, new, share=text is formatting.percent)

    def html(self, values: Mapping[str, float]) -> Html:
        """Return the table and the edits, or what is wrong with the scenario."""
        edits = self.edits(values)
        try:
            shown = table(["", "unchanged", "changed", "difference"], self.rows(values))
        except PdflowError as error:
            shown = tag("pre", str(error))
        return framed([shown, tag("p", tag("code", f"scenario.with_({edits!r})"), class_="dim")])


def _difference(old: float, new: float, *, share: bool) -> str:
    if share:
        return f"{100 * (new - old):+.1f} points"
    return f"{100 * (new / old - 1):+.0f} %" if old else ""


def panel(what: WhatIfRuns) -> VBox:
    """Return the sliders and the table as widgets. Raises MissingBackendError without ipywidgets."""
    with notebook_extra():
        import ipywidgets
    controls = {
        slider.name: ipywidgets.SelectionSlider(
            options=[(formatting.number(value), value) for value in slider.values],
            value=slider.own,
            description=slider.name,
            continuous_update=False,  # a run for each value that the slider passes would be too slow
            style={"description_width": "9em"},
            layout={"width": "30em"},
        )
        for slider in what.sliders.values()
    }
    shown = ipywidgets.HTML()

    def update(_: object = None) -> None:
        shown.value = what.html({name: control.value for name, control in controls.items()})

    for control in controls.values():
        control.observe(update, names="value")
    update()
    return ipywidgets.VBox([*controls.values(), shown])
