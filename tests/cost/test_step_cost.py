"""Closed forms against step-by-step sums, the roofline against hand-made numbers, and what fits."""

from __future__ import annotations

from fractions import Fraction

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdflow.cost import (
    GpuSpec,
    LinearTable,
    LinearTime,
    ModelSpec,
    MoeDims,
    StepCost,
    WindowSpec,
    constant,
    extra_blocks,
    kv_capacity_tokens,
    roofline,
)
from pdflow.cost.layers import padded_layers
from pdflow.cost.progression import boundary_after, span_of, steps_to_reach
from tests.cost.hardware import H100, LLAMA_8B, LLAMA_70B

coefficient = st.integers(0, 10**9)
costs = st.builds(
    StepCost,
    h0=coefficient,
    h1=coefficient,
    hp=coefficient,
    a1=coefficient,
    a2=coefficient,
    c0=coefficient,
    c1=coefficient,
    c2=coefficient,
    linear=st.builds(
        LinearTime,
        slope_ps=coefficient,
        floor_ps=coefficient,
        allreduce_ps=coefficient,
        allreduce_slope_ps=coefficient,
    ),
)


@given(costs, st.lists(st.tuples(st.integers(1, 50), st.integers(0, 99)), max_size=4), st.lists(st.integers(1, 99)))
def test_sums_and_walk_agree(cost: StepCost, prefill: list[tuple[int, int]], contexts: list[int]) -> None:
    tokens = sum(n for n, _ in prefill)
    attended = sum(n * prefix + n * (n + 1) // 2 for n, prefix in prefill)
    assert cost.step_ps(prefill, contexts) == cost.step_sums_ps(tokens, attended, len(contexts), sum(contexts))


@given(
    costs,
    st.integers(1, 120),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 99)), max_size=4),
    st.lists(st.integers(1, 99)),
)
def test_sums_and_walk_agree_with_a_window(
    cost: StepCost, window: int, prefill: list[tuple[int, int]], contexts: list[int]
) -> None:
    cost = attrs.evolve(cost, window=window, aw=cost.c1, cw=cost.c0)
    tokens = sum(n for n, _ in prefill)
    attended = sum(n * prefix + n * (n + 1) // 2 for n, prefix in prefill)
    within = sum(cost.within_window(*chunk) for chunk in prefill)
    sums = cost.step_sums_ps(tokens, attended, len(contexts), sum(contexts))
    windowed = cost.window_ps(within, sum(min(context, window) for context in contexts))
    assert cost.step_ps(prefill, contexts) == sums + windowed


@given(costs, st.lists(st.integers(1, 5000), min_size=1, max_size=9), st.integers(0, 40))
def test_a_run_lasts_as_long_as_its_steps(cost: StepCost, contexts: list[int], k: int) -> None:
    total = sum(cost.step_ps([], [c + step for c in contexts]) for step in range(k))
    assert cost.run_ps(len(contexts), sum(contexts), k) == total


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.integers(-5, 10**16))
@example(1, 0, 10**6)
@example(0, 1, 1)
@example(3, 1000, 10**6)
def test_steps_to_reach_is_least(first: int, delta: int, span: int) -> None:
    if first == delta == 0 and span > 0:
        with pytest.raises(ValueError, match="no time"):
            steps_to_reach(first, delta, span)
        return
    k = steps_to_reach(first, delta, span)
    assert span_of(first, delta, k) >= span
    assert k == 0 or span_of(first, delta, k - 1) < span


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.integers(-5, 10**16))
@example(1, 0, 10**6)
@example(0, 1, 0)
@example(3, 1000, 10**6)
def test_the_boundary_after_an_instant_is_the_first(first: int, delta: int, gone: int) -> None:
    start = 10**15
    if first == delta == 0 and gone >= 0:
        with pytest.raises(ValueError, match="no time"):
            boundary_after(start, first, delta, start + gone)
        return
    k, end = boundary_after(start, first, delta, start + gone)
    assert end == start + span_of(first, delta, k) > start + gone
    assert k == 1 or span_of(first, delta, k - 1) <= gone


@given(st.integers(1, 200), st.integers(1, 10**5), st.integers(1, 10**6))
def test_steps_until_inverts_run(decodes: int, context: int, span_us: int) -> None:
    cost = roofline(LLAMA_8B, H100)
    span = span_us * 10**6
    k = cost.steps_until(decodes, context, span)
    assert cost.run_ps(decodes, context, k - 1) < span <= cost.run_ps(decodes, context, k)


def test_constant_adds_prefill_and_decode() -> None:
    cost = constant(0.1, 0.02)
    assert not cost.chunks
    assert cost.step_sums_ps(512, 999, 0, 0) == 10**11
    assert cost.step_sums_ps(0, 0, 7, 12345) == 2 * 10**10
    assert cost.step_ps([(512, 0), (8, 0)], [100]) == 12 * 10**10
    assert constant(0, 0).step_ps([(1, 0)], [1]) == 0
    with pytest.raises(ValueError, match="negative"):
        constant(-1.0)


