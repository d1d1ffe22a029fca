"""Methods come out beside their sources as docs/validation.md says; what is fitted on is at most a third."""

from __future__ import annotations

import pytest

from benchmarks.fit_costs import DATA
from benchmarks.published import cpu_connector, mooncake_a10, p2p_nccl
from benchmarks.published.__main__ import PAGE, RESULTS
from benchmarks.published.common import HEADING, IMAGES, Cell, verdict
from benchmarks.validation.common import with_section

PUBLISHED = DATA / "published"
measured = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the measurements are not ours to commit, and not here")


def test_the_page_has_what_the_command_wrote() -> None:
    page, results = (path.read_text(encoding="utf-8") for path in (PAGE, RESULTS))
    assert with_section(page, HEADING, results) == page
    for line in results.splitlines():
        if line.startswith("!["):
            assert (IMAGES / line.split("img/")[1].rstrip(")")).is_file()


def test_verdicts_are_of_what_was_not_fitted() -> None:
    cells = [Cell("a", 1.0, 9.0, fitted=True), Cell("b", 1.0, 1.1), Cell("c", 1.0, 0.7)]
    assert verdict(cells) == "1 of 3 fitted; of the other 2 the median error is 20 %, the worst -30 % (c)."


def test_two_of_six_cells_of_the_cpu_connector_are_fitted_and_reproduced() -> None:
    assert len(cpu_connector.FITTED_ON) * 3 == len(cpu_connector.PUBLISHED_MS)
    for cell in cpu_connector.cells(*cpu_connector.fitted(by_length=False)):
        if cell.fitted:
            assert abs(cell.error) < 0.01, cell
        elif "no P/D" not in cell.name:
            assert abs(cell.error) < 0.15, cell


def test_pages_are_what_the_cpu_connector_waits_for() -> None:
    assert cpu_connector.descriptors(10_000) == 280_000
    server = cpu_connector.ApiServer(0.0)
    bare, paged = (cpu_connector.latency_ms(10_000, True, server, per_descriptor_s=each) for each in (0.0, 1e-5))
    assert paged - bare == pytest.approx(2800, rel=0.05)


@measured
def test_a_third_of_the_rows_of_mooncake_is_fitted_on() -> None:
    rows = mooncake_a10.rows_of(PUBLISHED)
    assert len(rows) == 33
    for name in {row.table for row in rows}:
        some = [row for row in rows if row.table == name]
        assert 3 * sum(row.fitted for row in some) <= len(some), name


@measured
def test_tpot_explodes_past_saturation_and_median_itl_below_it_does_not() -> None:
    """One row on either side: 1,024 tokens at 4/s, and 4,096 at 2/s."""
    rows = {(row.tp, row.rate_rps, row.input_len, row.network): row for row in mooncake_a10.rows_of(PUBLISHED)}
    below, past = (
        mooncake_a10.simulated(rows[4, rate, length, "2 NICs"], mooncake_a10.Fit(1e9, 0.6, 7e-3))
        for rate, length in ((4.0, 1024), (2.0, 4096))
    )
    assert below["tpot_mean"] < mooncake_a10.STARVED_MS
    assert past["tpot_mean"] > 10 * below["tpot_mean"]
    assert below["itl_p50"] == pytest.approx(rows[4, 4.0, 1024, "2 NICs"].published["itl_p50"], rel=0.1)
    assert below["itl_p99"] > 5 * below["itl_p50"]


def test_put_async_is_faster_than_get_and_get_than_put_where_p_has_no_time_to_wait() -> None:
    ttfts = [
        p2p_nccl.result(method, 15.0, 1, 3, 20, requests=100).summary["ttft_mean_ms"] for method in p2p_nccl.METHODS
    ]
    assert ttfts == sorted(ttfts)


def test_3p1d_takes_about_as_long_as_stated() -> None:
    """About 20 s for 1,000 tokens out; nothing is fitted."""
    found = p2p_nccl.result("p2p-nccl-put-async", 3.0, 3, 1, 1000, requests=150)
    assert 10 < found.summary["e2e_p99_ms"] / 1e3 < 25
