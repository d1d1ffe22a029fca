"""Strategies for random plans of faults over small random scenarios.

What a plan may hold is what each dialect claims to stand. `vllm-compat` takes it that a P writes no more when its lease
and its transport's retries are over (spec 6.2), and a pulling D that its heartbeats arrive unless its transport
fails, and that P is the one that computed the prompt. So a clock that jumps, an engine that stands still for longer, a
lease shorter than the transport, and a P that comes back under the id that it had are not for it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

FRAMES = {
    "strict": ["REG", "REG_ACK", "DONE", "FAIL", "CANCEL", "CANCEL_ACK", "RELEASE", "TAKEN", "SYNC", "SYNC_REPLY"],
    "vllm-compat": ["REG", "COMPLETION", "HB"],
}


def table(**keys: Any) -> str:
    """An inline table of TOML, without what is None."""
    return "{" + ", ".join(f'"{key}" = {_toml(value)}' for key, value in keys.items() if value is not None) + "}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


ENGINES = st.sampled_from(["p-0", "p-*", "d-0", "d-*", "*"])
AT = st.sampled_from([0.0, 0.005, 0.02, 0.05, 0.1, 0.3, 1.0])
FOR = st.sampled_from([0.001, 0.02, 0.1, 0.5, 2.0])
SHARE = st.sampled_from([0.05, 0.3, 0.7, 1.0])


@st.composite
def times(draw: st.DrawFn, lasts: bool = True) -> dict[str, Any]:
    """Once, for good or for a while; again and again; at random."""
    how = draw(st.sampled_from(["once", "while", "every", "rate"] if lasts else ["once", "every", "rate"]))
    if how == "once":
        return {"at_s": draw(AT)}
    for_s = draw(FOR) if lasts else None
    if how == "while":
        return {"at_s": draw(AT), "for_s": for_s}
    if how == "every":
        return {"at_s": draw(AT), "every_s": max(0.137, (for_s or 0.0) * 2.37), "for_s": for_s}
    return {"rate_per_s": draw(st.sampled_from([1.0, 10.0])), "for_s": for_s}


@st.composite
def targets(draw: st.DrawFn) -> dict[str, Any]:
    how = draw(st.sampled_from(["all", "between", "from", "to"]))
    if how == "all":
        return {}
    if how == "between":
        return {"between": [draw(st.sampled_from(["p-0", "p-*"])), draw(st.sampled_from(["d-0", "d-*"]))]}
    return {how: draw(ENGINES)}


@st.composite
def faults(draw: st.DrawFn, overrides: dict[str, Any]) -> str:
    kind = draw(st.sampled_from(KINDS))
    keys: dict[str, Any] = {"kind": kind}
    if kind in ("drop", "delay", "duplicate", "reorder"):
        frames = st.lists(st.sampled_from(FRAMES[overrides["transfer.dialect"]]), min_size=1, max_size=3, unique=True)
        often = draw(st.booleans())
        keys |= {"probability": draw(SHARE)} | ({} if often else draw(times())) | draw(targets())
        keys |= {"messages": draw(frames)} if draw(st.booleans()) else {}
        if kind != "drop":
            keys["delay_s"] = draw(st.sampled_from([0.0, 0.001, 0.05, 1.0]))
        if kind == "delay":
            keys["jitter_s"] = draw(st.sampled_from([0.0, 0.02]))
    elif kind in ("transfer-error", "handshake-error"):
        keys |= {"probability": draw(SHARE)} | draw(targets())
        if kind == "transfer-error":
            keys["stage"] = draw(st.sampled_from(["start", "in-flight", "landed"]))
        else:
            keys["delay_s"] = draw(st.sampled_from([None, 0.0, 0.3]))
    elif kind == "partition":
        keys |= draw(times()) | draw(targets())
    elif kind == "slow":
        # Four of them may meet, and no WRITE of vllm-compat may outlast a quarantine.
        factors = [2.0, 10.5, 50.0] if overrides["transfer.dialect"] == "strict" else [1.5, 3.0]
        keys |= draw(times()) | {"engine": draw(ENGINES), "factor": draw(st.sampled_from(factors))}
    elif kind == "hang-up":
        within = draw(st.booleans())
        keys |= {"probability": draw(SHARE)} | ({"within_s": draw(FOR)} if within else draw(times(lasts=False)))
    else:
        keys |= draw(engine_faults(kind, overrides))
    return table(**keys)


@st.composite
def engine_faults(draw: st.DrawFn, kind: str, overrides: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {"engine": draw(ENGINES)}
    if kind == "crash":
        keys |= draw(times(lasts=False))
        repeated = "at_s" not in keys or "every_s" in keys
        restarts = [0.0, 0.01, 0.05] if repeated else [None, 0.0, 0.01, 0.3, 3.0]
        keys["restart_after_s"] = draw(st.sampled_from(restarts))
        trusting = overrides["transfer.dialect"] == "vllm-compat" and overrides["transfer.method"] == "nixl-pull"
        keys["engine_id"] = "new" if trusting else draw(st.sampled_from(["same", "same", "new"]))
        if overrides["transfer.dialect"] == "vllm-compat" and keys["engine_id"] == "same":
            keys["incarnation"] = draw(st.sampled_from(["new", "same"]))
        keys["in_flight"] = draw(st.sampled_from(["lands", "cut"]))
    elif kind == "pause":
        keys |= draw(times().filter(lambda keys: "for_s" in keys))
        keys["scope"] = draw(st.sampled_from(["process", "process", "step"]))
    else:
        # A clock that jumps while a lease runs is beyond what vllm-compat can stand: it has nothing but its clock.
        compat = overrides["transfer.dialect"] == "vllm-compat"
        keys |= {"at_s": 0.0} if compat else draw(times())
        keys |= {
            "speed": draw(st.sampled_from([0.9, 1.0, 1.1])),
            "offset_s": draw(st.sampled_from([0.01, 3.0, 1000.0])),
        }
    return keys


KINDS = [
    *("drop", "delay", "duplicate", "reorder", "partition", "slow", "crash", "crash", "pause", "skew"),
    *("transfer-error", "handshake-error", "hang-up"),
]


@st.composite
def disturbed_scenarios(draw: st.DrawFn) -> dict[str, Any]:
    dialect = draw(st.sampled_from(["strict", "strict", "vllm-compat"]))
    method = draw(st.sampled_from(["nixl-push", "nixl-push", "nixl-pull"]))
    latency = draw(st.sampled_from([0.0, 0.0001, 0.002]))
    overrides: dict[str, Any] = {
        "scenario.seed": draw(st.integers(0, 1000)),
        "workload.requests": draw(st.integers(1, 15)),
        "workload.arrival": f'{{ process = "poisson", rate_rps = {draw(st.sampled_from([20.0, 200.0]))} }}',
        "workload.output_tokens": draw(st.sampled_from(["1", "{ dist = 'uniform', low = 1, high = 30 }"])),
        "transfer.method": method,
        "transfer.dialect": dialect,
        "transfer.kv_lease_duration_s": draw(st.sampled_from([30.0, 1.0] if dialect == "strict" else [30.0])),
        "transfer.deadline_s": draw(st.sampled_from([60.0, 5.0, 0.2])),
        "router.dispatch": draw(st.sampled_from(["sequential", "concurrent"])),
        "router.policy": draw(st.sampled_from(["round-robin", "least-loaded"])),
        "router.first_token": draw(st.sampled_from(["decode", "decode", "prefill"])),
        "router.max_attempts": draw(st.integers(1, 3)),
        "network.bandwidth_bytes_per_s": draw(st.sampled_from([131_072_000, 13_107_200_000])),
        "network.latency_s": latency,
        "network.control_latency_s": latency,
        "network.http_latency_s": latency,
        "network.handshake_s": draw(st.sampled_from([0.0, 0.003])),
        "network.poll": draw(st.booleans()),
        "network.warm": draw(st.booleans()),
        "faults.transport_timeout_s": draw(st.sampled_from([0.5, 7.0])),
    }
    for pool in ("p", "d"):
        overrides |= {
            f"pool.{pool}.replicas": draw(st.integers(1, 2)),
            f"pool.{pool}.tp": draw(st.sampled_from([1, 1, 2])),
            f"pool.{pool}.kv_tokens": draw(st.sampled_from([192, 1024])),
            f"pool.{pool}.max_num_seqs": draw(st.sampled_from([2, 256])),
        }
    if draw(st.booleans()):
        overrides["faults.heal_s"] = draw(st.sampled_from([1.5, 10.0]))
    count = draw(st.integers(1, 4))
    overrides["fault"] = "[" + ", ".join(draw(faults(overrides)) for _ in range(count)) + "]"
    return overrides
