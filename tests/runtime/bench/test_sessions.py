"""Sessions go out as in the simulated world: the same turns in the same order, at the same instants."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from trio.testing import MockClock

from pdflow.results.records import Records
from pdflow.scenario.reading.load import load
from pdflow.workload.request import Request
from pdflow.workload.sessions import sessions
from pdflow_runtime.http.responder import Responder
from pdflow_sim.clients.clients import Clients
from pdflow_sim.clients.sessions import SessionClients
from pdflow_sim.clock import Clock
from pdflow_sim.environment import ClockEnvironment
from tests.runtime.bench.stub import FIRST_NS, GAP_NS, refuse, run, stub

SESSIONS = str(Path(__file__).resolve().parents[3] / "examples/sessions.toml")
FEW = ("workload.requests=60", "workload.output_tokens={dist='uniform', low=1, high=9}")
CLOSED = ("workload.arrival={process='closed', concurrency=5}",)


class Simulated:
    """What sim/pdflow_sim/clients/sessions.py needs of clients whose every answer takes as long as the stub's; some are
    refused.
    """

    def __init__(self, refused: set[int]) -> None:
        self.refused = refused
        self.clock = Clock()
        self.env = ClockEnvironment(self.clock)
        self.exhausted = False
        self.metrics = self
        self.records = Records()
        self.sessions: SessionClients

    def enter(self, request: Request) -> None:
        number = self.records.add(self.clock.now, request.input_tokens, request.output_tokens)
        takes_ns = 0 if number in self.refused else FIRST_NS + GAP_NS * (request.output_tokens - 1)
        self.clock.call(takes_ns, self.ended, number)

    def ended(self, number: int) -> None:
        self.sessions.ended(number, "failed" if number in self.refused else "completed")

    def run(self) -> None:
        self.sessions.begin()
        self.clock.run()


@pytest.mark.parametrize("overrides", [FEW, (*FEW, *CLOSED)], ids=["open", "closed"])
@pytest.mark.parametrize("refused", [set(), {7, 8, 20}], ids=["answered", "some refused"])
@pytest.mark.trio
async def test_turns_go_out_as_in_the_simulated_world(
    autojump_clock: MockClock, overrides: tuple[str, ...], refused: set[int]
) -> None:
    async def odd(number: int, responder: Responder) -> bool:
        if number in refused:
            await refuse(responder)
        return number in refused

    scenario = load(SESSIONS, overrides=overrides)
    world = Simulated(refused)
    world.sessions = SessionClients(world.env, cast(Clients, world), sessions(scenario.workload, scenario.seed), 60)
    world.run()
    async with stub(odd) as (_, port):
        ran = await run(port, scenario=SESSIONS, overrides=overrides)
    live, simulated = ran.ledger.records, world.records
    assert live.sessions == simulated.sessions
    assert live.arrival_ns == pytest.approx(simulated.arrival_ns, abs=10_000)
    assert [live.input_tokens[number] for number in range(60)] == simulated.input_tokens
