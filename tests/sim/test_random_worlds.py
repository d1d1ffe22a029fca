"""Random scenarios, many with all times on one grid so that everything collides: both modes give the same bytes, the
oracle is content with every event, and at the end every request has ended and every block is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
GRID = st.sampled_from([0.0, 0.001, 0.002, 0.005])


@st.composite
def costs(draw: st.DrawFn, role: str) -> str:
    if draw(st.booleans()):
        return '{ model = "roofline" }'
    prefill_s = draw(st.sampled_from([0.0, 0.001, 0.01, 0.02]))
    step_s = draw(st.sampled_from([0.0, 0.001, 0.005])) if role == "decode" else 0.0
    return f'{{ model = "constant", prefill_s = {prefill_s}, decode_step_s = {step_s} }}'


@st.composite
def networks(draw: st.DrawFn) -> dict[str, Any]:
    """Real figures; or nothing takes time; or all does in whole milliseconds, one for each token of a whole rank."""
    kind = draw(st.sampled_from(["rdma-400g", "ideal", "grid"]))
    if kind != "grid":
        return {"network.preset": kind}
    names = ("latency_s", "per_message_s", "control_latency_s", "handshake_s", "http_latency_s")
    return {
        "network.preset": "ideal",
        **{f"network.{name}": draw(GRID) for name in names},
        "network.bandwidth_bytes_per_s": draw(st.sampled_from(["inf", 131_072_000, 13_107_200_000])),
        "network.poll": draw(st.booleans()),
    }


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    method = draw(st.sampled_from(["nixl-push", "nixl-pull"]))
    dialect = draw(st.sampled_from(["strict", "vllm-compat"]))
    dispatch = draw(st.sampled_from(["sequential", "concurrent"])) if method == "nixl-push" else "sequential"
    arrival = draw(
        st.sampled_from(
            [
                '{ process = "constant", rate_rps = 1000 }',
                '{ process = "constant", rate_rps = 100 }',
                '{ process = "poisson", rate_rps = 200.0 }',
                '{ process = "closed", concurrency = 5 }',
            ]
        )
    )
    p_block, d_block = draw(st.sampled_from([(16, 16), (1, 1), (16, 64), (64, 16)]))
    if dialect == "vllm-compat" and (method == "nixl-push" or d_block < p_block):
        p_block = d_block
    overrides: dict[str, Any] = {
        "scenario.seed": draw(st.integers(0, 1000)),
        "workload.requests": draw(st.integers(1, 25)),
        "workload.arrival": arrival,
        "workload.output_tokens": draw(st.sampled_from(["1", "2", "{ dist = 'uniform', low = 1, high = 30 }"])),
        "transfer.method": method,
        "transfer.dialect": dialect,
        "router.dispatch": dispatch,
        "router.policy": draw(st.sampled_from(["round-robin", "least-loaded"])),
        "router.first_token": draw(st.sampled_from(["decode", "prefill"])),
        **draw(networks()),
    }
    for name, role, block_size in (("p", "prefill", p_block), ("d", "decode", d_block)):
        seats = draw(st.sampled_from([1, 2, 256]))
        overrides |= {
            f"pool.{name}.replicas": draw(st.integers(1, 2)),
            f"pool.{name}.tp": draw(st.sampled_from([1, 1, 2, 4])),
            f"pool.{name}.block_size": block_size,
            f"pool.{name}.kv_tokens": draw(st.sampled_from([192, 320, 4096])),
            f"pool.{name}.max_num_seqs": seats,
            f"pool.{name}.max_num_batched_tokens": draw(st.sampled_from([32, 8192])),
            f"pool.{name}.cost": draw(costs(role)),
        }
    overrides["pool.p.pp"] = draw(st.sampled_from([1, 1, 2]))
    return overrides


def both_modes_agree(overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    fast = play(overrides)
    assert all(fast.records.outcome), "a request has no outcome"
    assert set(fast.records.outcome) == {"completed"}, fast.records.reason
    assert len(fast.records) == overrides["workload.requests"]
    exact = play(overrides, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(fast).splitlines()


@settings(max_examples=400, derandomize=True, deadline=None, database=None, suppress_health_check=RELAXED)
@given(overrides=scenarios())
def test_exact_and_fast_are_the_same(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes_agree(overrides, play, lines)


@pytest.mark.nightly
@settings(max_examples=20_000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=scenarios())
def test_exact_and_fast_are_the_same_at_night(
    overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]
) -> None:
    both_modes_agree(overrides, play, lines)
