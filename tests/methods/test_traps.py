"""Fourteen traps of the five published systems: each shows a fault of an original, and that pdflow does not have it.

Each is shown where it shows best: in every order of the data path, in the protocol's scopes, in the simulated world, or
in the one function that decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from pdflow.layout.shapes import KvShape
from pdflow.memory.ring import Ring
from pdflow.methods.catalogue import METHODS
from pdflow.methods.guards import Guards
from pdflow.methods.method import PipelinePolicy
from pdflow.methods.pages import runs
from pdflow.methods.shipment import Piece, Shipment, ShipmentEnd
from pdflow.scenario import load
from pdflow_sim.check.datapath.acts import Acts
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.pairing import Pairing
from pdflow_sim.check.datapath.setting import Setting
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.races.verdict import look
from pdflow_sim.check.search.forward import Explored, explore
from pdflow_sim.run import RunOptions, conclude, prepare, run
from pdflow_sim.world import World

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "tests/sim/small.toml"
LONG = {
    "workload.requests": 20,
    "workload.arrival.rate_rps": 5.0,
    "workload.input_tokens": 2000,
    "pool.p.kv_tokens": 100_000,
    "pool.d.kv_tokens": 100_000,
    "network.preset": "rdma-400g",
    "network.http_latency_s": 0.001,
    "network.handshake_s": 0.0,
}
"""Prompts whose way takes longer than what is lost on the way to the router."""


def played(overrides: dict[str, Any], file: Path = SMALL) -> World:
    """Under the oracle, until nothing is left to happen."""
    scenario = load(file, overrides=[f"{key}={value}" for key, value in overrides.items()])
    world, oracle = prepare(scenario, RunOptions(check_invariants=True, drain=True), [])
    assert not run(world, oracle, drain=True)
    assert set(world.records.outcome) == {"completed"}
    return world


def ttft_ms(world: World) -> float:
    records = world.records
    return sum(first - arrival for first, arrival in zip(records.first_token_ns, records.arrival_ns, strict=True)) / (
        1e6 * len(records)
    )


def found(name: str, ps: int, pipeline_policy: PipelinePolicy, *, faults: int = 1, **lacking: bool) -> Explored:
    """In every order, by this conduct and without these guards."""
    pipeline_policy = attrs.evolve(pipeline_policy, guards=Guards(**lacking))
    return explore(Acts(Setting(METHODS[name], pipeline_policy, ps, faults)))


@pytest.mark.parametrize(("lanes", "left"), [(1, "r0 and r1 cannot end"), (4, "r1 cannot end")])
def test_trap_01_one_listener_serialises_peers(lanes: int, left: str) -> None:
    """A piece of P1's, which has died, is being received without end: through one lane P0's are never taken in."""
    pipeline_policy = attrs.evolve(METHODS["p2p-nccl-put-async"].strict, receiving_lanes=lanes)
    by_lanes = found("p2p-nccl-put-async", 2, pipeline_policy, reserves_whole=False, ends_receives=False)
    assert by_lanes.counterexamples.keys() == {Finding.PEER}
    assert by_lanes.counterexamples[Finding.PEER][-1] == left


def test_trap_02_a_full_ring_of_incomplete_requests_is_a_deadlock() -> None:
    """Room by pieces: both hold a part and wait for more. With room for all of one before its first it is never so."""
    pipeline_policy = METHODS["cpu-staged"].published
    by_pieces = found("cpu-staged", 2, pipeline_policy, faults=0, reserves_whole=False, ends_receives=False)
    assert by_pieces.counterexamples.keys() == {Finding.RING}
    whole = found("cpu-staged", 2, pipeline_policy, faults=0, ends_receives=False)
    assert not whole.counterexamples
    assert whole.ends


def test_trap_03_a_ring_waits_for_its_oldest_allocation() -> None:
    """Whatever else has been given back is stranded; and all of it comes free with that one."""
    ring = Ring(40, step_bytes=10, greatest_bytes=10, high_bytes=40, low_bytes=30)
    oldest, *others = (ring.take(10) for _ in range(4))
    assert oldest is not None
    for position in others:
        assert position is not None
        assert ring.release(position) == 0
    assert (ring.free_bytes, ring.stranded_bytes) == (0, 30)
    assert ring.take(10) is None
    assert ring.release(oldest) == 40
    assert ring.take(10) is not None


@pytest.mark.parametrize("name", ["p2p-nccl-put-async", "p2p-nccl-get"])
def test_trap_04_one_lost_layer_is_the_whole_prompt_s_loss(name: str) -> None:
    skipped = found(name, 1, METHODS[name].strict, invalidates_lost=False)
    assert skipped.counterexamples.keys() == {Finding.SKIPPED}
    strict = found(name, 1, METHODS[name].strict)
    assert "lose" in strict.done
    assert not strict.counterexamples
    shipment = Shipment(2, 0, 4)
    for layer in range(2):
        shipment.offer(Piece(layer, 0, 4))
    first = shipment.next()
    assert first is not None
    shipment.lost()
    assert shipment.ending() is ShipmentEnd.FAILED
    assert shipment.next() is None


@pytest.mark.parametrize("dialect", ["vllm-stock", "strict"])
def test_trap_05_a_lease_ends_under_a_slow_read(dialect: str) -> None:
    """R04: as it was, others' bytes are decoded (S2); with lease words every state is sound."""
    race = look(RACES["R04"], dialect)
    assert race.ok
    assert race.states
    assert race.invariant == ("S2" if dialect == "vllm-stock" else "")


