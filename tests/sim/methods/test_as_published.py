"""What the originals lack, in the simulated world: each fault shows as published, and in strict, with the same scenario
and seed, it is not there. Which orders of events lead to each is for `pdflow check methods` to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow.engine import Limits
from pdflow.errors import InvariantError, ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow.methods.guards import Guards
from pdflow.scenario import load
from pdflow.scenario.validation.fit import kv_shape_of
from pdflow.wiring.engines import EngineWiring
from pdflow_runtime.build import refuse_what_is_not_served
from pdflow_sim.run import simulate

FILE = Path(__file__).parents[1] / "small.toml"
Play = Callable[..., Any]
SMALL: dict[str, Any] = {"model.num_layers": 4}
"""1.7 MB for a prompt of 100 tokens."""
PUTS = ("p2p-nccl-put", "p2p-nccl-put-async")
AS_PUBLISHED = {"transfer.dialect": "as-published"}


def fault(keys: str) -> dict[str, str]:
    return {"fault": f"[{{ {keys} }}]"}


def both(play: Play, method: str, overrides: dict[str, Any]) -> tuple[Any, Any]:
    """The same in strict and as published."""
    settings = SMALL | {"transfer.method": method} | overrides
    return play(settings), play(settings | AS_PUBLISHED)


def outcomes(world: Any) -> set[str]:
    return set(world.records.outcome)


def first_token_ns(play: Play, by_layer: bool, step_s: float, **more: Any) -> int:
    """Of the one request of a run, which has 100 tokens: 409,600 bytes of each of four layers."""
    one = {"transfer.method": "cpu-staged", "transfer.load_by_layer": by_layer, "workload.requests": 1} | SMALL
    one |= {"workload.input_tokens": 100, "workload.output_tokens": 1, **more}
    world = play(one | {"pool.d.cost": f'{{ model = "constant", prefill_s = 0.0, decode_step_s = {step_s} }}'})
    (first,) = world.records.first_token_ns
    return int(first)


COPY_NS = 409_600 / 55.6
"""Of one layer over an H100's PCIe, at 55.6 GB/s."""


@pytest.mark.parametrize("dialect", ["strict", "as-published"])
def test_by_layer_a_long_step_hides_all_copies_but_the_first(play: Play, dialect: str) -> None:
    dialects = {"transfer.dialect": dialect}
    earlier = first_token_ns(play, False, 0.02, **dialects) - first_token_ns(play, True, 0.02, **dialects)
    assert earlier == pytest.approx(3 * COPY_NS, abs=4)


def test_by_layer_long_copies_hide_all_of_a_step_but_its_last_layer(play: Play) -> None:
    """A step of 4 us, of which each layer takes 1 us, and its copy 7."""
    earlier = first_token_ns(play, False, 4e-6) - first_token_ns(play, True, 4e-6)
    assert earlier == pytest.approx(3000, abs=4)


def test_the_cpu_connector_loads_by_layer_as_published(lay: Callable[..., Any]) -> None:
    def loads_by_layer(dialect: str, **keys: bool) -> bool:
        scenario = lay({"transfer.method": "cpu-staged", "transfer.dialect": dialect, **keys})
        shapes = {pool.name: kv_shape_of(scenario.model, pool) for pool in scenario.pools}
        return EngineWiring(scenario, shapes).pipeline_policy.loads_by_layer

    assert not loads_by_layer("strict")
    assert loads_by_layer("as-published")
    for dialect in ("strict", "as-published"):
        assert loads_by_layer(dialect, **{"transfer.load_by_layer": True})
        assert not loads_by_layer(dialect, **{"transfer.load_by_layer": False})


ONE_PAIR = {"pool.p.replicas": 1, "pool.d.replicas": 1}


def d_limits(lay: Callable[..., Any], method: str, **keys: Any) -> Limits:
    scenario = lay(ONE_PAIR | {"transfer.method": method} | keys)
    shapes = {pool.name: kv_shape_of(scenario.model, pool) for pool in scenario.pools}
    return EngineWiring(scenario, shapes).limits_of(scenario.pool("d"))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_connectors_of_vllm_v0_have_its_scheduling_as_published(lay: Callable[..., Any], method: str) -> None:
    published = d_limits(lay, method, **AS_PUBLISHED)
    assert published.prompts_first is published.stands_for_loads is (method in ("mooncake-v0", "kv-store"))
    assert not (published.prompts_first and published.async_scheduling)
    assert not d_limits(lay, method).prompts_first


def test_scheduling_is_a_key_of_each_pool(lay: Callable[..., Any]) -> None:
    ours = d_limits(lay, "nixl-push", **{"pool.d.scheduling": "v0"})
    assert (ours.prompts_first, ours.stands_for_loads, ours.async_scheduling) == (True, False, False)
    assert not d_limits(lay, "mooncake-v0", **AS_PUBLISHED, **{"pool.d.scheduling": "v1"}).prompts_first


