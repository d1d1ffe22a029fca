"""What a store is for: prompts that others have put, engines that come and go, and, as published, what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdflow.errors import ScenarioError
from pdflow.protocol.ids import Op
from pdflow.results.records import P_QUEUE, PREFILL
from pdflow_sim.world import World

Play = Callable[..., World]
TOKEN_BYTES = 131_072
"""KV of llama-3.1-8b."""
NAMED = 512
PROMPT = 2 * NAMED + 1
STORE = {
    "transfer.method": "kv-store",
    "router.dispatch": "sequential",
    "pool.p.enable_prefix_caching": False,
    "pool.d.enable_prefix_caching": False,
    "pool.p.kv_tokens": 8192,
    "pool.d.kv_tokens": 8192,
    "noise.steps": 0,
}
SMALL = Path(__file__).parents[1] / "small.toml"


@pytest.fixture
def twice(play: Play, tmp_path: Path) -> Callable[..., World]:
    """A prompt, and a second later the same, at another prefill engine."""

    def run(prepared: Callable[[World], None] = lambda world: None, **changes: Any) -> World:
        trace = tmp_path / "t.jsonl"
        rows = [{"timestamp": at, "input_length": PROMPT, "output_length": 3, "hash_ids": [7, 8]} for at in (0, 1000)]
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = SMALL.read_text()
        head, rest = text.split("[workload]")
        file = tmp_path / "s.toml"
        file.write_text(
            head
            + f'[workload]\ntrace = {{ path = "{trace}", format = "mooncake" }}\n\n[model]'
            + rest.split("[model]")[1]
        )
        keys = {key.replace("__", "."): value for key, value in changes.items()}
        return play(STORE | {"pool.p.cost": '{ model = "roofline" }'} | keys, file=file, prepared=prepared)

    return run


def prefill_ns(world: World) -> list[int]:
    ends = world.records.ends
    return [ends[PREFILL][request] - ends[P_QUEUE][request] for request in range(len(world.records))]


def test_by_the_block_a_second_prompt_is_loaded_and_not_computed(twice: Callable[..., World]) -> None:
    world = twice(transfer__store_granularity="block")
    assert world.records.prefill_engine == ["p-0", "p-1"]
    first, second = prefill_ns(world)
    assert second < first / 3
    put_and_got = PROMPT + PROMPT
    loaded_put_and_got = 2 * NAMED + 1 + PROMPT
    assert world.totals.bytes_moved == TOKEN_BYTES * (put_and_got + loaded_put_and_got)


@pytest.mark.parametrize("keys", [{"granularity": "prompt"}, {"granularity": "block", "keep": False}])
def test_otherwise_it_is_computed_again(twice: Callable[..., World], keys: dict[str, Any]) -> None:
    world = twice(**{f"transfer__store_{key}": value for key, value in keys.items()})
    first, second = prefill_ns(world)
    assert first == second
    assert world.totals.bytes_moved == TOKEN_BYTES * 4 * PROMPT


def test_with_salted_keys_only_who_has_put_it_finds_it(twice: Callable[..., World]) -> None:
    salted = {"transfer__store_granularity": "block", "transfer__dialect": "as-published"}
    first, second = prefill_ns(twice(**salted))
    assert first == second
    first, second = prefill_ns(twice(pool__p__replicas=1, **salted))
    assert second < first / 3


def test_what_cannot_be_loaded_is_computed(twice: Callable[..., World]) -> None:
    def fails(what: Any) -> bool:
        return isinstance(what, Op) and what.reg.engine == "p-1.load"

    world = twice(transfer__store_granularity="block", prepared=lambda world: setattr(world.fabric, "fails", fails))
    assert world.records.outcome == ["completed", "completed"]
    first, second = prefill_ns(world)
    assert first == second
    assert world.totals.bytes_moved == TOKEN_BYTES * (PROMPT + PROMPT + 1 + PROMPT)


@pytest.mark.parametrize(
    ("how", "d_tp"), [({"transfer.store_hidden_states": True}, 2), ({"transfer.dialect": "as-published"}, 4)]
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_hidden_states_are_moved_as_often_as_kv(play: Play, how: dict[str, Any], d_tp: int, device: str) -> None:
    """Each rank of D gets them all, and so does each of the store's."""
    changes = {"transfer.kv_buffer_device": device, "pool.p.tp": 4, "pool.d.tp": d_tp, "pool.p.pp": 2}
    world = play(STORE | how | changes)
    hidden_bytes = 4096 * 2
    assert world.totals.bytes_moved == 2 * (TOKEN_BYTES + d_tp * hidden_bytes) * sum(world.records.input_tokens)


