"""Validation of recorded traces: the events of endpoints are fed to the same state machines, which must answer with the
recorded effects (the etcd idea: a live trace is validated by the code that was checked).

Every event of an events.jsonl goes into fresh endpoints of the scenario that it came from, or of the engines that its
header describes, at its recorded time; each
must answer with exactly the recorded effects, and the oracle of S1 to S9 watches. A simulated record must agree to the
last effect; a live one may then be held against the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec

from pdflow.errors import PdflowError
from pdflow.protocol import effects, events, ids, messages, timers, values
from pdflow.protocol.errors import InvariantViolated, LocalProtocolError
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.results.files.events import EventLine, EventsError, classes_of, plain, read_events, rebuild
from pdflow.routing import effects as router_effects
from pdflow.routing import events as router_events
from pdflow.routing.router import Router
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.wiring.endpoints import EngineRecord
from pdflow.wiring.router import router_of
from pdflow_sim.build import SimulationBuilder

CLASSES = classes_of(effects, events, ids, messages, timers, values, router_events, router_effects)


class TraceDiffersError(PdflowError):
    """A record that this machine does not reproduce, or that breaks an invariant: which line, and what was expected
    there."""


@attrs.define
class Followed:
    """Numbers of events and effects of a record that were followed."""

    events: int = 0
    effects: int = 0


def follow(scenario: ResolvedScenario, path: Path) -> Followed:
    """Feed a record to the endpoints of its scenario and compare their effects. Raises TraceDiffersError,
    EventsError."""
    header, _ = read_events(path)
    builder = SimulationBuilder(scenario, incarnations=header.incarnations or {})
    # Live, every prompt has token ids, and so names for its blocks.
    builder.named = builder.named or header.world == "live"
    world = builder.build()
    endpoints = {address: port.endpoint for address, port in world.fabric.ports.items()}
    endpoints["router"] = live_router(builder) if header.world == "live" else world.router.port.endpoint
    return _follow(endpoints, builder.oracle(), path)


def follow_engines(path: Path) -> Followed:
    """Feed a record that names the configuration of its engines to endpoints that are made from it, and compare their
    effects. Raises TraceDiffersError, EventsError."""
    header, _ = read_events(path)
    try:
        records = [msgspec.convert(each, EngineRecord) for each in (header.engines or {}).values()]
    except msgspec.ValidationError as error:
        raise EventsError(f"{path}:1: an engine has a configuration of another version: {error}") from None
    if not records:
        raise EventsError(f"{path}:1: describes no engines; use pdflow check NAME.toml --trace FILE with its scenario")
    endpoints = {address: each for record in records for address, each in record.endpoints().items()}
    if len({record.protocol.shape for record in records}) != 1:
        raise EventsError(f"{path}:1: engines of several models; record one model at a time")
    return _follow(endpoints, Oracle(records[0].protocol.geometry(), records[0].protocol.done_is_remote), path)


def _follow(endpoints: dict[str, Any], oracle: Oracle, path: Path) -> Followed:
    found = Followed()
    for number, line, answers in _turns(path):
        endpoint = endpoints.get(line.node)
        if endpoint is None:
            known = ", ".join(sorted(endpoints)[:8])
            raise TraceDiffersError(f"{path}:{number}: no endpoint is named {line.node!r}; there are {known}, ...")
        try:
            event = rebuild(line.body, CLASSES)
            expected = endpoint.handle(event, line.t)
        except (ValueError, LocalProtocolError) as error:
            raise TraceDiffersError(f"{path}:{number}: {line.node} rejects {line.type}: {error}") from error
        if line.node != "router":
            try:
                oracle.observe(line.node, event, expected, line.t)
            except InvariantViolated as broken:
                raise TraceDiffersError(f"{path}:{number}: {broken}") from broken
        _compare(path, number, line, [plain(effect) for effect in expected], answers)
        found.events += 1
        found.effects += len(answers)
    return found


def live_router(builder: SimulationBuilder) -> Router:
    """Create a router as a live one starts: it knows no engine as up, and engines may be removed."""
    made = router_of(attrs.evolve(builder.cluster(), changes=True, may_stall=True))
    for info in (*made.prefill, *made.decode):
        made.handle(router_events.EngineChanged(info.engine, False), 0)
    return made


def _turns(path: Path) -> Iterator[tuple[int, EventLine, list[dict[str, Any]]]]:
    """Yield each event with its line number, and the effects that follow it."""
    _, lines = read_events(path)
    event: tuple[int, EventLine] | None = None
    answers: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=2):
        if line.direction == "in":
            if event is not None:
                yield (*event, answers)
            event, answers = (number, line), []
        elif event is None or line.node != event[1].node:
            raise TraceDiffersError(f"{path}:{number}: an effect of {line.node} follows no event")
        else:
            answers.append(line.body)
    if event is not None:
        yield (*event, answers)


def _compare(path: Path, number: int, line: EventLine, expected: list[Any], answers: list[Any]) -> None:
    for at in range(max(len(expected), len(answers))):
        ours = expected[at] if at < len(expected) else None
        theirs = answers[at] if at < len(answers) else None
        if ours != theirs:
            raise TraceDiffersError(
                f"{path}:{number + 1 + at}: {line.node} answers {line.type} at {line.t} ns differently\n"
                f"  recorded: {theirs or 'nothing more'}\n"
                f"  expected: {ours or 'nothing more'}"
            )
