"""The page and the charts of a plan: the figures of its outcome, in files that stand alone, without foreign markup."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from pdflow.errors import PdflowError
from pdflow.results import formatting
from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.plan.comparison import compare
from pdflow_sim.plan.designs import Design, EngineShape, PoolShape
from pdflow_sim.plan.files import write_plan
from pdflow_sim.plan.levers import Lever, LeverResult
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.planner import OUT_OF_TIME, Planner
from pdflow_sim.plan.probes import Change, DesignProbe, ProbeResult
from pdflow_sim.plan.report.attainment import attainment_curves, mean_over_seeds, required_share
from pdflow_sim.plan.report.frontier import frontiers, run_points
from pdflow_sim.plan.report.page import plan_page
from pdflow_sim.plan.report.plots import PLOT_NAMES, plots, svg_files
from pdflow_sim.plan.report.ratios import MOST_PAIRS, best_cells
from pdflow_sim.plan.request import PlanOptions, request_of
from pdflow_sim.plan.result import Plan
from pdflow_sim.plan.robustness import Stress, StressResult
from pdflow_sim.plan.search import MeasuredDesign
from pdflow_sim.plan.verdict import PlanVerdict
from tests.support.html_reader import PageReader

SMALL = Path(__file__).resolve().parents[1] / "small.toml"
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title></style><script>alert(1)</script>\"'<img src=x onerror=alert(1)>&amp;"
WHOLE, SHORT = 400, 200


def engine(tp: int) -> EngineShape:
    return EngineShape("h100-sxm", tp)


def aggregated(count: int, tp: int = 1) -> Design:
    return Design((PoolShape("aggregated", engine(tp), count),))


def pair(p: int, d: int, p_tp: int = 1, d_tp: int = 1) -> Design:
    return Design((PoolShape("prefill", engine(p_tp), p), PoolShape("decode", engine(d_tp), d)))


HIGHEST = {
    pair(3, 1): 40.0,
    aggregated(4): 30.0,
    pair(2, 2): 24.0,
    pair(1, 3): 9.0,
    pair(1, 1, 2, 2): 20.0,
    pair(2, 1, 1, 2): 15.0,
    pair(1, 2, 2, 1): 12.0,
    pair(1, 1, 1, 2): 5.0,
}
"""The highest rates of designs, of which the first two are in the finals, with two seeds."""


def ran(design: Design, rate: float, nth: int = 0) -> ProbeResult:
    """The outcome of a design that meets the service level up to its highest rate; the second seed carries less."""
    highest = HIGHEST.get(design, 10.0) - nth
    load = rate / highest
    figures = {
        "output_tokens_per_s": 100.0 * rate,
        "total_tokens_per_s": 300.0 * rate,
        "tpot_mean_ms": 4.0 + 4.0 * load / design.pools[0].engine.tp,
        "slo_attainment": min(1.0, max(0.0, 1.15 - 0.2 * load)),
        "ttft_p99_ms": 100.0 * load,
        "itl_p99_ms": 8.0 * load,
        "e2e_mean_ms": 300.0,
        "requests_per_s": rate,
    }
    return ProbeResult(figures, load)


def searched(design: Design, requests: int, nth: int = 0) -> dict[DesignProbe, ProbeResult]:
    rates = [round(HIGHEST[design] * share, 3) for share in (0.5, 0.9, 1.1, 1.6)]
    return {DesignProbe(design, rate, requests, nth): ran(design, rate, nth) for rate in rates}


def measured(design: Design, requests: int, seeds: int) -> MeasuredDesign:
    highest = HIGHEST[design]
    outcomes = tuple(ran(design, highest - nth, nth) for nth in range(seeds))
    return MeasuredDesign(design, tuple(highest - nth for nth in range(seeds)), requests, outcomes)


def levers(design: Design) -> list[LeverResult]:
    names = (("D: KV memory x 2", 41.0), ("one more P", 60.0), ("network x 2", 40.0), ("D: compute x 2", 48.0))
    return [LeverResult(Lever(name, name, design), rate, 40.0) for name, rate in names]


@pytest.fixture(scope="module")
def nothing_found() -> PlanOutcome:
    """A plan whose time was over before its first run."""
    scenario = Scenario.load(SMALL, {"workload.requests": WHOLE})
    options = PlanOptions(slo="ttft=100ms@p95,itl=20ms@p99,attainment=95%", gpus=4, search="tp,xpyd", seeds=2)
    return Planner(scenario, request_of(scenario, options), budget_s=0.0).run()


@pytest.fixture(scope="module")
def outcome(nothing_found: PlanOutcome) -> PlanOutcome:
    finals, others = list(HIGHEST)[:2], list(HIGHEST)[2:]
    rows = [*(measured(design, WHOLE, 2) for design in finals), *(measured(design, SHORT, 1) for design in others)]
    probes: dict[DesignProbe, ProbeResult] = {}
    for design in HIGHEST:
        probes |= searched(design, SHORT)
    for design, nth in itertools.product(finals, range(2)):
        probes |= searched(design, WHOLE, nth)
    # None of these is a run of a design as it is, on the plan's GPUs.
    probes[DesignProbe(finals[0], 77.0, WHOLE, 0, Change({"fault": []}))] = ran(finals[0], 77.0)
    probes[DesignProbe(pair(4, 1), 78.0, WHOLE)] = ran(pair(4, 1), 78.0)
    probes[DesignProbe(finals[0], 79.0, WHOLE)] = ProbeResult({}, math.inf, "it failed")
    survived = [
        StressResult(Stress("one D lost", lost="decode"), None),
        StressResult(Stress("20 % more requests"), ran(finals[0], 39.0)),
    ]
    return attrs.evolve(
        nothing_found,
        rows=rows,
        probes=probes,
        verdict=compare(rows[0], rows[1], nothing_found.goal),
        operating_rate=35.0,
        levers=levers(finals[0]),
        stresses={finals[0]: survived},
        unfinished="",
    )


@pytest.fixture(scope="module")
def nothing_meets(outcome: PlanOutcome) -> PlanOutcome:
    probes = {probe: attrs.evolve(it, scale=it.scale + 1.5) for probe, it in outcome.probes.items()}
    rows = [attrs.evolve(row, rates=tuple(0.0 for _ in row.rates)) for row in outcome.rows]
    results = [LeverResult(it.lever, 0.0, 0.0, 1.25 if "KV" in it.lever.name else 0.5) for it in outcome.levers]
    return attrs.evolve(outcome, rows=rows, probes=probes, verdict=None, levers=results, stresses={})


@pytest.fixture(scope="module")
def one_design(outcome: PlanOutcome) -> PlanOutcome:
    only = aggregated(4)
    probes = {probe: it for probe, it in outcome.probes.items() if probe.design == only}
    rows = [row for row in outcome.rows if row.design == only]
    return attrs.evolve(outcome, rows=rows, probes=probes, verdict=None, levers=(), stresses={})


CASES = ("outcome", "nothing_found", "nothing_meets", "one_design")


@pytest.fixture(params=CASES)
def each(request: pytest.FixtureRequest) -> PlanOutcome:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, PlanOutcome)
    return found


def drawn(outcome: PlanOutcome, name: str) -> ET.Element:
    return ET.fromstring(svg_files(outcome)[name])


def marks(root: ET.Element) -> Iterator[tuple[str, str]]:
    """The class and the hint of each mark of a run."""
    for element in root.iter():
        hint = element.find(f"{SVG}title")
        if (element.get("class") or "").startswith("mark ") and hint is not None:
            yield element.get("class") or "", hint.text or ""


def test_the_page_has_the_whole_verdict(each: PlanOutcome) -> None:
    text = PageReader(plan_page(each)).text
    verdict = PlanVerdict(each)
    assert verdict.headline in text
    for name, fact in verdict.facts():
        assert f"{name}{fact}" in text
    for cells in verdict.table():
        assert "".join(cells) in text
    for name, _ in verdict.levers():
        assert name in text
    for name, survived in verdict.stresses()[1]:
        assert "".join([name, *survived]) in text


def test_a_cell_of_a_notebook_has_the_verdict_and_the_tables(each: PlanOutcome) -> None:
    page, cell = PageReader(plan_page(each)), PageReader(Plan(each)._repr_html_())
    verdict = PlanVerdict(each)
    assert verdict.headline in cell.text
    for cells in verdict.table():
        assert "".join(cells) in cell.text
    assert not {"svg", "script", "html"} & {name for name, _ in cell.elements}
    sections = {text for text in page.texts if len(text) > 2} & set(cell.texts)
    assert len(sections) > 5, "the same sections as the page"
    rules = re.findall(r"([^{}]+)\{", style(Plan(each)._repr_html_()))
    selectors = [selector.strip() for rule in rules for selector in rule.split(",")]
    assert selectors
    assert all(selector.startswith((".pdflow-cell", "@")) for selector in selectors), "rules hold in the cell alone"


def style(text: str) -> str:
    return text.split("<style>")[1].split("</style>")[0]


def test_plots_are_the_charts_of_the_page(outcome: PlanOutcome, nothing_found: PlanOutcome, tmp_path: Path) -> None:
    plan = Plan(outcome)
    shown = [plan.plot_frontier(), plan.plot_attainment(), plan.plot_heat_map(), plan.plot_heat_map(2)]
    for name, plot in zip(("frontier", "attainment", "heat-map-1", "heat-map-2"), shown, strict=True):
        assert plot._repr_svg_() == svg_files(outcome)[name]
        assert plot.alt in plan_page(outcome)
    plot = plan.plot_levers()
    plot.save(tmp_path / "levers.svg")
    assert (tmp_path / "levers.svg").read_text("utf-8") == svg_files(outcome)["levers"]
    with pytest.raises(PdflowError, match=r"nothing to draw for heat-map-9; it has frontier, attainment, heat-map-1"):
        plan.plot_heat_map(9)
    with pytest.raises(PdflowError, match=r"nothing to draw for frontier; it has no chart"):
        Plan(nothing_found).plot_frontier()


def test_it_has_what_there_is_to_draw(
    outcome: PlanOutcome, nothing_found: PlanOutcome, nothing_meets: PlanOutcome, one_design: PlanOutcome
) -> None:
    assert tuple(plots(outcome)) == PLOT_NAMES
    assert not plots(nothing_found)
    assert set(plots(nothing_meets)) == {"frontier", "attainment", "levers"}, "no highest rate has a colour"
    assert set(plots(one_design)) == {"frontier", "attainment"}


def test_a_file_is_xml_and_asks_for_nothing(each: PlanOutcome) -> None:
    page = PageReader(plan_page(each))
    pictures = [name for name, _ in page.elements if name == "svg"]
    assert len(pictures) == len(plots(each))
    for text in svg_files(each).values():
        root = ET.fromstring(text)
        assert root.tag == f"{SVG}svg"
        assert root.get("width")
        assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
        assert "var(" not in text
        for element in root.iter():
            assert not {"src", "href", "onload"} & set(element.keys())
    for name, attributes in page.elements:
        assert name not in ("script", "link", "img", "iframe", "object", "base", "form", "a", "use")
        assert not attributes.keys() & {"src", "href", "srcset", "action", "onload"}
    whole = plan_page(each)
    assert not re.search(r"url\(|@import|https?:", whole)
    assert "default-src 'none'" in whole


def test_a_heading_fits_into_its_file(outcome: PlanOutcome) -> None:
    plot = attrs.evolve(plots(outcome)["heat-map-4"], title="P TP2 h100-sxm, D TP2 h100-sxm")
    assert plot.picture.width < 6 * len(plot.title), "a map of one cell"
    root = ET.fromstring(plot.svg)
    assert float((root.get("viewBox") or "").split()[2]) > 6 * len(plot.title)


def test_every_chart_is_described(outcome: PlanOutcome) -> None:
    labels = [
        attributes.get("aria-label") for name, attributes in PageReader(plan_page(outcome)).elements if name == "svg"
    ]
    assert len(labels) == len(PLOT_NAMES)
    assert all(labels)


def test_no_text_becomes_markup(outcome: PlanOutcome) -> None:
    named = outcome.scenario.with_({"scenario.name": HOSTILE})
    stress = StressResult(Stress(HOSTILE), None)
    results = [attrs.evolve(it, lever=attrs.evolve(it.lever, name=HOSTILE)) for it in outcome.levers]
    design = outcome.rows[0].design.with_option("method", HOSTILE)
    rows = [attrs.evolve(outcome.rows[0], design=design), *outcome.rows[1:]]
    probes = {attrs.evolve(probe, design=design): it for probe, it in searched(pair(3, 1), WHOLE).items()}
    hostile = attrs.evolve(
        outcome,
        scenario=named,
        levers=results,
        stresses={design: [stress]},
        rows=rows,
        probes=probes,
        unfinished=HOSTILE,
        verdict=None,
    )
    for text, least in ((plan_page(hostile), 5), (Plan(hostile)._repr_html_(), 4)):
        read = PageReader(text)
        assert not {"script", "img"} & {name for name, _ in read.elements}
        assert read.text.count(HOSTILE) >= least
    for text in svg_files(hostile).values():
        assert not [element for element in ET.fromstring(text).iter() if element.tag.endswith(("script", "img"))]


def test_runs_are_marked_as_they_were(outcome: PlanOutcome) -> None:
    """A mark for each run of a design as it is on the plan's GPUs; hollow if it missed, small if it was short."""
    points = run_points(outcome)
    assert {it.probe for it in points} == {
        probe
        for probe, it in outcome.probes.items()
        if not it.error and not probe.change.edits and probe.design.gpus <= 4
    }
    hints = {hint: kind for kind, hint in marks(drawn(outcome, "frontier"))}
    assert 0 < len(hints) <= len(points)
    expected: dict[str, str] = {}
    for it in points:
        seed = outcome.scenario.seed + it.probe.nth
        met = "meets" if it.found.scale <= 1 else "misses"
        user, gpu = (formatting.number(value) for value in it.at)
        rate = f"{formatting.number(it.probe.rate)} requests/s"
        run = f"{it.probe.design.text}: {rate}, seed {seed}, {it.probe.requests} requests"
        hint = f"{run}; {met} the service level; {gpu} tokens/s of a GPU and {user} of a user"
        expected[hint] = f"mark {it.kind}{' hollow' if met == 'misses' else ''}"
        assert it.at == pytest.approx(
            (1000 / it.found.figures["tpot_mean_ms"], 25.0 * it.probe.rate * 4 / it.probe.design.gpus)
        )
    assert hints.items() <= expected.items()