@pytest.mark.parametrize(
    "keys",
    [
        {"model.preset": "qwen3-235b-a22b", "pool.d.dp_attention": 4, "pool.d.tp": 4},
        {"transfer.method": "cpu-staged", **AS_PUBLISHED},
        {"transfer.method": "cpu-staged", "transfer.load_by_layer": True},
    ],
)
def test_v0s_scheduling_is_refused_with_what_came_later(lay: Callable[..., Any], keys: dict[str, Any]) -> None:
    lay(keys)
    with pytest.raises(ScenarioError, match='scheduling: is "v0", expected "v1"'):
        lay(keys | {"pool.d.scheduling": "v0"})


def test_with_v0s_scheduling_a_decode_waits_until_no_prompt_is_left(lay: Callable[..., Any]) -> None:
    """Mooncake's pipe past saturation, with loads that take longer than steps. In V0 the wait for the loads that are
    left is one gap of an answer, and most gaps are steps of 5 ms: first tokens are earlier than in V1, and the longest
    gaps longer."""
    slow = SMALL | AS_PUBLISHED | ONE_PAIR | {"transfer.method": "mooncake-v0", "transfer.pickle_bytes_per_s": 10**7}
    slow |= {"workload.requests": 20, "workload.arrival": '{ process = "poisson", rate_rps = 3 }'}
    slow |= {"workload.input_tokens": 100, "workload.output_tokens": 6}
    v0, v1 = (simulate(lay(slow | {"pool.d.scheduling": name}), quiet=True).result.summary for name in ("v0", "v1"))
    assert v0["completed"] == v1["completed"] == 20
    assert v0["itl_p50_ms"] == pytest.approx(5.0)
    assert v0["ttft_mean_ms"] < v1["ttft_mean_ms"]
    assert v0["tpot_mean_ms"] > 2 * v1["tpot_mean_ms"]
    assert v0["itl_p99_ms"] > 2 * v1["itl_p99_ms"]


def test_what_is_simulated_only_is_not_served(lay: Callable[..., Any]) -> None:
    with pytest.raises(ScenarioError, match="is simulated only") as caught:
        refuse_what_is_not_served(lay({"transfer.method": "cpu-staged", "pool.p.scheduling": "v0"}))
    assert any(problem.path == "pool.0.scheduling" for problem in caught.value.problems)


@pytest.mark.parametrize("method", [*PUTS, "p2p-nccl-get"])
def test_a_lost_layer_is_skipped(play: Play, method: str) -> None:
    strict, published = both(play, method, fault('kind = "transfer-error", probability = 0.1, stage = "in-flight"'))
    assert "failed" in outcomes(strict)
    assert strict.records.wrong_kv is None
    assert outcomes(published) == {"completed"}
    assert published.records.wrong_kv


def test_a_layer_that_p_has_evicted_is_skipped(play: Play) -> None:
    few = {"transfer.kv_buffer_size": 2_000_000, "pool.p.replicas": 1, "transfer.method": "p2p-nccl-get"} | SMALL
    few["router.max_attempts"] = 1
    strict, published = play(few), play(few | AS_PUBLISHED, checked=False)
    assert set(strict.records.reason) == {None, "stale"}
    assert outcomes(published) == {"completed"}
    stale = {request for request, reason in enumerate(strict.records.reason) if reason == "stale"}
    assert published.records.wrong_kv == stale
    with pytest.raises(InvariantError, match="S2"):
        play(few | AS_PUBLISHED)


@pytest.mark.parametrize("method", PUTS)
def test_a_full_pool_ends_the_listener(play: Play, method: str) -> None:
    """Each engine gets every second prompt, and all of them come before any has ended."""
    full = {
        "transfer.kv_buffer_size": 2_000_000,
        "transfer.mem_pool_size_gb": 0,
        "transfer.deadline_s": 5.0,
        "workload.arrival.rate_rps": 1000.0,
        "pool.d.replicas": 1,
    }
    strict, published = both(play, method, full)
    assert outcomes(strict) == {"completed"}
    assert "a listener has ended" not in strict.totals.notes
    assert published.totals.notes["a listener has ended"] == 1
    assert {"completed", "failed"} == outcomes(published)
    assert {None, "deadline"} == set(published.records.reason)
    assert not published.records.wrong_kv
    records = published.records
    ends = [end for end, outcome in zip(records.last_token_ns, records.outcome, strict=True) if outcome == "completed"]
    assert max(ends) < 1e9, "a listener that has ended takes nothing in, though there is room again"


