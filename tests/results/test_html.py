"""The page: safe whatever things are called, the same bytes for the same run, small, and without any other file."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import pdflow
from pdflow.cli import cli
from pdflow.results import formatting
from pdflow.results.files.bench_json import RunHeader
from pdflow.results.page.chart import WIDTH, Axis, Chart
from pdflow.results.page.curves import LINKS_SHOWN, SLICES, distributions_ms, over_time
from pdflow.results.page.markup import Html, bar, tag
from pdflow.results.page.page import ROWS_SHOWN, SCENARIO_SHOWN, page
from pdflow.results.recording import LinkCourse, Recording, TimeSeries
from pdflow.results.records import D_ADMIT, HANDOFF, NOTIFY, P_QUEUE, PREFILL, ROUTE, XFER_POST, XFER_WIRE, Records
from pdflow.results.result import Result
from pdflow.results.totals import EngineTotals, LinkTotals, Totals
from pdflow.scenario.reading.load import load
from pdflow_sim.run import RunOptions, conclude, prepare, run
from tests.support.html_reader import PageReader

FULL = LinkTotals(name="full", bytes=1, capacity_bytes_per_s=5 * 10**10)
HOSTILE = "</pre></style><script>alert(1)</script>\"'<img src=x onerror=alert(1)>&amp;"


def nothing(name: str = "nothing") -> Result:
    header = RunHeader(scenario_name=name, scenario_sha256="0" * 64, seed=0, version="0", interrupted=True)
    return Result.of(header, Records(), {}, Totals())


def test_it_leads_with_the_verdict(result: Result) -> None:
    text = PageReader(page(result)).text
    assert "The SLO was met by 25.0 % of requests: a goodput of 0.500 requests/s." in text
    assert "The longest stage before the first token was prefill: 20.00 of a mean 40.00 ms, 50.0 %." in text
    assert "Of 5 requests: 2 completed, 1 failed, 1 cancelled, 1 unfinished." in text


def test_the_page_has_all_figures_of_the_printed_report(result: Result) -> None:
    """Every figure of the report's tables stands on the page too, in its words."""
    printed = str(result.table())
    text = PageReader(page(result)).text
    figures = re.findall(r"\d[\d,]*\.\d+", printed)
    assert len(figures) > 30
    assert not [figure for figure in figures if figure not in text]


def test_the_page_says_how_full_each_engine_was(result: Result) -> None:
    """Time in steps alone reads as saturation."""
    engines = [attrs.evolve(engine, max_num_seqs=64) for engine in result.totals.engines]
    run = attrs.evolve(result, totals=attrs.evolve(result.totals, engines=engines))
    markup = page(run)
    (row,) = re.findall(r"<tr><td[^>]*>decode-0</td>.*?</tr>", markup)
    assert re.findall(r">([^<>]+)</td>", row) == ["decode-0", "75.0 %", "0.8", "64", "1", "20", "1,000"]
    assert "in steps for as long as it has one sequence" in PageReader(markup).text


def test_pools_with_equal_step_times_share_a_row(result: Result) -> None:
    markup = page(result)
    assert len(re.findall("constant, as the scenario states", markup)) == 1
    assert ">prefill, decode</td>" in markup


def test_a_stage_that_no_request_was_in_has_no_picture(result: Result) -> None:
    text = PageReader(page(result)).text
    assert re.search(r"Always zero: [^.]*\bdecoding\b", text)
    assert "decoding:" not in text
    assert "in prefill:" in text


def test_a_run_of_nothing_has_a_page() -> None:
    text = PageReader(page(nothing())).text
    assert "Interrupted" in text
    assert "No request received a first token" in text


def test_no_text_of_a_scenario_becomes_markup(result: Result) -> None:
    header = attrs.evolve(
        result.header,
        scenario_name=HOSTILE,
        command_line=HOSTILE,
        model_id=HOSTILE,
        workload_note=HOSTILE,
        costs=tuple(attrs.evolve(cost, pool=HOSTILE, error_bar=HOSTILE) for cost in result.header.costs),
    )
    for engine in result.totals.engines:
        engine.name = HOSTILE
    result.totals.links[0].name = HOSTILE
    tame = PageReader(page(result, "[scenario]"))
    read = PageReader(page(attrs.evolve(result, header=header), HOSTILE))
    assert read.text.count(HOSTILE) >= 9
    assert {name for name, _ in read.elements} == {name for name, _ in tame.elements}
    assert not [name for name, _ in read.elements if name in ("script", "img")]


@pytest.mark.parametrize("name", ["\x00\x1b[31m", "\ud800", "\x85"])
def test_what_cannot_stand_in_a_page_is_replaced(name: str) -> None:
    text = page(nothing(name), name)
    assert text.encode().decode() == text
    assert name[0] not in text
    assert "\ufffd" in text