def test_a_frontier_is_of_the_longest_runs_that_meet(outcome: PlanOutcome) -> None:
    points = run_points(outcome)
    found = frontiers(outcome, points)
    assert set(found) == {"aggregated", "disaggregated"}
    for kind, line in found.items():
        meeting = [it.at for it in points if it.kind == kind and it.found.meets and it.probe.requests == WHOLE]
        assert set(line) <= set(meeting)
        assert line == sorted(line)
        for x, y in meeting:
            assert any(a >= x and b >= y for a, b in line)
        for (x, y), (a, b) in itertools.permutations(line, 2):
            assert not (a >= x and b >= y)


def test_the_recommended_design_is_ringed_once(outcome: PlanOutcome, nothing_meets: PlanOutcome) -> None:
    for plan, words in ((outcome, "recommended: 3P TP1 + 1D TP1"), (nothing_meets, "the nearest: 3P TP1 + 1D TP1")):
        root = drawn(plan, "frontier")
        ringed = [it for it in root.iter() if it.get("class") == "ring"]
        assert len(ringed) == 2, "one in the legend"
        assert words in "".join(root.itertext())
    assert not frontiers(nothing_meets, run_points(nothing_meets))


def test_attainment_is_that_of_the_longest_runs(outcome: PlanOutcome) -> None:
    hints = [hint for _, hint in marks(drawn(outcome, "attainment"))]
    best = {pair(3, 1), aggregated(4)}
    expected = {
        probe: it
        for probe, it in outcome.probes.items()
        if probe.design in best and probe.requests == WHOLE and not it.error and not probe.change.edits
    }
    # Where the seeds have the same share at the same rate, one mark covers the other.
    assert len(hints) == len(
        {(probe.design, probe.rate, it.figures["slo_attainment"]) for probe, it in expected.items()}
    )
    assert len(expected) == 16
    for it in expected.values():
        share = formatting.percent(it.figures["slo_attainment"])
        assert any(hint.endswith(f"; {share} of requests meet all bounds") for hint in hints)
    text = "".join(drawn(outcome, "attainment").itertext())
    assert "required share: 95.0 %" in text
    assert "rate of the scenario: 50.00 requests/s" in text
    asked = "".join(drawn(attrs.evolve(outcome, wanted_rate=20.0), "attainment").itertext())
    assert "rate asked for: 20.00 requests/s" in asked