def test_a_ring_full_of_incomplete_prompts_releases_nothing_until_a_deadline(play: Play) -> None:
    """D's holds a prompt and a bit, and all come at once."""
    full = {
        "transfer.host_buffer_bytes": 2_000_000,
        "transfer.deadline_s": 5.0,
        "workload.arrival.rate_rps": 1000.0,
    }
    strict, published = both(play, "cpu-staged", full)
    assert outcomes(strict) == {"completed"}
    assert strict.totals.duration_ns < 1e9
    records = published.records
    assert outcomes(published) == {"completed", "failed"}
    assert "deadline" in records.reason
    ends = [end for end, outcome in zip(records.last_token_ns, records.outcome, strict=True) if outcome == "completed"]
    assert min(ends) < 1e9
    assert max(ends) > 5e9, "what the deadline has given back is given out again"


def test_the_listener_of_another_goes_on(play: Play) -> None:
    """One prompt of 55 tokens is larger than a buffer, and the others come one by one."""
    world = play(
        SMALL
        | AS_PUBLISHED
        | {
            "transfer.method": "p2p-nccl-put-async",
            "transfer.kv_buffer_size": 900_000,
            "transfer.mem_pool_size_gb": 0,
            "transfer.deadline_s": 2.0,
            "workload.requests": 12,
            "workload.arrival": '{ process = "constant", rate_rps = 5.0 }',
            "workload.input_tokens": "{ dist = 'uniform', low = 40, high = 55 }",
        }
    )
    records = world.records
    [ended] = world.shipping.deaf
    large = records.input_tokens.index(55)
    assert ended == f"{records.decode_engine[large]}.r0"
    late = [
        reason for engine, reason in zip(records.decode_engine, records.reason, strict=True) if f"{engine}.r0" == ended
    ]
    others = {
        reason for engine, reason in zip(records.decode_engine, records.reason, strict=True) if f"{engine}.r0" != ended
    }
    assert late[-1] == "deadline"
    assert others == {None}


def test_what_lies_behind_the_first_chunk_is_taken_from_elsewhere(play: Play) -> None:
    chunks = {
        "pool.p.max_num_batched_tokens": 64,
        "pool.p.max_num_seqs": 8,
        "pool.p.cost": '{ model = "roofline" }',
        "workload.requests": 30,
    }
    strict, published = both(play, "cpu-staged", chunks)
    assert strict.records.wrong_kv is None
    assert outcomes(strict) == outcomes(published) == {"completed"}
    wrong = published.records.wrong_kv
    lengths = published.records.input_tokens
    assert all(request in wrong for request, tokens in enumerate(lengths) if tokens > 64)
    assert len(wrong) < len(lengths)


@pytest.mark.parametrize("method", [*PUTS, "p2p-nccl-get", "cpu-staged"])
def test_a_receive_from_the_dead_has_no_end_but_the_deadline(play: Play, method: str) -> None:
    """Bytes are slow, so that P dies under them. Silence of 15 s is enough in strict."""
    dies = {
        "network.bandwidth_bytes_per_s": 13_107_200,
        "workload.requests": 4,
        "workload.arrival.rate_rps": 100.0,
        "transfer.deadline_s": 40.0,
    } | fault('kind = "crash", engine = "p-0", at_s = 0.04')
    strict, published = both(play, method, dies)
    assert strict.totals.duration_ns < 20e9
    assert "deadline" not in strict.records.reason
    assert "deadline" in published.records.reason
    assert published.totals.duration_ns > 40e9
    assert not published.records.wrong_kv


def test_the_next_incarnation_of_a_dead_sender_has_its_lane(play: Play) -> None:
    """D still waits for a layer of the former life, which has P's only lane no more."""
    restarts = {
        "transfer.method": "p2p-nccl-put",
        "network.bandwidth_bytes_per_s": 13_107_200,
        "workload.requests": 3,
        "workload.arrival": '{ process = "constant", rate_rps = 2.0 }',
        "workload.input_tokens": 50,
        "workload.output_tokens": 2,
        "pool.p.replicas": 1,
        "pool.d.replicas": 3,
    } | fault('kind = "crash", engine = "p-0", at_s = 0.55, restart_after_s = 0.2')
    records = play(SMALL | AS_PUBLISHED | restarts).records
    first, lost, later = zip(records.arrival_ns, records.last_token_ns, records.reason, strict=True)
    assert lost[2] == "peer restarted"
    assert later[1] - later[0] == first[1] - first[0]