def test_roofline_by_hand_llama_8b_h100() -> None:
    cost = roofline(LLAMA_8B, H100)
    # 32 layers x (4096 x (2 x 4096 + 2 x 1024) + 3 x 4096 x 14336) = 6,979,321,856 linear weights.
    assert LLAMA_8B.linear_parameters == 6_979_321_856
    assert isinstance(cost.linear, LinearTime)
    assert cost.linear.slope_ps == pytest.approx(2 * 6_979_321_856 / (0.68 * 989), abs=1)
    assert cost.linear.floor_ps == pytest.approx(2 * (6_979_321_856 + 525_336_576) / (0.77 * 3.35), abs=1)
    assert cost.c2 == round(131072 / (0.77 * 3.35))
    assert cost.a2 == round(4 * 32 * 4096 / (0.68 * 989))
    assert (cost.h0, cost.h1) == (10**9, 10**7)
    assert cost.chunks


def test_roofline_is_near_the_measured_kernels() -> None:
    # aiconfigurator-core 0.12.0, vLLM, H100: prefill 2048 / decode 32 x 2048: 8B 43.5 / 9.6 ms, 70B TP4 130 / 18.4 ms.
    small, large = roofline(LLAMA_8B, H100, host_step_s=0), roofline(LLAMA_70B, H100, tp=4, host_step_s=0)
    for cost, prefill_ms, decode_ms in ((small, 43.5, 9.6), (large, 130, 18.4)):
        assert cost.step_ps([(2048, 0)], []) / 1e9 == pytest.approx(prefill_ms, rel=0.2)
        assert cost.step_ps([], [2048] * 32) / 1e9 == pytest.approx(decode_ms, rel=0.2)


def test_replicated_heads_are_read_on_every_rank() -> None:
    per_rank = [roofline(LLAMA_8B, H100, tp=tp).c2 for tp in (1, 8, 16, 32)]
    assert per_rank[0] == pytest.approx(8 * per_rank[1], abs=8)
    assert per_rank[1] == per_rank[2] == per_rank[3]


def test_layers_with_a_window_read_no_more_than_it() -> None:
    half = attrs.evolve(LLAMA_8B, window=WindowSpec(tokens=128, layers=16))
    whole, windowed = roofline(LLAMA_8B, H100), roofline(half, H100)
    assert windowed.step_ps([], [100]) == pytest.approx(whole.step_ps([], [100]), rel=1e-6)
    assert windowed.step_ps([(100, 0)], []) == pytest.approx(whole.step_ps([(100, 0)], []), rel=1e-6)
    saved = whole.step_ps([], [20_000]) - windowed.step_ps([], [20_000])
    assert saved == pytest.approx(16 * 4096 * (20_000 - 128) / (0.77 * 3.35), rel=1e-4)


def test_a_small_all_reduce_takes_longer_among_more_ranks_by_the_logarithm() -> None:
    curves = [roofline(LLAMA_70B, H100, tp=tp).linear for tp in (1, 2, 4, 8)]
    fixed = [curve.allreduce_ps for curve in curves if isinstance(curve, LinearTime)]
    of_two = 2 * LLAMA_70B.num_layers * round(H100.allreduce_latency_s * 1e12)
    assert fixed == [0, of_two, 2 * of_two, 3 * of_two]


def test_8_bit_products_need_a_gpu_that_has_them() -> None:
    fp8 = attrs.evolve(LLAMA_8B, activation_dtype="fp8")
    assert slope(roofline(fp8, H100)) == pytest.approx(slope(roofline(LLAMA_8B, H100)) * 989 / 1979, rel=1e-6)
    assert roofline(fp8, H100).a2 == roofline(LLAMA_8B, H100).a2
    with pytest.raises(ValueError, match="no 8-bit"):
        roofline(fp8, attrs.evolve(H100, fp8_flops=None))


def slope(cost: StepCost) -> int:
    assert isinstance(cost.linear, LinearTime)
    return cost.linear.slope_ps


def test_quantised_weights_leave_the_head_as_it_was() -> None:
    int4 = attrs.evolve(LLAMA_8B, weight_bytes_per_param=0.5)
    linear = roofline(int4, H100).linear
    assert isinstance(linear, LinearTime)
    assert linear.floor_ps == pytest.approx((6_979_321_856 / 2 + 2 * 525_336_576) / (0.77 * 3.35), abs=1)


points = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 10**9)), min_size=1, max_size=8)