def test_the_mean_over_seeds_ends_where_a_seed_has_no_more_runs() -> None:
    seeds = {0: [(1.0, 1.0), (3.0, 0.8)], 1: [(2.0, 0.9), (4.0, 0.5)]}
    found = mean_over_seeds(seeds)
    assert [rate for rate, _ in found] == [1.0, 2.0, 3.0]
    assert [share for _, share in found] == pytest.approx([0.95, 0.9, 0.75])
    assert mean_over_seeds({0: seeds[0]}) == seeds[0]
    assert mean_over_seeds({0: [(1.0, 1.0)], 1: [(2.0, 0.5)]}) == [(1.0, 0.75)]


def test_the_mean_is_that_of_the_runs(outcome: PlanOutcome) -> None:
    for curve in attainment_curves(outcome):
        for rate, share in curve.mean:
            shares = [it.figures["slo_attainment"] for probe, it in curve.runs if probe.rate == rate]
            assert len(shares) == 2
            assert share == pytest.approx(sum(shares) / 2)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("ttft=1s@p99,itl=50ms@p99", None),
        ("ttft=1s,itl=50ms", 0.95),
        ("ttft=1s@p99,attainment=90%", 0.9),
        ("ttft=1s@p99", 0.99),
        ("tpot=50ms@mean", None),
        ("itl=50ms@p99", None),
    ],
)
def test_a_share_is_required_only_if_the_service_level_demands_one(text: str, share: float | None) -> None:
    assert required_share(ServiceLevel.parse(text)) == share


