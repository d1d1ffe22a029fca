"""What moves is what D stores: tokens times bytes per token, whatever the ranks and blocks on either side; and the
links carry it, no more than they can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.scenario.validation.fit import kv_shape_of
from pdflow_sim.run import conclude

LINK_BYTES_PER_S = 2_000_000_000
NIC_BYTES_PER_S = 1_000_000_000
NS_PER_S = 1_000_000_000

# P's TP and PP, D's TP, block sizes. Llama-3.1-8B has 8 KV heads: TP 16 stores each of them twice.
SHAPES = [
    (1, 1, 1, 16, 16),
    (4, 1, 2, 16, 16),
    (2, 1, 4, 16, 16),
    (1, 2, 1, 16, 16),
    (2, 4, 4, 16, 16),
    (4, 2, 1, 16, 64),
    (1, 1, 2, 64, 16),
    (16, 1, 4, 16, 16),
    (4, 1, 16, 16, 32),
    (16, 2, 16, 32, 16),
]


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.parametrize(("p_tp", "p_pp", "d_tp", "p_block", "d_block"), SHAPES)
def test_bytes_are_tokens_times_what_d_stores(
    play: Callable[..., Any],
    lay: Callable[..., Any],
    method: str,
    p_tp: int,
    p_pp: int,
    d_tp: int,
    p_block: int,
    d_block: int,
) -> None:
    overrides = {
        "transfer.method": method,
        "router.dispatch": "concurrent" if method == "nixl-push" else "sequential",
        "pool.p.tp": p_tp,
        "pool.p.pp": p_pp,
        "pool.d.tp": d_tp,
        "pool.p.block_size": p_block,
        "pool.d.block_size": d_block,
        "network.bandwidth_bytes_per_s": NIC_BYTES_PER_S,
        "network.links": f'[{{ name = "spine", bandwidth_bytes_per_s = {LINK_BYTES_PER_S} }}]',
        "network.paths": '[{ from = "p", to = "d", via = ["spine"] }]',
    }
    scenario = lay(overrides)
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    per_token = kv_shape_of(scenario.model, scenario.pool("d")).engine_bytes_per_token(d_tp)
    assert per_token == 131072 * max(1, d_tp // 8)
    stored = sum(world.records.input_tokens) * per_token
    assert world.totals.bytes_moved == stored

    totals = conclude(scenario, world, (), False).totals
    assert {name for name in (link.name for link in totals.links) if "nic" not in name} == {"spine"}
    for suffix in ("spine", "tx", "rx"):
        assert sum(link.bytes for link in totals.links if link.name.endswith(suffix)) == stored
    for link in totals.links:
        capacity = {"spine": LINK_BYTES_PER_S}.get(link.name, NIC_BYTES_PER_S)
        assert link.capacity_bytes_per_s == capacity
        # A flow that ends is reported at a whole nanosecond.
        assert link.bytes * NS_PER_S <= capacity * (link.busy_ns + len(world.records))


def test_vllm_writes_replicated_heads_again_and_again(play: Callable[..., Any]) -> None:
    """spec 1.4: when P has more ranks than D and than KV heads, every replica writes the same bytes."""
    overrides = {"transfer.dialect": "vllm-compat", "pool.p.tp": 16, "pool.d.tp": 4}
    world = play(overrides)
    assert world.totals.bytes_moved == 2 * sum(world.records.input_tokens) * 131072
