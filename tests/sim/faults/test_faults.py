"""Each kind of fault by hand: one request whose times are known, and what the fault makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow.errors import InvariantError
from pdflow.scenario.validation.resolution import Resolution, resolution_of
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.observe.liveness import Watch

Play = Callable[..., Any]
MS = 1_000_000
S = 1_000_000_000
SMALL = Path(__file__).parents[1] / "small.toml"
ONE = {
    "workload.requests": 1,
    "workload.arrival": '{ process = "closed", concurrency = 1 }',
    "workload.input_tokens": 50,
    "workload.output_tokens": 3,
    "pool.p.replicas": 1,
    "pool.d.replicas": 1,
}
"""Prefill until 20 ms, three steps of 5 ms: tokens at 25, 30 and 35 ms."""
TEN_PER_MS = {"network.bandwidth_bytes_per_s": 131_072_000}
"""A token's KV in a millisecond: a WRITE of 50 ms, from 20 ms to 70 ms."""


def fault(*faults: str) -> dict[str, str]:
    return {"fault": "[" + ", ".join(f"{{ {keys} }}" for keys in faults) + "]"}


def tokens_ms(world: Any) -> tuple[float, float]:
    return world.records.first_token_ns[0] / MS, world.records.last_token_ns[0] / MS


def test_without_faults_there_is_nothing_of_them(play: Play) -> None:
    world = play(ONE)
    assert tokens_ms(world) == (25, 35)
    assert world.faults is None
    assert type(world.fabric) is Fabric
    assert type(world.prefills[0].engine).__name__ == "Engine"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("pause", "expected"),
    [
        ('engine = "p-0", at_s = 0.01, for_s = 0.05', (65, 75)),  # its step ends when it goes on
        ('engine = "p-0", at_s = 0.01, for_s = 0.005', (25, 35)),  # which it has not noticed
        ('engine = "d-0", at_s = 0.01, for_s = 0.05', (65, 75)),  # registers when it goes on, then one WRITE
        ('engine = "d-0", at_s = 0.027, for_s = 0.05', (25, 82)),  # between two tokens
        ('engine = "d-0", at_s = 0.027, for_s = 0.05, scope = "step"', (25, 82)),
        ('engine = "d-0", at_s = 0.01, for_s = 0.05, scope = "step"', (25, 35)),  # it has no step to be long
    ],
)
def test_a_pause(play: Play, pause: str, expected: tuple[float, float], exact: bool) -> None:
    world = play(ONE | fault(f'kind = "pause", {pause}'), exact=exact)
    assert tokens_ms(world) == expected


def test_what_arrives_during_a_pause_waits_at_ingress(play: Play) -> None:
    world = play(
        ONE | {"network.http_latency_s": 0.001} | fault('kind = "pause", engine = "p-0", at_s = 0, for_s = 0.1')
    )
    assert tokens_ms(world) == (126, 136)


def test_token_times_hold_through_restarts_and_pauses(play: Play) -> None:
    """The steps of all lives are in one log; every token is the end of its step."""
    crash = 'kind = "crash", engine = "d-*", rate_per_s = 3.0, restart_after_s = 0.05'
    pause = 'kind = "pause", engine = "d-*", rate_per_s = 5.0, for_s = 0.02'
    world = play({"workload.requests": 200, "router.max_attempts": 5} | fault(crash, pause))
    ends = {name: list(ends_of(steps)) for name, steps in world.steps.items() if "preempted" not in name}
    records = world.records
    looked = 0
    for request, steps in enumerate(records.token_steps):
        if records.outcome[request] == "completed" and len(steps) == 2:
            first, last = (ends[records.decode_engine[request]][step] for step in steps)
            assert last == records.last_token_ns[request]
            if request not in records.earlier:
                assert first == records.first_token_ns[request]
                looked += 1
            elif (earlier := records.earlier[request][0]).steps:
                assert ends[earlier.engine][earlier.steps[0]] == records.first_token_ns[request]
    assert looked > 100


