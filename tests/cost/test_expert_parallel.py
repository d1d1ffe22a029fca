"""Experts spread over GPUs and attention replicas in lockstep: what GPUs share, and what they do not."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest

from pdflow.cost import (
    GpuSpec,
    LinearTable,
    LinearTime,
    MlaSpec,
    ModelSpec,
    MoeDims,
    StepCost,
    kv_capacity_tokens,
    roofline,
)
from pdflow.cost.expert_parallel import HIGH_THROUGHPUT, LOW_LATENCY, busiest_share, exchange_s
from tests.cost.hardware import H100

MOE = MoeDims(num_experts=256, experts_per_token=8, expert_intermediate_size=2048, shared_intermediate_size=2048)
DEEPSEEK = ModelSpec(
    name="deepseek",
    num_layers=61,
    hidden_size=7168,
    intermediate_size=18432,
    num_heads=128,
    num_kv_heads=128,
    head_dim=128,
    vocab_size=129280,
    weight_bytes_per_param=1.0,
    activation_dtype="fp8",
    mla=MlaSpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536),
    moe=attrs.evolve(MOE, dense_layers=3),
)
H800 = GpuSpec(
    name="h800",
    bf16_flops=989e12,
    fp8_flops=1979e12,
    hbm_bytes_per_s=3.35e12,
    device_bytes=85_900_000_000,
    nvlink_bytes_per_s=200e9,
    nic_bytes_per_s=50e9,
    allreduce_latency_s=10e-6,
)


@pytest.mark.parametrize(
    ("ep", "dispatch_us", "combine_us"),
    [(8, 77, 114), (16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)
def test_low_latency_kernels_take_as_long_as_deepep_measured(ep: int, dispatch_us: float, combine_us: float) -> None:
    """On H800, 128 tokens a GPU."""
    assert exchange_s(DEEPSEEK, H800, ep, 128) == pytest.approx((dispatch_us + combine_us) / 1e6, rel=0.04)


def test_larger_batches_send_one_copy_to_each_gpu_or_node() -> None:
    """4,096 tokens: within a node to 8(1 - (7/8)^8) GPUs each, over 4 nodes to 4(1 - (3/4)^8)."""
    for ep, copies in ((8, 8 * (1 - (7 / 8) ** 8)), (32, 4 * (1 - (3 / 4) ** 8))):
        dispatch, combine = HIGH_THROUGHPUT[ep]
        values = 4096 * 7168 * copies
        assert exchange_s(DEEPSEEK, H800, ep, 4096) == pytest.approx(values / dispatch + 2 * values / combine)


def test_links_scale_and_small_batches_wait_for_latency() -> None:
    twice = attrs.evolve(H800, nvlink_bytes_per_s=400e9)
    assert exchange_s(DEEPSEEK, twice, 8, 128) == pytest.approx(exchange_s(DEEPSEEK, H800, 8, 128) / 2)
    assert exchange_s(DEEPSEEK, twice, 16, 128) == exchange_s(DEEPSEEK, H800, 16, 128)
    assert exchange_s(DEEPSEEK, H800, 8, 1) == pytest.approx(2 * 3 * 10e-6)
    assert sorted(LOW_LATENCY) == [8, 16, 32, 64, 128, 256]


def test_the_busiest_gpu_has_the_more_the_fewer_tokens_there_are() -> None:
    shares = [busiest_share(MOE, 64, tokens, 1.0) for tokens in (1, 64, 1024, 16384, 1 << 20)]
    assert all(more > less for more, less in pairwise(shares[1:]))
    assert shares[-1] == pytest.approx(1, abs=0.01)
    assert max(shares) <= 64
    assert busiest_share(MOE, 1, 100, 0.5) == 1.0


def test_experts_that_are_chosen_more_often_bound_large_batches() -> None:
    even, uneven = (busiest_share(MOE, 64, 1 << 20, balancedness) for balancedness in (1.0, 0.5))
    assert uneven == 2.0 > even
    assert busiest_share(MOE, 64, 64, 0.9) == busiest_share(MOE, 64, 64, 1.0), "of few tokens chance has more effect"


def test_each_gpu_has_all_of_attention_and_whole_experts() -> None:
    """Of 256 experts over 72 GPUs one has 4."""
    experts = DEEPSEEK.routed_parameters
    others = DEEPSEEK.weight_bytes - experts
    assert DEEPSEEK.weight_bytes_per_gpu(tp=8) == -(-DEEPSEEK.weight_bytes // 8)
    assert DEEPSEEK.weight_bytes_per_gpu(dp=8, ep=8) == pytest.approx(others + experts / 8, rel=1e-9)
    assert DEEPSEEK.weight_bytes_per_gpu(dp=8) == pytest.approx(others + experts / 8, rel=1e-9)
    assert DEEPSEEK.weight_bytes_per_gpu(dp=72, ep=72) == pytest.approx(others + experts * 4 / 256, rel=1e-9)
    assert DEEPSEEK.weight_bytes_per_gpu(tp=2, dp=4, ep=8) == pytest.approx(others / 2 + experts / 8, rel=1e-9)


def test_more_gpus_leave_more_room_for_kv() -> None:
    tokens = [kv_capacity_tokens(DEEPSEEK, attrs.evolve(H800, device_bytes=141e9), dp=n, ep=n) for n in (8, 16, 32, 64)]
    assert all(less < more for less, more in pairwise(tokens))
    with pytest.raises(
        ValueError, match=r"does not fit on 8 x h800 \(tp 1, pp 1, dp_attention 8\).*raise tp, or dp_attention and ep"
    ):
        kv_capacity_tokens(DEEPSEEK, H800, dp=8, ep=8)


def test_attention_is_not_divided_by_the_replicas() -> None:
    """One prompt is computed by one replica, whose attention takes as long as that of a single GPU."""
    alone, spread = roofline(DEEPSEEK, H800), roofline(DEEPSEEK, H800, dp=8, ep=8)
    assert (spread.a2, spread.c2, spread.h0, spread.h1) == (alone.a2, alone.c2, alone.h0, alone.h1)
    by_rank = roofline(DEEPSEEK, H800, tp=8)
    assert spread.a2 == pytest.approx(8 * by_rank.a2, rel=1e-3)


def test_time_with_experts_never_falls_with_more_tokens() -> None:
    """Though larger batches are sent by kernels that move fewer copies."""
    for ep in (8, 32, 72, 256):
        experts = roofline(DEEPSEEK, H800, dp=ep, ep=ep).experts
        assert isinstance(experts, LinearTable)
        assert all(earlier <= later for earlier, later in pairwise(experts.ps))


def test_latent_attention_of_many_heads_is_bound_by_arithmetic() -> None:
    """128 heads of a decoding query work on each cached latent: on one GPU that takes longer than to read it. With
    tensor parallelism each rank has a share of the heads, and reads all of the latent."""
    reading = DEEPSEEK.kv_bytes_per_token / (H800.em * H800.hbm_bytes_per_s) * 1e12
    products = 2 * 61 * 128 * (2 * 512 + 64) / (H800.ec * H800.bf16_flops) * 1e12
    assert products > reading
    assert roofline(DEEPSEEK, H800).c2 == pytest.approx(products, rel=1e-4)
    assert roofline(DEEPSEEK, H800, tp=8).c2 == pytest.approx(reading, rel=1e-4)


def test_a_step_lasts_as_long_as_the_slowest_replica() -> None:
    cost = StepCost(
        h0=100, a2=1, c2=2, linear=LinearTime(slope_ps=10), experts=LinearTable(tokens=(1, 101), ps=(1000, 2000))
    )
    replicas = [([(10, 0)], [50]), ([], [100, 100]), ([], [])]
    slowest = max(cost.own_sums_ps(10, 55, 1, 50), cost.own_sums_ps(0, 0, 2, 200))
    assert cost.lockstep_ps(replicas) == slowest + cost.experts.of(13)  # type: ignore[union-attr]
    assert cost.step_ps([(10, 0)], [50]) == cost.step_sums_ps(10, 55, 1, 50) == cost.lockstep_ps(replicas[:1])


def test_slices_of_experts_need_all_tokens_on_all_gpus() -> None:
    """Without `ep`, an all-reduce over all GPUs stands for gathering tokens and scattering results."""
    whole, sliced = roofline(DEEPSEEK, H100, dp=8, ep=8), roofline(DEEPSEEK, H100, dp=8)
    assert whole.linear == sliced.linear
    assert whole.experts != sliced.experts