def test_who_comes_behind_a_receive_that_does_not_end_waits_too(play: Play) -> None:
    """D has one listener, and P0 has died while it listened to it."""
    dies = {
        "network.bandwidth_bytes_per_s": 13_107_200,
        "workload.requests": 4,
        "workload.arrival.rate_rps": 100.0,
        "transfer.deadline_s": 40.0,
        "pool.d.replicas": 1,
        "router.max_attempts": 1,
    } | fault('kind = "crash", engine = "p-0", at_s = 0.04')
    strict, published = both(play, "p2p-nccl-put-async", dies)
    others = [i for i, engine in enumerate(strict.records.prefill_engine) if engine == "p-1"]
    assert [strict.records.outcome[i] for i in others] == ["completed"] * len(others)
    assert [published.records.reason[i] for i in others] == ["deadline"] * len(others)


@pytest.mark.parametrize("name", METHODS)
def test_only_what_can_go_wrong_is_counted(play: Play, name: str) -> None:
    for dialect in ("strict", "as-published"):
        pair = {"pool.p.replicas": 1, "pool.d.replicas": 1}
        world = play({"transfer.method": name, "transfer.dialect": dialect, "workload.requests": 3} | pair)
        guards: Guards = METHODS[name].pipeline_policy(dialect).guards
        can = not (guards.invalidates_lost and guards.indexes_by_piece)
        assert world.records.wrong_kv == (set() if can else None)
        assert ("wrong_kv" in world.records.record(0)) == can


@pytest.mark.parametrize("name", [*PUTS, "p2p-nccl-get"])
def test_of_a_pair_one_side_alone_asks_for_a_group(play: Play, name: str) -> None:
    """Two ranks that both ask at once would each wait in a group of its own (`ranks_by_address`). That takes engines
    that send to each other: here an engine is P or D, and one method is spoken."""
    senders: set[str] = set()

    def observe(node: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        senders.update(node[0] for effect in effects if type(effect).__name__ in ("PostWrite", "PostRead"))

    play({"transfer.method": name, "workload.requests": 5} | AS_PUBLISHED, observe=observe)
    assert senders == {"d" if METHODS[name].pulls else "p"}


def test_wrong_kv_is_reported_wherever_a_run_is(tmp_path: Path) -> None:
    options = ["--set", "transfer.method=p2p-nccl-get", "--set", "model.num_layers=4", "--set", "pool.p.replicas=1"]
    options += ["--set", "transfer.kv_buffer_size=2000000", "--quiet"]
    folders = [str(tmp_path / dialect) for dialect in ("strict", "as-published")]
    for folder in folders:
        dialect = Path(folder).name
        command = ["simulate", str(FILE), "--set", f"transfer.dialect={dialect}", *options, "--out", folder]
        assert CliRunner().invoke(cli, command).exit_code == 0
        results = json.loads(Path(folder, "results.json").read_text())["pdflow"]
        lines = [json.loads(line) for line in Path(folder, "requests.jsonl").read_text().splitlines()]
        wrong = [line["wrong_kv"] for line in lines if "wrong_kv" in line]
        if dialect == "strict":
            assert not wrong
            assert "wrong_kv" not in results["outcomes"]
        else:
            assert results["outcomes"]["wrong_kv"] == sum(wrong) == 1
            assert len(wrong) == len(lines)
    compared = CliRunner().invoke(cli, ["compare", *folders])
    assert compared.exit_code == 0
    assert compared.stdout.count("1 decoded with wrong KV") == 1
    runs = json.loads(CliRunner().invoke(cli, ["compare", *folders, "--json"]).stdout)["runs"]
    assert [run.get("wrong_kv") for run in runs] == [None, 1]


def test_the_report_has_a_line_for_it() -> None:
    scenario = load(FILE, overrides=["transfer.method=cpu-staged", "transfer.dialect=as-published"])
    result = simulate(scenario, quiet=True).result
    assert result.summary["wrong_kv"] == 0
    assert "wrong KV     0 of 40 completed" in str(result.table())
    strict = simulate(load(FILE, overrides=["transfer.method=cpu-staged"]), quiet=True).result
    assert "wrong" not in str(strict.table())
    assert "wrong_kv" not in strict.summary


@pytest.mark.parametrize("exact", [False, True])
def test_a_first_step_that_loads_has_the_block_of_its_second_token(play: Play, exact: bool) -> None:
    """With P's first token, D's first step reads a token beyond a prompt that fills its blocks, in a full pool."""
    world = play(
        {
            "transfer.method": "cpu-staged",
            "transfer.load_by_layer": True,
            "router.dispatch": "sequential",
            "router.first_token": "prefill",
            "model.num_layers": 4,
            "pool.p.replicas": 1,
            "pool.d.replicas": 1,
            "pool.d.kv_tokens": 64,
            "workload.requests": 4,
            "workload.input_tokens": 32,
            "workload.output_tokens": 10,
            "workload.arrival": '{ process = "closed", concurrency = 4 }',
        },
        exact=exact,
    )
    assert set(world.records.outcome) == {"completed"}