def test_cells_have_the_highest_rates(outcome: PlanOutcome) -> None:
    cells = best_cells(outcome)
    assert len(cells) == MOST_PAIRS
    for number, (engines, rows) in enumerate(cells.items(), start=1):
        root = drawn(outcome, f"heat-map-{number}")
        texts = [it.text for it in root.iter(f"{SVG}text") if it.get("class") == "strong"]
        assert sorted(texts, key=str) == sorted(row.rate_text for row in rows.values())
        boxes = {it.get("class"): it for it in root.iter(f"{SVG}rect")}
        strongest = max((it for it in root.iter(f"{SVG}rect") if it.get("class") == "heat"), key=opacity)
        assert float(boxes["best"].get("x") or 0) == float(strongest.get("x") or 0) + 1
        assert f"P {engines.prefill}, D {engines.decode}" in (root.findtext(f"{SVG}title") or "")
    assert outcome.rows[0].rate_text == "39.50", "of two seeds"
    assert outcome.rows[2].rate_text == "24.00~"


def opacity(element: ET.Element) -> float:
    return float(element.get("fill-opacity") or 0)


def test_only_the_best_pairs_have_a_map(outcome: PlanOutcome) -> None:
    extra = [attrs.evolve(outcome.rows[-1], design=pair(1, 1, 2, tp)) for tp in (4, 8)]
    found = plots(attrs.evolve(outcome, rows=[*outcome.rows, *extra]))
    assert [plot.title for name, plot in found.items() if name.startswith("heat-map")] == [
        "P TP1, D TP1",
        "P TP2, D TP2",
        "P TP1, D TP2",
        "P TP2, D TP1",
    ]