ONE = {
    "workload.requests": 1,
    "workload.arrival": '{ process = "constant", rate_rps = 1000 }',
    "pool.p.replicas": 1,
    "pool.d.api_server_s": 1.0,
}


@pytest.mark.parametrize("tokens", [1, 100])
def test_a_p_that_dies_when_it_has_put_loses_nothing(play: Play, tokens: int) -> None:
    """Its KV is there when D comes a second later, though nobody is left who had computed it."""
    fault = '[{ kind = "crash", engine = "p-0", at_s = 0.5 }]'
    world = play(STORE | ONE | {"workload.input_tokens": tokens, "fault": fault})
    assert world.totals.notes["fault: crash"] == 1
    assert world.records.outcome == ["completed"]
    assert world.records.attempts == [1]


def test_a_lease_that_is_over_is_not_read_from(play: Play) -> None:
    late = STORE | ONE | {"transfer.store_lease_s": 0.5, "transfer.store_keep": False}
    assert play(late).records.outcome == ["completed"], "the second attempt needs no store"
    world = play(late | {"router.max_attempts": 1})
    assert world.records.outcome == ["failed"]
    assert world.records.reason == ["stale"]


def test_groups_change_under_way(play: Play) -> None:
    up = '{ pool = "p", at_s = 0.3, replicas = 4, start_lag_s = 0.0 }'
    down = '{ pool = "d", at_s = 0.4, replicas = 1 }'
    changes = {"workload.requests": 60, "scale": f"[{up}, {down}]", "transfer.store_nodes": 2}
    world = play(STORE | changes)
    assert set(world.records.outcome) == {"completed"}
    assert set(world.records.prefill_engine) == {"p-0", "p-1", "p-2", "p-3"}


def test_what_nobody_holds_makes_room(play: Play) -> None:
    """A store of 300 tokens serves some 2,000, and never holds more than there is room for."""
    world = play(STORE | {"transfer.store_bytes": 304 * TOKEN_BYTES})
    (store,) = world.stores
    assert set(world.records.outcome) == {"completed"}
    assert store.memory.evicted > 20
    assert store.memory.used <= store.memory.pool.num_blocks == 19


TOGETHER = {
    "workload.requests": 4,
    "workload.arrival": '{ process = "closed", concurrency = 4 }',
    "workload.input_tokens": 50,
    "pool.p.replicas": 1,
    "pool.d.replicas": 1,
    "network.bandwidth_bytes_per_s": 1_000_000_000,
}
"""Four come to D at one instant."""


def one_get_fails(world: World) -> None:
    def fails(what: Any) -> bool:
        return isinstance(what, Op) and what.reg.engine == "d-0" and what.reg.request_id == "r2.1"

    world.fabric.fails = fails


@pytest.mark.parametrize(("dialect", "lost"), [("strict", [2]), ("as-published", [0, 1, 2, 3])])
def test_as_published_one_prompt_that_is_lost_takes_its_batch_with_it(
    play: Play, dialect: str, lost: list[int]
) -> None:
    world = play(STORE | TOGETHER | {"transfer.dialect": dialect}, prepared=one_get_fails)
    assert [request for request, outcome in enumerate(world.records.outcome) if outcome == "failed"] == lost


@pytest.mark.parametrize(("dialect", "again"), [("strict", [1, 1, 2, 1]), ("as-published", [2, 2, 2, 2])])
def test_d_computes_what_is_lost(play: Play, dialect: str, again: list[int]) -> None:
    changes = {"transfer.dialect": dialect, "router.on_failure": "recompute"}
    world = play(STORE | TOGETHER | changes, prepared=one_get_fails)
    assert set(world.records.outcome) == {"completed"}
    assert world.records.attempts == again


def test_kv_that_passed_through_host_memory_is_in_the_stores(play: Play) -> None:
    """Over PCIe at P and at D, and not at the store, whose memory is its host's."""
    world = play(STORE | ONE | {"transfer.kv_buffer_device": "cpu"})
    assert {name for name, *_ in world.fabric.paths.names} == {"p-0.r0 d2h", "d-0.r0 h2d"}


def test_decode_pools_must_suit_each_other(lay: Callable[..., Any], tmp_path: Path) -> None:
    """All get from a store that has the shape of the first."""
    text = SMALL.read_text()
    second = text[text.index('[[pool]]\nname = "d"') : text.index("[transfer]")].replace('name = "d"', 'name = "e"')
    file = tmp_path / "s.toml"
    file.write_text(text.replace("[transfer]", second + "[transfer]"))
    sizes = {"pool.d.block_size": 48, "pool.e.block_size": 32}
    lay(sizes, file)
    with pytest.raises(ScenarioError, match=r"a divisor or a multiple of 48 \(block_size of pool d\)"):
        lay(sizes | {"transfer.method": "kv-store"}, file)
