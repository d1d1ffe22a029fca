"""The tables that come with pdflow are what the fit gives from the measurements, where these are at hand."""

from __future__ import annotations

import pytest

from benchmarks.fit_costs import DATA, SOURCES
from pdflow.scenario.costs.cost_file import CostFile
from pdflow.scenario.costs.step_costs import cost_tables


@pytest.mark.skipif(not (DATA / "published").is_dir(), reason="the measurements are not ours to commit, and not here")
def test_tables_are_what_the_fit_gives() -> None:
    fitted = dict(table for source in SOURCES for table in source(DATA))
    stored = cost_tables("fitted")
    assert set(fitted) == set(stored)
    for name, file in fitted.items():
        same = stored[name]
        stored_header = (same.engine, same.made_from, same.provenance, same.error_bar)
        assert stored_header == (file.engine, file.made_from, file.provenance, file.error_bar), name
        assert steps_ms(same) == pytest.approx(steps_ms(file), rel=1e-4), name
        for ours, theirs in zip(same.errors, file.errors, strict=True):
            assert (ours.of, ours.rows) == (theirs.of, theirs.rows)
            assert ours.median == pytest.approx(theirs.median, abs=2e-4)
            assert ours.max == pytest.approx(theirs.max, abs=2e-4)


def steps_ms(file: CostFile) -> list[float]:
    """A few steps: other machines may round coefficients otherwise."""
    cost = file.step_cost()
    prompts = [cost.step_ps([(new, prefix)], []) / 1e9 for new in (16, 700, 2048) for prefix in (0, 3000)]
    return prompts + [cost.decode_step_ps(batch, batch * 900) / 1e9 for batch in (1, 20, 100)]