def test_two_types_of_gpus_are_named(outcome: PlanOutcome) -> None:
    prefill, decode = (EngineShape(gpu, 1, named=True) for gpu in ("h200-sxm", "h100-sxm"))
    other = Design((PoolShape("prefill", prefill, 1), PoolShape("decode", decode, 3)))
    rows = [attrs.evolve(outcome.rows[0], design=other), *outcome.rows]
    assert plots(attrs.evolve(outcome, rows=rows))["heat-map-1"].title == "P TP1 h200-sxm, D TP1 h100-sxm"


def test_gains_are_sorted_and_those_without_one_are_named(outcome: PlanOutcome) -> None:
    texts = [it.text for it in drawn(outcome, "levers").iter(f"{SVG}text")]
    figures = [text for text in texts if text and text.startswith("+")]
    assert figures == ["+50 %", "+20 %", "+2 %"]
    names = [it.text for it in drawn(outcome, "levers").iter(f"{SVG}text") if it.get("class") == "strong halo"]
    assert names == ["one more P", "D: compute x 2", "D: KV memory x 2"]
    widths = [
        float(it.get("width") or 0) for it in drawn(outcome, "levers").iter(f"{SVG}rect") if it.get("class") == "filled"
    ]
    assert [width / widths[0] for width in widths] == pytest.approx([1.0, 0.4, 0.05], abs=0.01)
    assert "Without a gain: network x 2." in PageReader(plan_page(outcome)).text