@pytest.mark.parametrize("dialect", ["vllm-stock", "strict"])
def test_trap_06_ids_that_look_alike_are_distinguished(dialect: str) -> None:
    """R39: two requests with one base id; by suffixes cut off, one gets what was computed for the other (S4)."""
    race = look(RACES["R39"], dialect)
    assert race.ok
    assert race.states
    assert race.invariant == ("S4" if dialect == "vllm-stock" else "")


@pytest.mark.parametrize("method", ["nixl-push", "p2p-nccl-put-async"])
def test_trap_07_a_preempted_request_does_not_register_again(method: str) -> None:
    """It is queued for blocks once more, and computed; what P has sent it, it has been sent once."""
    world = played(
        {
            "transfer.method": method,
            "workload.requests": 20,
            "workload.output_tokens": 60,
            "pool.d.replicas": 1,
            "pool.d.kv_tokens": 256,
        }
    )
    assert sum(node.engine.preemptions for node in world.decodes) > 0
    assert world.totals.transfers == 20


def test_trap_08_clocks_of_two_processes_have_nothing_in_common() -> None:
    """Only durations cross: engines whose clocks are set apart do the same at the same time."""
    skews = [
        f'{{ kind = "skew", engine = "{engine}", at_s = 0, offset_s = {offset_s} }}'
        for engine, offset_s in (("p-0", 9), ("d-*", 1000))
    ]
    plain, skewed = played({}), played({"fault": f"[{', '.join(skews)}]"})
    assert skewed.records.first_token_ns == plain.records.first_token_ns
    assert skewed.records.last_token_ns == plain.records.last_token_ns


def test_trap_09_two_that_ask_for_a_group_at_once_get_one() -> None:
    as_published = explore(Pairing(METHODS["p2p-nccl-put"].published.guards))
    assert as_published.counterexamples[Finding.GROUPS] == (
        "a:0 sends: NEW",
        "b:0 sends: NEW",
        "each engine waits for the other in another group",
    )
    strict = explore(Pairing(Guards()))
    assert not strict.counterexamples
    assert strict.ends


def test_trap_10_chunks_end_within_blocks() -> None:
    """PR #18332's example: steps of 8192 tokens, two prompts of 8200, so a first chunk of 8184 and a rest of 16."""
    chunks = (Piece(0, 0, 8184), Piece(0, 8184, 8200))
    cells = [
        ((run.block + (run.offset + k) // 16, (run.offset + k) % 16), piece.start + run.source + k)
        for piece in chunks
        for run in runs(piece, piece.start, 16)
        for k in range(run.tokens)
    ]
    assert cells == [(divmod(token, 16), token) for token in range(8200)]
    pipeline_policy = METHODS["cpu-staged"].published
    assert not found("cpu-staged", 1, pipeline_policy, reserves_whole=False).counterexamples
    by_prompt = found("cpu-staged", 1, pipeline_policy, reserves_whole=False, indexes_by_piece=False)
    assert by_prompt.counterexamples.keys() == {Finding.INDEX}


def test_trap_11_more_ranks_than_kv_heads_double_the_bytes() -> None:
    """Qwen3-235B at TP 8 moves 2 x 6.31 GB for 32,768 tokens, as measured; and as simulated."""
    qwen3 = KvShape(94, 4, 128, 2, 16)
    assert 32_768 * qwen3.engine_bytes_per_token(4) == pytest.approx(6.31e9, rel=1e-3)
    assert qwen3.engine_bytes_per_token(8) == 2 * qwen3.engine_bytes_per_token(4)
    moved = [played({"workload.requests": 3, "pool.p.tp": tp, "pool.d.tp": tp}).totals.bytes_moved for tp in (4, 8, 16)]
    assert moved == [moved[0], moved[0], 2 * moved[0]], "llama-3.1-8b has 8"


def test_trap_12_push_behind_a_sequential_router_is_slower_than_pull() -> None:
    """D registers only when P has answered: one message more than a read."""
    push, pull, at_once = (
        ttft_ms(played(LONG | {"transfer.method": method, "router.dispatch": dispatch}))
        for method, dispatch in (("nixl-push", "sequential"), ("nixl-pull", "sequential"), ("nixl-push", "concurrent"))
    )
    assert at_once < pull < push


def test_trap_13_small_blocks_cost_by_their_number() -> None:
    """The same bytes in an eighth of the descriptors, over NICs for which one thread posts them."""
    over_efa = LONG | {"network.preset": "efa-200g"}
    small, large = (played(over_efa | {"pool.p.block_size": size, "pool.d.block_size": size}) for size in (16, 128))
    assert small.totals.bytes_moved == large.totals.bytes_moved
    assert ttft_ms(small) > 1.2 * ttft_ms(large)


def test_trap_14_engines_that_wait_for_insert_and_drop_select_lose_tpot_and_not_median_itl() -> None:
    """Why the A10 tables' TPOT grows beyond measure beside a median gap of some milliseconds."""
    file = ROOT / "examples/methods/mooncake-v0.toml"

    def tpot_and_median_itl(dialect: str) -> tuple[float, float]:
        overrides = {"transfer.dialect": dialect, "workload.requests": 60}
        world = played(overrides, file)
        scenario = load(file, overrides=[f"{key}={value}" for key, value in overrides.items()])
        metrics = conclude(scenario, world, (), False).metrics
        return metrics.tpot.mean_ms, metrics.itl.p50_ms

    published, strict = tpot_and_median_itl("as-published"), tpot_and_median_itl("strict")
    assert published[0] > 1.2 * strict[0]
    assert published[1] == pytest.approx(strict[1], rel=0.02)
