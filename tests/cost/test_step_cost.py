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
    MlaSpec,
    ModelSpec,
    MoeDims,
    StepCost,
    WindowSpec,
    constant,
    extra_blocks,
    kv_capacity_tokens,
    roofline,
)
from pdflow.cost.layers import LinearAttentionSpec, SparseAttentionSpec, padded_layers
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
    half = attrs.evolve(H100, ec_fp8=H100.ec / 2)
    assert slope(roofline(fp8, half)) == pytest.approx(2 * slope(roofline(fp8, H100)), rel=1e-6)
    assert roofline(LLAMA_8B, half) == roofline(LLAMA_8B, H100)
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
    extra = extra_blocks(gemma, 16, 1)
    assert extra is not None
    assert [extra.of(blocks) for blocks in (1, 64, 65, 66, 1000)] == [6, 384, 390, 390, 390]
    assert extra_blocks(LLAMA_8B, 16, 1) is None
    # Where all have a window, whole contexts are kept.
    mistral = attrs.evolve(LLAMA_8B, window=WindowSpec(tokens=4096, layers=32))
    assert extra_blocks(mistral, 16, 1) is None
    assert kv_capacity_tokens(mistral, H100) == kv_capacity_tokens(LLAMA_8B, H100)
    with pytest.raises(ValueError, match="33 layers with a window are more than its 32"):
        attrs.evolve(LLAMA_8B, window=WindowSpec(tokens=4096, layers=33))


HYBRID = attrs.evolve(
    LLAMA_8B,
    linear_attention=LinearAttentionSpec(layers=24, key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128),
)
DSA = ModelSpec(
    name="dsa",
    num_layers=61,
    hidden_size=7168,
    intermediate_size=18432,
    num_heads=128,
    num_kv_heads=128,
    head_dim=128,
    vocab_size=129280,
    mla=MlaSpec(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    sparse_attention=SparseAttentionSpec(topk=2048, heads=64, head_dim=128, layers=61),
)


def test_states_of_linear_attention_by_hand() -> None:
    """Of 32 layers 24 keep 32 x 128 x 128 values in float32, and 3 tokens of 8,192 values in 16 bits."""
    state = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert HYBRID.state_bytes == state
    assert HYBRID.kv_bytes_per_token == LLAMA_8B.kv_bytes_per_token // 4
    # A block holds 8 layers of attention, 16 tokens of 4,096 bytes each.
    extra = extra_blocks(HYBRID, 16, 1)
    assert extra is not None
    assert extra.of(1) == extra.of(1000) == -(-state // (8 * 4096 * 16))
    cost = roofline(HYBRID, H100)
    assert cost.c2 == pytest.approx(roofline(LLAMA_8B, H100).c2 / 4, abs=1)
    assert cost.a1 == round(2 * 24 * 3 * 32 * 128 * 128 / (0.68 * 989))
    assert cost.c1 == round(2 * state / (0.77 * 3.35))
    assert roofline(HYBRID, H100, tp=2).c1 == pytest.approx(cost.c1 / 2, abs=1)


def test_sparse_attention_reads_all_keys_of_the_indexer_and_the_best_positions() -> None:
    assert DSA.kv_bytes_per_token == 61 * (576 * 2 + 132)
    cost = roofline(DSA, H100, tp=8)
    scores = 2 * 61 * 64 * 128 / (0.68 * 1979)
    assert cost.a2 == pytest.approx(scores, abs=1)
    assert cost.c2 == pytest.approx(max(61 * 132 / (0.77 * 3.35), scores), abs=1)
    dense = roofline(attrs.evolve(DSA, sparse_attention=None), H100, tp=8)
    assert (cost.window, cost.cw) == (2048, dense.c2)
    far = cost.step_ps([], [100_000]) - cost.step_ps([], [50_000])
    assert far == 50_000 * cost.c2 < (dense.c2 * 50_000) / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_attention": attrs.evolve(HYBRID.linear_attention, layers=32)}, "must be fewer than its 32"),
        ({"sparse_attention": DSA.sparse_attention}, "sparse_attention needs mla"),
    ],
)
def test_kinds_of_layers_that_no_model_has_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attrs.evolve(LLAMA_8B, **change)
    with pytest.raises(ValueError, match="62 layers with an indexer are more than its 61"):
        attrs.evolve(DSA, sparse_attention=SparseAttentionSpec(topk=2048, heads=64, head_dim=128, layers=62))


def test_4_bit_products_have_a_rate_of_their_own_or_that_of_16_bits() -> None:
    fp4 = attrs.evolve(LLAMA_8B, activation_dtype="fp4", weight_bytes_per_param=0.5625)
    with_fp4 = attrs.evolve(H100, fp4_flops=4 * 989e12)
    assert slope(roofline(fp4, with_fp4)) == pytest.approx(slope(roofline(LLAMA_8B, H100)) / 4, abs=1)
    assert slope(roofline(fp4, H100)) == slope(roofline(LLAMA_8B, H100))


def test_experts_alone_may_have_4_bit_products() -> None:
    moe = MoeDims(num_experts=128, experts_per_token=8, expert_intermediate_size=768)
    model = attrs.evolve(LLAMA_8B, moe=moe)
    with_fp4 = attrs.evolve(H100, fp4_flops=4 * 989e12)
    tokens = 32768  # Arithmetic takes longer than reading.
    times = {
        (dense, experts): roofline(
            attrs.evolve(model, activation_dtype=dense, expert_activation_dtype=experts), with_fp4
        ).linear.of(tokens)
        for dense in ("bf16", "fp4")
        for experts in ("bf16", "fp4")
    }
    assert times["bf16", "bf16"] > times["bf16", "fp4"] > times["fp4", "fp4"]
    assert times["bf16", "bf16"] > times["fp4", "bf16"] > times["fp4", "fp4"]
    assert times["fp4", "fp4"] < times["bf16", "bf16"] / 2


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
