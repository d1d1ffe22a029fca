"""The clusters that a search begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdflow
from pdflow_sim.plan.designs import Design, DesignEditor, EngineShape, PoolShape
from pdflow_sim.plan.space import ShapeFinder, Space

CONVERSATION = Path(__file__).parents[3] / "examples" / "conversation.toml"
GPU = "h100-sxm"


def finder(edits: dict[str, object] | None = None, **space: object) -> ShapeFinder:
    return ShapeFinder(pdflow.load(CONVERSATION, edits), Space(**{"gpus": (GPU,), **space}))


def pair(p: int, p_tp: int, d: int, d_tp: int) -> Design:
    return Design((PoolShape("prefill", EngineShape(GPU, p_tp), p), PoolShape("decode", EngineShape(GPU, d_tp), d)))


@pytest.mark.parametrize("gpus", [1, 2, 5, 8, 17, 40])
def test_every_cluster_uses_its_gpus_as_far_as_engines_fit(gpus: int) -> None:
    for design in finder().designs(gpus):
        assert design.gpus <= gpus
        smallest = min(pool.engine.gpus for pool in design.pools)
        assert design.gpus + smallest > gpus or design.pools == finder().designs(8)[0].pools


def test_small_numbers_of_gpus_have_every_cluster() -> None:
    found = {design.text for design in finder().designs(3)}
    assert found == {
        *("3x TP1", "1x TP2"),
        *("1P TP1 + 2D TP1", "2P TP1 + 1D TP1", "1P TP1 + 1D TP2", "1P TP2 + 1D TP1"),
    }


def test_the_scenarios_own_cluster_is_among_them() -> None:
    assert pair(4, 1, 4, 1) in finder().designs(8)


def test_engines_on_which_the_model_does_not_fit_are_left_out_with_the_reason() -> None:
    found = finder({"model": {"preset": "llama-3.1-70b"}, "pool.prefill.tp": 4, "pool.decode.tp": 4})
    assert {pool.engine.tp for design in found.designs(8) for pool in design.pools} == {2, 4, 8}
    assert "TP1 on h100-sxm" in found.refused
    assert "weights" in found.refused["TP1 on h100-sxm"]


def test_without_a_search_of_sizes_a_kind_that_the_scenario_lacks_has_the_sizes_of_its_pools() -> None:
    found = finder({"pool.prefill.tp": 2}, tp=(), kinds=("aggregated",)).designs(8)
    assert {design.text for design in found} == {"4x TP2", "8x TP1"}


def test_the_own_cluster_is_left_out_if_its_sizes_are_not_searched_or_gpus_are_left_over() -> None:
    assert pair(4, 1, 4, 1) not in finder(tp=(2,)).designs(8)
    assert pair(4, 1, 4, 1) not in finder().designs(9)


def test_constant_step_times_hold_for_the_scenarios_own_engines_alone() -> None:
    constant = {"model": "constant", "prefill_s": 0.1, "decode_step_s": 0.01}
    found = finder({"pool.prefill.cost": constant, "pool.decode.cost": constant})
    assert {pool.engine.tp for design in found.designs(8) for pool in design.pools} == {1}
    assert {design.kind for design in found.designs(8)} == {"disaggregated"}
    assert "constant step times" in found.refused[f"TP2 on {GPU} as prefill"]


def test_without_a_search_of_numbers_the_reason_why_there_is_no_cluster_is_known() -> None:
    small = finder(xpyd=False, tp=())
    assert small.designs(4) == []
    assert small.refused == {"the scenario's own cluster": "has 8 GPUs, which is more than 4, and xpyd is not searched"}


def test_types_of_gpus_are_mixed_between_roles() -> None:
    found = {design.text for design in finder(gpus=(GPU, "a100-80g"), tp=(1,)).designs(2)}
    assert f"1P TP1 {GPU} + 1D TP1 a100-80g" in found
    assert f"1P TP1 a100-80g + 1D TP1 {GPU}" in found


def test_large_numbers_are_tried_at_some_ratios_and_then_at_their_neighbours() -> None:
    shapes = finder(tp=(1,), kinds=("disaggregated",))
    found = shapes.designs(64)
    assert len(found) < 12
    assert pair(1, 1, 63, 1) in found
    assert pair(63, 1, 1, 1) in found
    assert list(shapes.neighbours(pair(28, 1, 36, 1), 64)) == [pair(27, 1, 37, 1), pair(29, 1, 35, 1)]


def test_a_design_grows_in_proportion() -> None:
    scaled = list(finder().scaled(pair(3, 2, 2, 1), 32))
    assert pair(12, 2, 8, 1) in scaled
    assert all(design.gpus > 30 for design in scaled)


def test_a_mixture_of_experts_is_also_spread_by_expert_parallelism() -> None:
    edits = {"model": {"preset": "qwen3-235b-a22b"}, "pool.prefill.tp": 8, "pool.decode.tp": 8}
    engines = {pool.engine for design in finder(edits).designs(16) for pool in design.pools}
    assert EngineShape(GPU, 1, 8, 8) in engines
    assert EngineShape(GPU, 8, 1, 8) in engines
    without = {pool.engine for design in finder(edits, ep=False).designs(16) for pool in design.pools}
    assert all(engine.ep == 1 for engine in without)


@pytest.mark.parametrize(
    "design",
    [
        Design((PoolShape("aggregated", EngineShape(GPU, 2), 4),)).with_option("chunk", 1024),
        pair(2, 2, 4, 1).with_option("method", "nixl-pull").with_option("block_size", 64).with_option("chunk", 2048),
        pair(1, 1, 1, 1).with_option("conditional", "auto").with_option("policy", "prefix-aware"),
    ],
)
def test_a_designs_edits_make_it_and_keep_what_the_file_says(design: Design) -> None:
    base = pdflow.load(CONVERSATION).with_(
        {"pool.prefill.gpu_memory_utilization": 0.8, "pool.decode.gpu_memory_utilization": 0.8}
    )
    made = base.with_(DesignEditor(base).edits(design))
    assert DesignEditor(made).own == design.without_options()
    options = dict(design.options)
    for pool in made.resolved.pools:
        assert pool.gpu_memory_utilization == 0.8
        assert pool.block_size == options.get("block_size", 16)
        if pool.role != "decode":
            assert pool.max_num_batched_tokens == options.get("chunk", 8192)
    assert made.resolved.transfer.method == options.get("method", "nixl-push")
    assert made.resolved.router.policy == options.get("policy", "least-loaded")
    assert made.resolved.router.disaggregate_above_tokens == options.get("conditional")


def test_faults_and_scales_of_other_clusters_are_taken_away() -> None:
    base = pdflow.load(CONVERSATION).with_(
        {
            "fault": [{"kind": "crash", "engine": "decode-3", "at_s": 1.0}],
            "scale": [{"pool": "decode", "at_s": 5.0, "replicas": 2}],
        }
    )
    made = base.with_(DesignEditor(base).edits(Design((PoolShape("aggregated", EngineShape(GPU), 8),))))
    assert not made.resolved.faults
    assert not made.resolved.scales


def test_kv_tokens_hold_for_engines_of_the_same_size_alone() -> None:
    base = pdflow.load(CONVERSATION).with_({"pool.decode.kv_tokens": 123456})
    same, other = (base.with_(DesignEditor(base).edits(pair(2, 1, 2, tp))) for tp in (1, 2))
    assert same.resolved.pool("decode").kv_tokens == 123456
    assert other.resolved.pool("decode").kv_tokens is None