def test_a_loss_goes_to_the_other_side(nothing_meets: PlanOutcome) -> None:
    root = drawn(nothing_meets, "levers")
    assert "-20 %" in [it.text for it in root.iter(f"{SVG}text")]
    bars = [it for it in root.iter(f"{SVG}rect") if it.get("class") == "filled"]
    gain, loss = (float(bars[n].get("x") or 0) for n in (0, -1))
    assert loss < gain == pytest.approx(loss + float(bars[-1].get("width") or 0), abs=0.01)


def test_an_unfinished_plan_is_called_so(nothing_found: PlanOutcome, outcome: PlanOutcome) -> None:
    assert nothing_found.unfinished == OUT_OF_TIME
    assert "4 GPUs" in PageReader(plan_page(nothing_found)).text
    page = PageReader(plan_page(attrs.evolve(outcome, unfinished=OUT_OF_TIME, levers=(), stresses={})))
    assert OUT_OF_TIME in page.text


def test_equal_plans_give_equal_files_and_none_is_left_of_an_earlier_one(
    tmp_path: Path, outcome: PlanOutcome, one_design: PlanOutcome
) -> None:
    write_plan(tmp_path, outcome)
    first = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert set(first) == {f"{name}.svg" for name in PLOT_NAMES}
    page = (tmp_path / "report.html").read_bytes()
    write_plan(tmp_path, outcome)
    assert {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()} == first
    assert (tmp_path / "report.html").read_bytes() == page
    write_plan(tmp_path, one_design)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"frontier.svg", "attainment.svg"}


def test_many_runs_make_no_large_page(outcome: PlanOutcome) -> None:
    rates = [1 + number / 50 for number in range(2_500)]
    probes = {DesignProbe(pair(3, 1), rate, WHOLE): ran(pair(3, 1), rate) for rate in rates}
    files = svg_files(attrs.evolve(outcome, probes=probes))
    assert max(len(text) for text in files.values()) < 100_000
