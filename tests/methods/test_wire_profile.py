"""What the originals say is what is told, counted and waited for as published; in strict our own frames are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.methods.wire_profile import Occasion
from pdflow.scenario import load
from pdflow.scenario.reading.load import parse, resolve
from pdflow_sim.network.fabric import FRAMES
from pdflow_sim.observe.text_trace import ONE, TextTrace
from pdflow_sim.run import RunOptions, prepare, run
from pdflow_sim.world import World

SMALL = Path(__file__).resolve().parents[1] / "sim/small.toml"
SPEAKING = [name for name, method in METHODS.items() if method.published.wire_profile.messages]
PIECES = {"cpu-staged": 4, "p2p-nccl-put": 2, "p2p-nccl-put-async": 2, "p2p-nccl-get": 2}
"""Of the one request that is told: two layers, of two chunks where a method goes by these."""


def traced(name: str, dialect: str) -> tuple[World, list[str]]:
    scenario = resolve(parse("one.toml", f'{ONE}[transfer]\nmethod = "{name}"\ndialect = "{dialect}"\n'))
    world, _ = prepare(scenario, RunOptions(), [])
    trace = TextTrace(world)
    run(world, None, drain=True)
    return world, trace.lines


def messages(lines: list[str]) -> list[str]:
    """What ranks have sent but bytes: names."""
    sent = [line.split(maxsplit=2)[2] for line in lines if ".r" in line.split()[0] and line.split()[1] == "sends"]
    names = [what.rpartition(": ")[0].partition(" of ")[0] for what in sent]
    return [name for name in names if not name.startswith(("layer", "all layers"))]


def test_all_but_nixl_have_messages_of_their_own() -> None:
    assert [name for name in METHODS if not name.startswith("nixl")] == SPEAKING
    assert not any(METHODS[name].strict.wire_profile.messages for name in METHODS)


@pytest.mark.parametrize("name", SPEAKING)
def test_a_request_is_traced_with_the_original_s_message_names(name: str) -> None:
    wire_profile = METHODS[name].published.wire_profile
    world, lines = traced(name, "as-published")
    sent = messages(lines)
    closing = [message.name for message in wire_profile.messages if message.when is Occasion.CLOSING]
    assert [message for message in closing if any(f"receives {message} after" in line for line in lines)] == closing
    pieces = PIECES.get(name, METHODS[name].published.tensors)
    times = {
        Occasion.CONTACT: 1,
        Occasion.REQUEST: 1,
        Occasion.PIECE: pieces,
        Occasion.BEHIND: pieces,
        Occasion.CLOSING: 0,
    }
    due = [message.name for message in wire_profile.messages for _ in range(times[message.when])]
    ours = [frame for frame in sent if frame in FRAMES]
    assert sorted(sent) == sorted(due + ours)
    assert not wire_profile.silent & set(sent)
    assert set(ours) <= {"TAKEN"}
    contacts = sum(message.when is Occasion.CONTACT for message in wire_profile.messages)
    assert world.fabric.messages == len(sent) - contacts + len(closing)


@pytest.mark.parametrize("name", METHODS)
def test_in_strict_the_traced_messages_are_those_counted(name: str) -> None:
    world, lines = traced(name, "strict")
    asked = 2 * PIECES.get(name, 0) * METHODS[name].strict.asks
    assert world.fabric.messages == len(messages(lines)) + asked


def last_token_ms(method: str, dialect: str, **overrides: Any) -> float:
    settings = {
        "transfer.method": method,
        "transfer.dialect": dialect,
        "workload.requests": 1,
        "workload.input_tokens": 50,
        "workload.output_tokens": 1,
        "model.num_layers": 2,
        "pool.p.replicas": 1,
        "pool.d.replicas": 1,
        "router.dispatch": "concurrent",
        **overrides,
    }
    world, _ = prepare(load(SMALL, overrides=[f"{key}={value}" for key, value in settings.items()]), RunOptions(), [])
    run(world, None, drain=True)
    [end], [arrival] = world.records.last_token_ns, world.records.arrival_ns
    return (end - arrival) / 1e6


@pytest.mark.parametrize(
    ("method", "latencies"),
    [
        ("p2p-nccl-put", 4),  # PUT and 0, of two layers
        ("p2p-nccl-get", 4),
        ("cpu-staged", 4),  # the last piece goes when the other has landed
        ("mooncake-v0", 8),  # five tensors, then key, value and hidden states
        ("mooncake-v1", 1),  # the response; D has asked while P computed
        ("kv-store", 5),  # PutStart and its answer, PutEnd; GetReplicaList and its
    ],
)
def test_who_waits_for_a_message_waits_for_its_latency(method: str, latencies: int) -> None:
    took = [last_token_ms(method, "as-published", **{"network.control_latency_s": s}) for s in (0.0, 0.01)]
    assert took[1] - took[0] == pytest.approx(10 * latencies, abs=0.1)


def test_a_message_that_no_method_sends_cannot_get_lost() -> None:
    lost = {"fault": '[{ kind = "drop", messages = ["REG"], at_s = 0, for_s = 0.5 }]'}
    assert last_token_ms("p2p-nccl-put", "as-published", **lost) < 100
    assert last_token_ms("p2p-nccl-put", "strict", **lost) > 1000