def ends_of(steps: Any) -> Any:
    for columns in steps.folds():
        for start, first, delta, count, _ in zip(*(column.tolist() for column in columns), strict=True):
            for step in range(count):
                start += first + step * delta
                yield -(-start // 1000)


def test_only_durations_cross_from_one_clock_to_another(play: Play, lines: Callable[[Any], bytes]) -> None:
    skews = [f'kind = "skew", engine = "{name}", at_s = 0, offset_s = {s}' for name, s in (("p-0", 9), ("d-*", 1000))]
    assert lines(play(fault(*skews))) == lines(play({}))


def test_a_fast_clock_ends_a_deadline_early(play: Play) -> None:
    late = ONE | TEN_PER_MS | {"transfer.deadline_s": 0.08}
    assert play(late).records.outcome == ["completed"]
    world = play(late | fault('kind = "skew", engine = "d-0", at_s = 0, speed = 2.0'))
    assert world.records.reason == ["deadline"]
    assert world.totals.duration_ns == 40 * MS


def test_a_slow_nic(play: Play) -> None:
    assert tokens_ms(play(ONE | TEN_PER_MS)) == (75, 85)
    slow = 'kind = "slow", engine = "p-0", factor = 2, at_s = 0.03'
    assert tokens_ms(play(ONE | TEN_PER_MS | fault(slow))) == (115, 125)
    assert tokens_ms(play(ONE | TEN_PER_MS | fault(slow + ", for_s = 0.02"))) == (85, 95)
    assert tokens_ms(play(ONE | TEN_PER_MS | fault(slow, slow.replace("p-0", "*")))) == (195, 205)


def test_a_partition_that_heals_in_time_costs_only_time(play: Play) -> None:
    for direction in ('from = "p-0"', 'between = ["p-0", "d-0"]'):
        partition = f'kind = "partition", {direction}, at_s = 0.03, for_s = 0.5'
        assert tokens_ms(play(ONE | TEN_PER_MS | fault(partition))) == (575, 585)


def test_a_partition_that_lasts_longer_than_the_transport_tries(play: Play) -> None:
    partition = 'kind = "partition", from = "p-0", at_s = 0.03, for_s = 3'
    world = play(ONE | TEN_PER_MS | {"faults.transport_timeout_s": 1.0} | fault(partition))
    assert world.records.reason == ["io"]


def test_data_land_though_no_acknowledgement_comes_back(play: Play) -> None:
    partition = 'kind = "partition", from = "d-0", at_s = 0.03'
    world = play(ONE | TEN_PER_MS | {"faults.transport_timeout_s": 1.0} | fault(partition))
    assert tokens_ms(world) == (75, 85)


@pytest.mark.parametrize(
    ("stage", "outcome", "moved"), [("start", "failed", 0), ("in-flight", "failed", 0), ("landed", "completed", 1)]
)
def test_a_transfer_error(play: Play, stage: str, outcome: str, moved: int) -> None:
    world = play(ONE | TEN_PER_MS | fault(f'kind = "transfer-error", probability = 1, stage = "{stage}"'))
    assert world.records.outcome == [outcome]
    assert world.totals.transfers == moved
    assert world.totals.notes["fault: transfer-error"] == 1


def test_a_lost_registration_comes_again_with_the_next_sync(play: Play) -> None:
    world = play(ONE | fault('kind = "drop", messages = ["REG"], at_s = 0, for_s = 0.5'))
    assert tokens_ms(world) == (1005, 1015)


def test_messages_late_twice_or_out_of_order(play: Play) -> None:
    assert tokens_ms(play(ONE | fault('kind = "delay", messages = ["DONE"], probability = 1, delay_s = 0.1'))) == (
        125,
        135,
    )
    assert tokens_ms(play(ONE | fault('kind = "duplicate", probability = 1, delay_s = 0.001'))) == (25, 35)
    held = ONE | fault('kind = "reorder", messages = ["REG"], probability = 1, delay_s = 0.3')
    assert tokens_ms(play(held)) == (305, 315)  # nothing else comes to overtake it


def test_a_handshake_that_hangs(play: Play) -> None:
    world = play(ONE | fault('kind = "handshake-error", probability = 1, delay_s = 0.4'))
    assert world.records.reason == ["no engine was reachable"]
    assert world.totals.duration_ns == 400 * MS


def test_clients_hang_up_together_or_each_when_it_likes(play: Play) -> None:
    at_once = play({"network.http_latency_s": 0.05} | fault('kind = "hang-up", at_s = 0.4'))
    assert set(at_once.records.outcome) == {"completed", "cancelled"}
    each = play(fault('kind = "hang-up", within_s = 0.001'))
    assert set(each.records.outcome) == {"cancelled"}


def test_a_crash_loses_the_queue_and_the_router_tries_elsewhere(play: Play) -> None:
    crash = 'kind = "crash", engine = "p-0", at_s = 0.01'
    world = play(ONE | fault(crash))
    assert world.records.reason == ["its engine or the engine's peer died"]
    assert world.totals.duration_ns == 10 * MS
    world = play(ONE | {"pool.p.replicas": 2, "router.max_attempts": 2} | fault(crash))
    assert tokens_ms(world) == (35, 45)
    assert world.records.prefill_engine == ["p-1"]


AGAIN = {"pool.d.replicas": 2, "router.max_attempts": 2}
DIED = "its engine or the engine's peer died"


@pytest.mark.parametrize("first_token", ["decode", "prefill"])
def test_a_client_that_has_ds_token_gets_no_second_beginning(play: Play, first_token: str) -> None:
    """D dies: before its first token another one computes the answer, after it the failure is the request's, where
    answers are not resumed. P's token is no such beginning, since the other D continues behind it."""
    overrides = ONE | AGAIN | {"router.first_token": first_token, "router.dispatch": "sequential"}
    overrides |= {"router.resume": False}
    before = play(overrides | fault('kind = "crash", engine = "d-0", at_s = 0.022'))
    assert (before.records.outcome, before.records.attempts) == (["completed"], [2])
    assert before.records.decode_engine == ["d-1"]
    after = play(overrides | fault('kind = "crash", engine = "d-0", at_s = 0.027'))
    assert (after.records.outcome, after.records.attempts) == (["failed"], [1])
    assert after.records.reason == [DIED]


def test_an_engine_that_is_back_at_once_has_sent_its_token_all_the_same(play: Play) -> None:
    """Its next life knows nothing of it when the router sees the connection break, half a millisecond later."""
    crash = 'kind = "crash", engine = "d-0", at_s = 0.027, restart_after_s = 0'
    again = ONE | AGAIN | {"network.http_latency_s": 0.0005}
    world = play(again | {"router.resume": False} | fault(crash))
    assert (world.records.outcome, world.records.attempts) == (["failed"], [1])
    resumed = play(again | fault(crash))
    assert (resumed.records.outcome, resumed.records.attempts) == (["completed"], [2])
    assert sum(map(len, resumed.records.earlier[0])) > 0


def test_an_engine_that_decodes_alone_has_started_the_answer_too(play: Play) -> None:
    alone = AGAIN | {"router.disaggregate_above_tokens": 100, "router.resume": False}
    for at_s, outcome in ((0.015, "completed"), (0.027, "failed")):
        world = play(ONE | alone | fault(f'kind = "crash", engine = "d-0", at_s = {at_s}'))
        assert world.records.outcome == [outcome]


@pytest.mark.parametrize(("in_flight", "expected"), [("lands", (75, 85)), ("cut", None)])
def test_what_a_nic_has_begun(play: Play, in_flight: str, expected: tuple[int, int] | None) -> None:
    crash = f'kind = "crash", engine = "p-0", at_s = 0.04, in_flight = "{in_flight}"'
    world = play(ONE | TEN_PER_MS | fault(crash))
    if expected is not None:
        assert tokens_ms(world) == expected
    else:
        assert world.records.reason == ["its engine or the engine's peer died"]
        assert 15 * S <= world.totals.duration_ns < 17 * S  # by its silence, and by nothing else


def test_a_restarted_engine_answers_as_another_incarnation(play: Play) -> None:
    crash = 'kind = "crash", engine = "p-0", at_s = 0.04, in_flight = "cut", restart_after_s = 0.1'
    world = play(ONE | TEN_PER_MS | {"router.max_attempts": 2} | fault(crash))
    assert world.records.attempts == [2]
    assert world.records.outcome == ["completed"]
    assert world.totals.duration_ns < 2 * S


def test_one_fault_moves_no_other(play: Play, lines: Callable[[Any], bytes]) -> None:
    crash = 'kind = "crash", engine = "d-*", rate_per_s = 3.0, restart_after_s = 0.05'
    drop = 'kind = "drop", probability = 0.1'
    base = {"router.max_attempts": 3}
    alone = lines(play(base | fault(drop, crash)))
    for other in (
        'kind = "drop", probability = 0.5, messages = ["TAKEN"]',
        'kind = "slow", at_s = 900, engine = "p-0", factor = 2',
    ):
        overrides = base | {"network.bandwidth_bytes_per_s": 10**15}
        assert lines(play(overrides | fault(drop, crash))) == lines(play(overrides | fault(drop, other, crash)))
    assert alone != lines(play(base | fault(drop)))


# What vllm-compat cannot stand, and says so (spec 6.2): kept, so that it is known.


@pytest.mark.parametrize("dialect", ["strict", "vllm-compat"])
def test_p_restarts_under_its_id_before_the_handshake_with_d(play: Play, dialect: str) -> None:
    """D pulls from blocks of a life that it never knew: only strict's lease word shows that they are another's."""
    pull = {"transfer.method": "nixl-pull", "transfer.dialect": dialect, "network.http_latency_s": 0.002}
    crash = 'kind = "crash", engine = "p-0", at_s = 0.0225, restart_after_s = 0'
    if dialect == "strict":
        assert play(ONE | pull | fault(crash)).records.reason == ["stale"]
    else:
        with pytest.raises(InvariantError, match="S2"):
            play(ONE | pull | fault(crash))


# Liveness.


def test_the_bound_is_worked_out_from_the_timers(lay: Callable[..., Any]) -> None:
    strict = resolution_of(lay({"router.max_attempts": 2, "transfer.deadline_s": 20.0, **TEN_PER_MS}))
    assert (strict.attempts, strict.blocks_s, strict.deadline_s, strict.transport_s) == (2, 30.0, 20.0, 7.0)
    assert strict.write_s == pytest.approx(2 * 4096 * 131072 / 131_072_000)
    assert str(strict) == "115.2 s: 2 attempts x (30 s for blocks + 20 s deadline) + 7 s transport + 8.19 s of writes"
    compat = resolution_of(lay({"transfer.dialect": "vllm-compat", "transfer.push_registration_timeout_s": 40.0}))
    assert (compat.blocks_s, compat.deadline_s) == (55.0, 40.0)


def test_what_is_missing_is_named(play: Play) -> None:
    short = Resolution(attempts=1, blocks_s=0.5, deadline_s=0.5, transport_s=0.0, write_s=0.0)

    def prepared(world: Any) -> None:
        Watch(world, 100 * MS, short)

    with pytest.raises(InvariantError) as caught:
        play(ONE | fault('kind = "drop", from = "p-0", at_s = 0.01'), prepared=prepared)
    assert str(caught.value).splitlines()[:2] == [
        "liveness: faults ended at 0.100 s, and these requests made no progress for "
        "1 s: (0.5 s for blocks + 0.5 s deadline) + 0 s transport + 0 s of writes",
        "request 0: d-0.r0 waits for p-0.r0's DONE; registration sent at 0.000 s, last answer of p-0: QUEUED",
    ]


def test_a_queue_that_moves_is_no_wedge(play: Play) -> None:
    short = Resolution(attempts=1, blocks_s=0.1, deadline_s=0.1, transport_s=0.0, write_s=0.0)
    many = {
        "workload.arrival": '{ process = "constant", rate_rps = 1000 }',
        "pool.p.replicas": 1,
        "pool.p.max_num_seqs": 1,
    }

    def prepared(world: Any) -> None:
        Watch(world, 0, short)

    world = play(many, prepared=prepared)
    assert set(world.records.outcome) == {"completed"}
    assert world.totals.duration_ns > S // 2


def test_the_command_fails_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resolution, "bound_ns", property(lambda self: 10 * MS))
    lost = 'fault=[{kind = "drop", probability = 1, messages = ["REG"], at_s = 0}]'
    command = ["simulate", str(SMALL), "--quiet", "--check-invariants", "--set", lost, "--set", "faults.heal_s=0.2"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 1
    assert "liveness: faults ended at 0.200 s" in done.output
    assert "waits for p-" in done.output
    monkeypatch.undo()
    assert CliRunner().invoke(cli, command).exit_code == 0
