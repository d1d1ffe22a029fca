"""Strategies for small random worlds, many with all times on one grid so that everything collides; and what disturbs
them: clients that hang up, operations and handshakes that fail, deadlines and leases that run out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from zlib import crc32

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pdflow.methods.catalogue import METHODS
from pdflow.methods.posting import CONNECTORS

MS = 1_000_000
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
WHOLE = 100
"""The examples of a profile that draws as many worlds as a test asks for."""
GRID = st.sampled_from([0.0, 0.001, 0.002, 0.005])


def random_simulations(count: int) -> settings:
    """So many, the same every time; of a profile with fewer examples than most as much smaller a share."""
    share = min(settings.default.max_examples, WHOLE) / WHOLE  # type: ignore[union-attr]
    return settings(
        max_examples=round(count * share), derandomize=True, deadline=None, database=None, suppress_health_check=RELAXED
    )


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
        "network.warm": draw(st.booleans()),
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
        "transfer.connector": draw(st.sampled_from(list(CONNECTORS))),
        "transfer.reads_on": draw(st.sampled_from(["engine", "overlapped", "background"])),
        "router.dispatch": dispatch,
        "router.policy": draw(st.sampled_from(["round-robin", "least-loaded"])),
        "router.first_token": draw(st.sampled_from(["decode", "prefill"])),
        "noise.steps": draw(st.sampled_from([0.0, 0.05, 0.3])),
        "noise.api_server": draw(st.sampled_from([0.0, 0.5])),
        "noise.links": draw(st.sampled_from([0.0, 0.5])),
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
            f"pool.{name}.async_scheduling": draw(st.booleans()),
            f"pool.{name}.api_server_s": draw(GRID),
            f"pool.{name}.scheduling": draw(st.sampled_from(["v1", "v1", "v0"])),
        }
    overrides["pool.p.pp"] = draw(st.sampled_from([1, 1, 2]))
    return overrides


@st.composite
def disturbances(draw: st.DrawFn) -> dict[str, Any]:
    overrides = draw(scenarios())
    requests = overrides["workload.requests"]
    overrides |= {
        "router.max_attempts": draw(st.integers(1, 3)),
        "transfer.deadline_s": draw(st.sampled_from([10.0, 0.2, 0.02])),
        "transfer.kv_lease_duration_s": draw(st.sampled_from([30.0, 1.0, 0.06])),
        "transfer.stall_s": draw(st.sampled_from([30.0, 0.05])),
    }
    hangups = draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, requests - 1)), max_size=8))
    return {
        "overrides": overrides,
        "hangups": hangups,
        "salt": draw(st.integers(0, 1000)),
        "operations": draw(st.sampled_from([0, 0, 3, 20])),
        "handshakes": draw(st.sampled_from([0, 0, 2, 5])),
    }


def disturb(world: Any, hangups: list[tuple[int, int]], salt: int, operations: int, handshakes: int) -> None:
    """Hang up at these milliseconds; of every so many operations and handshakes, chosen by name, one fails."""
    asked: Counter[str] = Counter()

    def fails(what: Any) -> bool:
        name, one_of = (what, handshakes) if isinstance(what, str) else (repr(what), operations)
        asked[name] += 1
        return one_of > 0 and crc32(f"{salt} {name} {asked[name]}".encode()) % one_of == 0

    world.fabric.fails = fails
    for at_ms, request in hangups:
        world.clock.call(at_ms * MS, world.router.hang_up, request)


def both_modes_agree(overrides: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    fast = play(overrides)
    assert all(fast.records.outcome), "a request has no outcome"
    assert set(fast.records.outcome) == {"completed"}, fast.records.reason
    assert len(fast.records) == overrides["workload.requests"]
    exact = play(overrides, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(fast).splitlines()


def everything_ends(disturbed: dict[str, Any], play: Callable[..., Any], lines: Callable[[Any], bytes]) -> None:
    disturbed = dict(disturbed)
    overrides = disturbed.pop("overrides")

    def prepared(world: Any) -> None:
        disturb(world, **disturbed)

    fast = play(overrides, prepared=prepared)
    records = fast.records
    assert len(records) == overrides["workload.requests"]
    gone = {request for _, request in disturbed["hangups"]}
    for request, outcome in enumerate(records.outcome):
        assert outcome in ("completed", "failed", "cancelled"), f"request {request}: {outcome}"
        assert (records.reason[request] is None) == (outcome == "completed")
        assert outcome != "cancelled" or request in gone
        assert 1 <= records.attempts[request] <= overrides["router.max_attempts"]
    router = fast.router.port.endpoint
    assert not router.attempts
    assert not any(router.prefill_choice.loads + router.decode_choice.loads)
    exact = play(overrides, prepared=prepared, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(fast).splitlines()


def within_limits(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the same scenario of small.toml, as the method's original supports it: else in strict."""
    method, dialect = METHODS[overrides["transfer.method"]], overrides["transfer.dialect"]
    policy, found = method.pipeline_policy(dialect), dict(overrides)
    if policy.equal_tp:
        found["pool.d.tp"] = found.get("pool.p.tp", 1)
    if not policy.pipelined:
        found["pool.p.pp"] = 1
    if policy.one_pair and (found.get("pool.p.replicas"), found.get("pool.d.replicas")) != (1, 1):
        found["transfer.dialect"] = "strict"
    if policy.loads_by_layer or overrides.get("transfer.load_by_layer"):
        found |= {key: "v1" for key in found if key.endswith(".scheduling")}
    return found
