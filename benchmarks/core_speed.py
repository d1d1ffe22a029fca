"""CPU time of the protocol alone: python -m benchmarks.core_speed [--requests N] [--repeat N]

Inputs are recorded first and then replayed into fresh endpoints that nobody listens to, so that what is timed is
`handle` and the loop around it. Two recordings: a pair of engines that pass one request after another while many
transfers stay open, and every input of a simulated run of examples/reference.toml.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.shapes import KvShape
from pdflow.protocol.events import DecodeAdmitted, DecodeQueued, PrefillFinished, TimeReached
from pdflow.protocol.ids import KvParams
from pdflow.protocol.values import MS, Allocation, S
from pdflow.scenario import load
from pdflow_sim.run import RunOptions, prepare, run
from tests.support.cluster import Cluster

ROOT = Path(__file__).resolve().parents[1]
OPEN = (10, 1_000, 10_000)
BLOCKS = tuple(range(64))
TOKENS = 1024

Input = tuple[str, Any, int]
"""Endpoint, event, now."""


class Pair(Cluster):
    """One P and one D with all that lies between them answering at once, except WRITEs, which end when told to."""

    def __init__(self) -> None:
        shape = KvShape(num_layers=32, num_kv_heads=8, head_dim=128, bytes_per_value=2, block_size=16)
        geometry = TransferGeometry(shape, initiator="push")
        super().__init__(geometry=geometry, pool_blocks=1 << 30, peer_fraction=1.0, watched=False)
        self.holding = {"WRITE"}
        self.record: list[Input] = []

    def observe(self, node: str, event: Any, _: tuple[Any, ...]) -> None:
        self.record.append((node, event, self.now))

    def register(self, request: int) -> None:
        """Both legs begin; D registers and P has not computed anything yet."""
        name = f"r{request}.1"
        xid = f"x{request}.1"
        self.prefill(xid, request_id=name)
        self.feed("D", DecodeQueued(name, KvParams(self.infos["P"], xid, name, 0), len(BLOCKS), 0))
        self.feed("D", DecodeAdmitted(name, Allocation(request + 1, BLOCKS), 0, TOKENS, request, 1))
        self.run()

    def transfer(self, request: int) -> None:
        """P has computed the prompt; its KV is written, and both sides let go."""
        self.feed("P", PrefillFinished(f"x{request}.1", Allocation(request + 1, BLOCKS), TOKENS, request, 1))
        self.run()
        self.carry_out(self.find("WRITE"))
        self.run()


def replay(endpoints: dict[str, Any], inputs: list[Input]) -> float:
    """CPU seconds that the inputs take."""
    bound = [(endpoints[to].handle, event, now) for to, event, now in inputs]
    began = time.process_time()
    for handle, event, now in bound:
        handle(event, now)
    return time.process_time() - began


def with_open_transfers(open_transfers: int, requests: int, repeat: int) -> tuple[int, float, float]:
    """(events per request, s per event, s of one exchange of SYNCs), best of `repeat`."""
    pair = Pair()
    pair.now = MS
    for request in range(open_transfers):
        pair.register(request)
    before = len(pair.record)
    pair.now = 2 * MS
    for request in range(open_transfers, open_transfers + requests):
        pair.register(request)
        pair.transfer(request)
    after = len(pair.record)
    pair.now = S + MS
    pair.feed("D", TimeReached())
    pair.run()
    inputs = pair.record
    took, synced = [], []
    for _ in range(repeat):
        fresh = Pair()
        replay(fresh.endpoints, inputs[:before])
        took.append(replay(fresh.endpoints, inputs[before:after]))
        synced.append(replay(fresh.endpoints, inputs[after:]))
    events = after - before
    return events // requests, min(took) / events, min(synced)


def of_a_run(requests: int, repeat: int) -> tuple[float, float, float]:
    """(events per request, s per event, s per request) of the engines' endpoints in examples/reference.toml."""
    scenario = load(ROOT / "examples/reference.toml", overrides=[f"workload.requests={requests}"])
    inputs: list[Input] = []

    def observe(node: str, event: Any, _: tuple[Any, ...], now: int) -> None:
        if node != "router":
            inputs.append((node, event, now))

    world, _ = prepare(scenario, RunOptions(), [observe])
    run(world, None, drain=False)
    took = []
    for _ in range(repeat):
        fresh, _ = prepare(scenario, RunOptions(), [])
        endpoints = {
            address: port.endpoint for node in (*fresh.prefills, *fresh.decodes) for address, port in node.ports.items()
        }
        took.append(replay(endpoints, inputs))
    return len(inputs) / requests, min(took) / len(inputs), min(took) / requests


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the protocol alone.")
    parser.add_argument("--requests", type=int, default=2_000, help="requests timed with transfers open")
    parser.add_argument("--run", type=int, default=5_000, help="requests of the simulated run")
    parser.add_argument("--repeat", type=int, default=5, help="the best of so many is shown")
    options = parser.parse_args()
    print(f"{'strict push, 1P1D':28}{'events/request':>15}{'µs/event':>10}{'µs/request':>12}{'ms/SYNC':>9}")
    each = []
    for count in OPEN:
        events, event_s, sync_s = with_open_transfers(count, options.requests, options.repeat)
        each.append(event_s)
        title = f"{count:,} transfers open"
        print(f"{title:28}{events:15}{event_s * 1e6:10.2f}{events * event_s * 1e6:12.1f}{sync_s * 1e3:9.2f}")
    print(f"{'slowest over fastest':28}{max(each) / min(each):25.2f}   (must stay within 1.5)")
    per_request, event_s, request_s = of_a_run(options.run, options.repeat)
    print(f"{'a run of reference.toml':28}{per_request:15.1f}{event_s * 1e6:10.2f}{request_s * 1e6:12.1f}")


if __name__ == "__main__":
    main()