def test_it_asks_for_nothing_else(result: Result) -> None:
    text = page(result, "x = 'http://example.com'")
    for name, attributes in PageReader(text).elements:
        assert name not in ("script", "link", "img", "iframe", "object", "base", "form", "a", "use")
        assert not attributes.keys() & {"src", "href", "srcset", "action", "onload", "background"}
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_however_much_there_is_to_show_it_stays_small() -> None:
    engines = [EngineTotals(name=f"e{i}", role="prefill", busy_ps=i) for i in range(5_000)]
    result = Result.of(nothing().header, Records(), {}, Totals(duration_ns=1, engines=engines))
    text = page(result, "x" * 10 * SCENARIO_SHOWN)
    assert f"{5_000 - ROWS_SHOWN:,} more are in results.json." in text
    assert "Cut after 200,000 characters." in text
    assert len(text) < SCENARIO_SHOWN + 50_000


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "a<b", Html("<i>"), class_='"') == '<p class="&quot;">a&lt;b<i></p>'


def test_a_bar_stays_in_its_cell() -> None:
    assert "margin-left:50.00%;width:50.00%" in bar(0.5, 1.0 + 1e-9)
    assert "<i" not in bar(0.5, 0.5)


def steady(requests: int) -> Result:
    """One arrives each ms and is ten times as long in each place as in the one before."""
    records = Records()
    for request in range(requests):
        at = request * 10**6
        records.add(at, 100, 11)
        records.prefill_engine[request], records.decode_engine[request] = "p", "d"
        for index, stage in enumerate((ROUTE, P_QUEUE, PREFILL, HANDOFF, D_ADMIT, XFER_POST, XFER_WIRE, NOTIFY)):
            records.ends[stage][request] = at + 10**index
        records.first_token_ns[request] = at + 2 * 10**7
        records.last_token_ns[request] = at + 7 * 10**7
        records.outcome[request] = "completed"
    engines = [EngineTotals(name=name, role=role) for name, role in (("p", "prefill"), ("d", "decode"))]
    duration_ns = (requests - 1) * 10**6 + 7 * 10**7
    return Result.of(nothing().header, records, {}, Totals(duration_ns=duration_ns, engines=engines))


def test_what_the_tables_quote_lies_on_the_curves(result: Result) -> None:
    for name, curve in distributions_ms(result.records).items():
        quoted = getattr(result.metrics, name.lower())
        assert len(curve) == 101
        assert (curve[50], curve[90], curve[99]) == pytest.approx((quoted.p50_ms, quoted.p90_ms, quoted.p99_ms))
        assert curve[100] == pytest.approx(quoted.max_ms)
        assert sum(curve) / 101 == pytest.approx(quoted.mean_ms)