@given(points, st.integers(1, 20_000))
def test_a_table_is_straight_between_its_points(steps: list[tuple[int, int]], tokens: int) -> None:
    at, time = [1], [7]
    for gap, rise in steps:
        at.append(at[-1] + gap)
        time.append(time[-1] + rise)
    table = LinearTable(tokens=tuple(at), ps=tuple(time))
    assert [table.of(x) for x in at] == time
    assert table.of(0) == 0
    i = max(j for j in range(len(at) - 1) if at[j] <= tokens)
    exact = time[i] + Fraction(time[i + 1] - time[i], at[i + 1] - at[i]) * (tokens - at[i])
    assert table.of(tokens) == exact.__floor__()


@pytest.mark.parametrize(
    ("tokens", "ps"), [((1,), (1,)), ((2, 3), (1, 1)), ((1, 1), (1, 2)), ((1, 2), (2, 1)), ((1, 2), (1,))]
)
def test_a_table_that_is_none_is_refused(tokens: tuple[int, ...], ps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a table of"):
        LinearTable(tokens=tokens, ps=ps)


def test_a_mixture_reads_the_experts_that_its_tokens_touch() -> None:
    moe = MoeDims(num_experts=128, experts_per_token=8, expert_intermediate_size=768)
    model = ModelSpec(
        name="qwen3-30b-a3b",
        num_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        moe=moe,
    )
    cost = roofline(model, H100)
    memory, flops = 0.77 * 3.35, 0.68 * 989
    always = model.shared_parameters + model.head_parameters
    expert = 48 * 3 * 2048 * 768

    def expected(tokens: int, experts: float) -> float:
        """Experts take longer than other layers, in which reading and arithmetic overlap."""
        dense = max(2 * model.shared_parameters * tokens / flops, always * 2 / memory)
        reading, arithmetic = experts * expert * 2 / memory, 1.5 * 2 * 8 * expert * tokens / flops
        return dense + (reading**1.25 + arithmetic**1.25) ** 0.8

    # One token reads its own 8 experts of each layer; two tokens 8 + 8 * 120/128 on average; many tokens all of them.
    for tokens, experts in ((1, 8), (2, 8 + 8 * 120 / 128), (4096, 128)):
        assert cost.linear.of(tokens) == pytest.approx(expected(tokens, experts), rel=1e-6)


def test_kv_capacity() -> None:
    # The run that the reserve was measured on had 41,408 tokens.
    rtx_4090 = GpuSpec(name="rtx-4090", bf16_flops=165e12, hbm_bytes_per_s=1.008e12, device_bytes=25_250_000_000)
    assert kv_capacity_tokens(LLAMA_8B, rtx_4090) == pytest.approx(41_408, rel=0.01)
    tokens = kv_capacity_tokens(LLAMA_8B, H100, block_size=64)
    assert tokens % 64 == 0
    assert tokens == (int(0.9 * 85.9e9) - LLAMA_8B.weight_bytes - 1_240_000_000) // (131072 * 64) * 64


def test_windows_take_blocks_of_the_same_pool() -> None:
    """gemma-3-27b: 10 layers of 62 keep whole contexts, the others 1,024 tokens, in six groups of 10 layers."""
    gemma = ModelSpec(
        name="gemma-3-27b",
        num_layers=62,
        hidden_size=5376,
        intermediate_size=21504,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=262208,
        window=WindowSpec(tokens=1024, layers=52),
    )
    assert gemma.kv_bytes_per_token == 10 * 2 * 16 * 128 * 2
    assert gemma.kv_bytes_of(5000) == 16384 // 2 * (10 * 5000 + 52 * 1024)
    extra = extra_blocks(gemma, 16)
    assert extra is not None
    assert [extra.of(blocks) for blocks in (1, 64, 65, 66, 1000)] == [6, 384, 390, 390, 390]
    assert extra_blocks(LLAMA_8B, 16) is None
    # Where all have a window, whole contexts are kept.
    mistral = attrs.evolve(LLAMA_8B, window=WindowSpec(tokens=4096, layers=32))
    assert extra_blocks(mistral, 16) is None
    assert kv_capacity_tokens(mistral, H100) == kv_capacity_tokens(LLAMA_8B, H100)
    with pytest.raises(ValueError, match="33 layers with a window are more than its 32"):
        attrs.evolve(LLAMA_8B, window=WindowSpec(tokens=4096, layers=33))


@pytest.mark.parametrize(
    ("layers", "kinds", "padded"),
    [(18, (18, 18), 18), (52, (10, 52), 60), (20, (10, 20), 20), (12, (13, 12), 13), (5, (5, 0), 5), (0, (5, 0), 0)],
)
def test_blocks_hold_as_many_layers_of_every_kind(layers: int, kinds: tuple[int, int], padded: int) -> None:
    """vLLM's rule and its comment's examples."""
    assert padded_layers(layers, kinds) == padded


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-70b does not fit on 1 x h100-sxm.*weights need 141\.1 GB"):
        kv_capacity_tokens(LLAMA_70B, H100)
    assert kv_capacity_tokens(LLAMA_70B, H100, tp=4) > 100_000
