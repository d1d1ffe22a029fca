"""What is fitted on one row gives that row, and the others keep their order."""

from __future__ import annotations

import pytest

from benchmarks.published.descriptors import MODELS, WINDOW_MS, descriptors, fitted_s, pulled
from pdflow.scenario.presets import presets


def test_a_pull_of_5k_tokens_is_tens_of_thousands_of_descriptors() -> None:
    counts = [descriptors(layers, 16) for layers in MODELS.values()]
    assert counts == sorted(counts)
    assert counts[0] > 20_000
    assert counts[-1] < 60_000


def test_the_window_at_16_is_fitted_and_the_one_at_64_saves_more_than_half() -> None:
    """Published: 105 ms, and 58 ms less. Here 64 is fast by 31 %: why, the script says."""
    each_s = fitted_s("qwen3-32b")
    windows = [pulled("qwen3-32b", size, per_descriptor_s=each_s).window_ms for size in (16, 64)]
    assert windows[0] == pytest.approx(WINDOW_MS[16], abs=0.1)
    assert windows[1] == pytest.approx(WINDOW_MS[64], rel=0.35)
    # The same cost as over EFA, which comes from the post times of another source, PR #35264.
    assert each_s == pytest.approx(presets("links")["efa-200g"].values["per_descriptor_s"], rel=0.02)


def test_neighbours_that_are_merged_cost_next_to_nothing_in_a_fresh_pool() -> None:
    each_s = fitted_s("llama-3.1-8b")
    assert pulled("llama-3.1-8b", 16, per_descriptor_s=each_s, coalesce=True).window_ms < 5
