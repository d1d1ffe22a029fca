"""Where the time of a decode leg goes: python -m benchmarks.vllm.stages [--connector NAME] [--requests N] [options]

One request at a time goes through a pair that writes its events. Printed: medians and 90th percentiles in ms of each
stage between a request's arrival at D's scheduler and the commit of its KV there, by the wall clock of this host.
Writing the events is a part of each stage.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from benchmarks.vllm.client import two_legs
from benchmarks.vllm.connectors import OURS, mode_of
from benchmarks.vllm.instances import Options, default_work, pair
from benchmarks.vllm.latency import REST_S, ms
from benchmarks.vllm.model import prompt


class Event(NamedTuple):
    """One event into an endpoint. `scheduler`: not a rank's."""

    at_ns: int
    role: str
    scheduler: bool
    kind: str
    message: str


Stage = tuple[str, Callable[[Event], bool]]
PUSH: Final[tuple[Stage, ...]] = (
    ("D's scheduler has the request", lambda e: e.role == "decode" and e.kind == "DecodeQueued"),
    ("D has blocks for it", lambda e: e.role == "decode" and e.kind == "DecodeAdmitted"),
    ("D's rank sends the registration", lambda e: e.role == "decode" and e.message == "Register"),
    ("P's rank has it", lambda e: e.role == "prefill" and e.kind == "Received" and e.message == "Register"),
    ("D's rank has DONE", lambda e: e.role == "decode" and e.kind == "Received" and e.message == "Done"),
    ("D's scheduler commits", lambda e: e.role == "decode" and e.scheduler and e.kind == "PairLanded"),
)
PULL: Final[tuple[Stage, ...]] = (
    *PUSH[:2],
    ("D's rank orders the READ", lambda e: e.role == "decode" and e.kind == "ReadOrdered"),
    ("the READ has ended", lambda e: e.role == "decode" and e.kind == "ReadEnded"),
    PUSH[-1],
)


def events(folder: Path) -> list[Event]:
    """Return the events of all processes, in the order of their times."""
    found: list[Event] = []
    for file in folder.glob("*.jsonl"):
        with file.open() as lines:
            ((role, engine),) = [(each["role"], name) for name, each in json.loads(next(lines))["engines"].items()]
            found += [_event(json.loads(line), role, engine) for line in lines if '"in":' in line]
    return sorted(found)


def _event(line: dict[str, Any], role: str, engine: str) -> Event:
    event = line["in"]
    message = event.get("message") or {}
    return Event(line["at"], role, line["node"] == engine, event["type"], message.get("type", ""))


def requests(found: list[Event], stages: tuple[Stage, ...]) -> Iterator[list[int]]:
    """Yield the times of all stages of each request that went through all of them: one goes at a time."""
    times: list[int] = []
    for event in found:
        if stages[0][1](event):
            times = [event.at_ns]
        elif times and stages[len(times)][1](event):
            times.append(event.at_ns)
            if len(times) == len(stages):
                yield times
                times = []


async def run(arguments: argparse.Namespace) -> int:
    folder = arguments.work / "stages"
    shutil.rmtree(folder, ignore_errors=True)
    options = [Options(connector=arguments.connector, core=core, extra_config={"events": str(folder)}) for core in "01"]
    async with pair(*options, arguments.work) as (p, d):
        for index in range(arguments.requests):
            await trio.sleep(REST_S)
            await two_legs(p.client, d.client, prompt(arguments.tokens, f"stages/{index}"), 1)
    stages = PUSH if mode_of(arguments.connector) == "push" else PULL
    all_times = list(requests(events(folder), stages))[2:]  # the first ones connect
    print(f"{arguments.connector}, {arguments.tokens} tokens, {len(all_times)} requests: median / p90 in ms")
    for number, (name, _) in enumerate(stages[1:], 1):
        print(f"  {name:34} {ms([(times[number] - times[number - 1]) / 1e9 for times in all_times])}")
    print(f"  {'in all':34} {ms([(times[-1] - times[0]) / 1e9 for times in all_times])}")
    return int(not all_times)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", choices=OURS, default="pdflow-push")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--work", type=Path, default=default_work())
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(trio.run(run, parse()))