def test_counts_over_time_are_littles_law() -> None:
    """Where one arrives each ms, as many are in a place as ms pass there."""
    requests, busy = over_time(steady(2_000))
    middle = {curve.name: (curve.means[SLICES // 2], curve.highest[SLICES // 2]) for curve in (*requests, *busy)}
    mean = {name: figures[0] for name, figures in middle.items()}
    assert mean["KV on its way"] == pytest.approx(0.9, rel=0.05)
    assert mean["decoding"] == pytest.approx(60, rel=0.02)
    assert mean["decode GPUs at work"] == 1.0
    assert mean["prefill GPUs at work"] < 0.001
    assert middle["KV on its way"][1] == 1
    assert middle["decoding"][1] == 60


def test_work_over_time_adds_up_to_the_busy_share(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO)
    result = pdflow.simulate(path)
    _, busy = over_time(result)
    for curve, role in zip(busy, ("prefill", "decode"), strict=True):
        assert sum(curve.means) / SLICES == pytest.approx(result.totals.gpu_busy_share(role), rel=0.01)


def test_links_and_blocks_over_time_are_those_of_the_tables(tmp_path: Path) -> None:
    """Means over the run of what was recorded, where results.json has the same from elsewhere."""
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO)
    scenario = load(path)
    world, _ = prepare(scenario, RunOptions(html=True), [])
    assert not run(world, None, drain=False)
    result = conclude(scenario, world, (), False)
    assert world.recorder is not None
    recording = world.recorder.recording(world.fabric.paths.names)
    _, shares = over_time(result, recording)
    means = {curve.name: sum(curve.means) / SLICES for curve in shares}
    links = result.totals.busiest_links(LINKS_SHOWN)
    assert [name for name in means if name.startswith("link ")] == [f"link {link.name}" for link in links]
    for link in links:
        assert means[f"link {link.name}"] == pytest.approx(link.utilisation(result.totals.duration_ns), rel=1e-6)
    peaks = {e.role: e.peak_kv_blocks / e.kv_blocks for e in result.totals.engines}
    for role in ("prefill", "decode"):
        assert 0 < means[f"{role} KV blocks in use"] < peaks[role]
    text = PageReader(page(result, "", recording)).text
    assert f"link {links[0].name}: {formatting.percent(means[f'link {links[0].name}'])}" in text


def test_a_link_that_is_full_all_the_time_is_so_on_the_page() -> None:
    series = TimeSeries()
    series.record(0, 5 * 10**10)
    result = Result.of(nothing().header, Records(), {}, Totals(duration_ns=86_400 * 10**9, links=[FULL]))
    _, [curve] = over_time(result, Recording((LinkCourse("full", 5 * 10**10, series),)))
    assert curve.means == pytest.approx([1.0] * SLICES)


def test_a_hundred_thousand_requests_make_no_large_page() -> None:
    text = page(steady(100_000))
    assert len(text) < 100_000
    curves = [a["points"] or "" for name, a in PageReader(text).elements if name in ("polyline", "polygon")]
    assert len(curves) >= 10
    assert max(len(points.split()) for points in curves) <= 200


def test_a_warm_up_is_in_no_distribution_and_is_shown_over_time() -> None:
    whole = steady(1_000)
    header = attrs.evolve(whole.header, warmup_ns=400 * 10**6)
    text = page(Result.of(header, whole.records, {}, whole.totals))
    courses = sum("since the start" in line for line in PageReader(text).texts)
    assert courses == 8
    assert sum(attributes.get("class") == "bound" for _, attributes in PageReader(text).elements) == courses
    early = whole.records.first_token_ns
    early[:400] = [instant + 10**9 for instant in early[:400]]
    last = whole.records.last_token_ns
    last[:400] = [instant + 10**9 for instant in last[:400]]
    slow = page(Result.of(header, whole.records, {}, whole.totals))
    assert slow.partition("Over time")[0] == text.partition("Over time")[0]


def test_one_request_makes_a_page() -> None:
    text = PageReader(page(steady(1))).text
    assert "1 request in 0.07 s" in text
    assert "TTFT: share of completed requests" in text
    assert "decoding: 0.857 on average, 1 at most" in text


def test_the_slo_is_a_line_and_that_of_each_class_too(result: Result) -> None:
    assert "SLO 40 ms" in PageReader(page(result)).text
    slos = {"chat": result.header.slo}
    by_class = attrs.evolve(result, header=attrs.evolve(result.header, class_slos=slos))
    assert "SLO 40 ms" in PageReader(page(by_class)).text, "it holds for classes without bounds of their own"
    assert "SLO of chat 40 ms" in PageReader(page(by_class)).text
    described = [attributes.get("aria-label") or "" for _, attributes in PageReader(page(by_class)).elements]
    assert "Distribution of TTFT: median 40.00 ms, 99th percentile 44.90 ms, SLO 40 ms, SLO of chat 40 ms" in described


@given(
    low=st.just(0.0) | st.floats(1e-6, 1e9),
    more=st.floats(0, 1e9),
    slo=st.floats(1e-6, 1e9),
    inside=st.lists(st.floats(0, 1), max_size=5),
)
def test_all_that_is_drawn_stands_in_the_frame(low: float, more: float, slo: float, inside: list[float]) -> None:
    values = sorted([low, low + more, slo, *(low + more * share for share in inside)])
    axis = Axis.around(values[0], values[-1])
    positions = [Chart(axis, Axis(0, 1), 100, "ms").project((value, 0.5))[0] for value in values]
    assert positions == sorted(positions)
    assert positions[0] >= 0
    assert positions[-1] <= WIDTH
    ticks = axis.ticks()
    assert len(ticks) <= 16
    assert all(-1e-9 <= axis.at(tick) <= 1 + 1e-9 for tick in ticks)


SCENARIO = """
[workload]
requests = 40
arrival = { process = "poisson", rate_rps = 20.0 }
input_tokens = 300
output_tokens = 20
[model]
preset = "llama-3.1-8b"
[[pool]]
name = "prefill"
role = "prefill"
replicas = 2
gpu = "h100-sxm"
[[pool]]
name = "decode"
role = "decode"
replicas = 2
gpu = "h100-sxm"
"""


def test_the_command_writes_the_same_bytes_twice(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO)
    for out in ("a", "b"):
        done = CliRunner().invoke(cli, ["simulate", str(path), "--html", "--quiet", "--out", str(tmp_path / out)])
        assert done.exit_code == 0, done.output
    first, second = ((tmp_path / out / "report.html").read_bytes() for out in ("a", "b"))
    assert first == second
    assert 'preset = "llama-3.1-8b"' in PageReader(first.decode()).text
    assert str(tmp_path) not in first.decode().partition("What was run")[0]
