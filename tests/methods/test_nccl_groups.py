"""How many groups a topology has, what they take, and that a scenario in which they do not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pdflow.errors import ScenarioError
from pdflow.methods.nccl.groups import all_groups, bytes_per_gpu, group_bytes, most_peers, pair_groups
from pdflow.scenario.reading.editable import Scenario


def test_a_group_is_as_large_as_published() -> None:
    assert group_bytes(16) == 100_000_000
    assert group_bytes(8) == 52_000_000


def test_1p2d_at_tp2_has_seven_groups() -> None:
    """PR #18242: three within engines, and four between P and D."""
    assert all_groups(1, 2, 2) == 7
    assert pair_groups(1, 2, 2) == 4


@pytest.mark.parametrize(("p", "d"), [(1, 3), (3, 1), (4, 4)])
def test_engines_of_one_rank_have_no_group_of_their_own(p: int, d: int) -> None:
    assert all_groups(p, d, 1) == pair_groups(p, d, 1) == p * d


@pytest.mark.parametrize("channels", [8, 16])
def test_groups_of_96p144d_take_gigabytes_of_each_gpu(channels: int) -> None:
    """PR #18242 calls it not feasible: 13,824 groups."""
    assert pair_groups(96, 144, 1) == 13_824
    assert bytes_per_gpu(144, channels) == 144 * group_bytes(channels)
    # A tenth of an 80 GB GPU is what vLLM leaves by default.
    assert (bytes_per_gpu(144, channels) > 8_000_000_000) is (channels == 16)


def test_as_many_peers_as_fit_do_and_one_more_does_not() -> None:
    room = 8_000_000_000
    most = most_peers(room, 8)
    assert bytes_per_gpu(most, 8) <= room < bytes_per_gpu(most + 1, 8)
    assert most_peers(-1, 8) == 0


def scenario(method: str, p: int, d: int, later: int = 0, **transfer: Any) -> None:
    engine: dict[str, Any] = {"gpu": "h800", "max_num_batched_tokens": 4096}
    tables: dict[str, Any] = {
        "workload": {"requests": 1, "arrival": {"process": "poisson", "rate_rps": 1.0}},
        "model": {"preset": "llama-3.1-8b"},
        "pool": [
            {"name": "p", "role": "prefill", "replicas": p, **engine},
            {"name": "d", "role": "decode", "replicas": d, **engine},
        ],
        "transfer": {"method": method, **transfer},
    }
    tables["workload"] |= {"input_tokens": 1000, "output_tokens": 200}
    if later:
        tables["scale"] = [{"pool": "d", "at_s": 10.0, "replicas": later}]
    Scenario.from_dict(tables)


@pytest.mark.parametrize("method", ["p2p-nccl-put", "p2p-nccl-put-async", "p2p-nccl-get"])
def test_96p144d_is_refused_at_16_channels_with_the_key_that_is_wrong(method: str) -> None:
    with pytest.raises(ScenarioError, match=r"pool.p.gpu_memory_utilization: .*144 peers need 14.4 GB.*85 peers"):
        scenario(method, 96, 144, nccl_num_channels=16, kv_buffer_size=1)


@pytest.mark.parametrize("method", ["p2p-nccl-put", "p2p-nccl-put-async", "p2p-nccl-get"])
def test_where_idle_groups_go_96p144d_fits(method: str) -> None:
    few: dict[str, Any] = {"nccl_num_channels": 16, "kv_buffer_size": 1}
    scenario(method, 96, 144, nccl_max_groups=85, **few)
    with pytest.raises(
        ScenarioError, match=r"pool.p.gpu_mem.*86 peers need 8.6 GB.*most 85 groups \(nccl_max_groups\)"
    ):
        scenario(method, 96, 144, nccl_max_groups=86, **few)


def test_more_groups_than_peers_take_nothing() -> None:
    scenario("p2p-nccl-put-async", 1, 3, kv_buffer_size=8_000_000_000, nccl_max_groups=1000)
    with pytest.raises(ScenarioError, match=r"nccl_max_groups: is 0, expected a number of at least 1"):
        scenario("p2p-nccl-put-async", 1, 3, nccl_max_groups=0)


def test_the_buffer_lies_next_to_the_groups() -> None:
    scenario("p2p-nccl-put-async", 1, 3, kv_buffer_size=8_000_000_000)
    with pytest.raises(ScenarioError, match=r"in addition to 8\.6 GB for the buffer"):
        scenario("p2p-nccl-put-async", 1, 3, kv_buffer_size=8_580_000_000)


def test_engines_that_start_later_are_peers_too() -> None:
    scenario("p2p-nccl-put-async", 1, 3, later=120)
    with pytest.raises(ScenarioError, match=r"pool.p.gpu_memory_utilization: .*200 peers"):
        scenario("p2p-nccl-put-async", 1, 3, later=200)


def test_other_methods_have_no_groups() -> None:
    scenario("nixl-push", 96, 144, nccl_num_channels=16)
