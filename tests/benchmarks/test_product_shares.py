"""The presets' shares of 8-bit FLOP/s are those of the kernel tables."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.product_shares import shares_of
from pdflow.scenario.costs.step_costs import cost_tables
from pdflow.scenario.presets import presets


@pytest.mark.parametrize("gpu", ["b200", "h100-sxm", "h200"])
def test_the_presets_have_the_medians(gpu: str) -> None:
    found = [shares_of(name, file) for name, file in cost_tables("aiconfigurator").items()]
    those = [each.shares[1] for each in found if each and (each.dtype, each.gpu, each.tp) == ("fp8", gpu, 1)]
    assert median(those) == pytest.approx(presets("gpus")[gpu].values["ec_fp8"], abs=0.01)
