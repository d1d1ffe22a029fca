"""docs/validation.md is what benchmarks/validate.py says, where the measurements are at hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.fit_costs import DATA
from benchmarks.validate import PAGE
from benchmarks.validation import disagg, mori, requests, rows
from benchmarks.validation.common import error_text, scenario_of, with_section
from benchmarks.validation.unfitted import designs
from benchmarks.validation.unfitted import rows as unfitted_rows
from benchmarks.validation.unfitted.sources import SOURCES

PUBLISHED = DATA / "published"
measured = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the measurements are not ours to commit, and not here")


@pytest.mark.slow
@measured
def test_the_page_has_the_figures_of_single_requests() -> None:
    found = requests.report(PUBLISHED)
    page = PAGE.read_text(encoding="utf-8")
    for line in found.lines:
        assert line in page


@measured
def test_what_is_fitted_on_is_never_reported() -> None:
    for group, of_group in rows.rows_of(PUBLISHED).items():
        fitted = {row.id for row in rows.chosen(of_group)}
        assert len(fitted) == min(rows.FITTED, len(of_group) // 2), group
    real = requests.measured(PUBLISHED, requests.PRO)
    assert len(real) == 300
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(real))


@measured
def test_rows_state_the_values_of_their_scenario() -> None:
    for of_group in rows.rows_of(PUBLISHED).values():
        assert f"concurrency = {of_group[0].clients}" in of_group[0].text(rows.Setup())
    found = disagg.rows_of(PUBLISHED)
    assert {row.kind for row in found} == {"DeepSeek-R1", "Qwen3-32B"}
    assert all(row.prefill.replicas and row.decode.replicas for row in found)


def test_errors_are_described() -> None:
    assert error_text([0.1, -0.3, 0.2]) == "20.0 % (+10.0 %)"
    assert error_text([]) == "–"


def test_without_measurements_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.validate import main

    before = PAGE.read_bytes() if PAGE.exists() else b""
    assert main([str(tmp_path)]) == 0
    assert "is not there" in capsys.readouterr().out
    assert (PAGE.read_bytes() if PAGE.exists() else b"") == before


@pytest.mark.parametrize("gpu", [mori.PRESET, mori.Gpu(0.113, 0.501)])
def test_disaggregated_serving_is_above_aggregated_serving_on_mi300x(gpu: mori.Gpu) -> None:
    """As published, with the presets and with the constants that docs/validation.md states as calibrated."""
    good = {}
    for design in mori.DESIGNS:
        results = [mori.simulated(design, gpu, seed) for seed in mori.SEEDS[:5]]
        good[design.row_id] = fmean(result.metrics.slo.good for result in results if result.metrics.slo is not None)
    together = max(good["moriio_tp8"], good["moriio_2tp4"])
    assert min(good["moriio_read"], good["moriio_write"]) > together
    assert abs(good["moriio_write"] - good["moriio_read"]) < 15


def test_a_section_of_the_page_is_replaced_alone() -> None:
    page = "# Page\n\n## 1. One\n\nold\n\n## 2. Two\n\nkept\n"
    assert with_section(page, "## 1. One", "new") == "# Page\n\n## 1. One\n\nnew\n\n## 2. Two\n\nkept\n"
    assert with_section(page, "## 2. Two", "new") == "# Page\n\n## 1. One\n\nold\n\n## 2. Two\n\nnew\n"
    assert with_section(page, "## 3. Three", "new") == f"{page}\n## 3. Three\n\nnew\n"


def test_rows_that_nothing_was_fitted_on_are_many_and_have_sources() -> None:
    found = unfitted_rows.rows()
    assert len(found) > 100
    assert {row.source for row in found} == set(SOURCES)
    assert len({(row.source, row.id) for row in found}) == len(found)


def test_rows_that_nothing_was_fitted_on_become_what_their_source_states() -> None:
    for row in unfitted_rows.rows():
        scenario = scenario_of(row.text(unfitted_rows.AS_STATED))
        assert [(pool.role, pool.replicas, pool.tp) for pool in scenario.pools] == list(row.engines()), row.id
        assert scenario.workload.requests == row.requests >= row.clients
        assert all(pool.kv_tokens == row.kv_tokens for pool in scenario.pools if row.kv_tokens)


def test_the_order_of_designs_counts_pairs_that_differ() -> None:
    def pairs(published: dict[str, float], simulated: dict[str, float], sign: int = 1) -> list[bool]:
        return designs.Comparison(
            kind="k", name="n", metric="m", sign=sign, published=published, simulated=simulated
        ).pairs

    assert pairs({"a": 1, "b": 2, "c": 2.1}, {"a": 5, "b": 6, "c": 4}) == [True, False]
    assert pairs({"a": 1, "b": 1.05}, {"a": 2, "b": 1}) == []


def test_the_page_has_the_figures_of_rows_that_nothing_was_fitted_on() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for row in unfitted_rows.rows():
        if row.source in ("vllm-ci", "nim-docs"):
            answer = unfitted_rows.simulated(row)
            figure = "e2e_ms" if row.source == "vllm-ci" else "tpot_ms"
            assert f"→ {unfitted_rows.digits(getattr(answer.figures, figure))} (" in page, row.name
