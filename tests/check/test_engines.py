"""Several engines of a kind, and ranks that outlive their engine: who is who, and that trouble stays where it is."""

from __future__ import annotations

import pytest

from pdflow.protocol.consumer.cells import ConsumerCells
from pdflow.protocol.consumer.scheduler import ON, ConsumerScheduler
from pdflow.protocol.effects import Effects
from pdflow.protocol.events import PeerRestarted
from pdflow.protocol.producer.cell import IN_FLIGHT, LeaseEnded
from pdflow.protocol.producer.lease import expired_unclaimed
from pdflow.protocol.producer.rules import RULES
from pdflow.protocol.values import Instant
from pdflow_sim.check.counterexamples.diagram import collect
from pdflow_sim.check.counterexamples.diagram_lines import Style
from pdflow_sim.check.counterexamples.diagram_mermaid import mermaid
from pdflow_sim.check.counterexamples.replay import named, record, strict
from pdflow_sim.check.counterexamples.shrink import shrink
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.tasks import Tasks
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import Counterexample, explore, shortest
from pdflow_sim.check.state.cluster import ScopeCluster
from pdflow_sim.check.state.space import Draft

TWO_P = Scope(p_engines=2, requests=2, p_restart=1, sync=1, concurrent=False, abort=0, deadline=0, stall=0)
OUTLIVED = Scope(p_restart=1, orphan=True, sync=1, abort=0, deadline=0, stall=0)


def counterexample(scope: Scope) -> Counterexample:
    found = shortest(relation(scope))
    assert found is not None
    return found


def test_two_p_engines_feed_one_d_before_a_second_one_comes_in() -> None:
    cluster = ScopeCluster(Scope(p_engines=2, d_engines=2, requests=4))
    assert [cluster.ends_of(i) for i in range(4)] == [("P0", "D0"), ("P1", "D0"), ("P0", "D1"), ("P1", "D1")]


def test_an_engine_that_is_alone_has_no_number() -> None:
    assert ScopeCluster(Scope()).nodes == ["P", "P.r0", "P.role", "D", "D.r0", "D.role"]


def test_engines_that_nobody_joins_have_no_link() -> None:
    cluster = ScopeCluster(Scope(p_engines=2, d_engines=2, requests=3))
    assert ("P1.r0", "D0.r0") in cluster.links
    assert not {("P1.r0", "D1.r0"), ("D1.r0", "P1.r0")}.intersection(cluster.links)


def test_the_death_of_one_engine_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    restarted = ON[PeerRestarted]

    def all_restarted(self: ConsumerScheduler, event: PeerRestarted, now: Instant) -> Effects:
        return tuple(
            effect
            for engine in self.store.peers
            for effect in restarted(self, PeerRestarted(engine, event.retired), now)
        )

    monkeypatch.setitem(ON, PeerRestarted, all_restarted)
    assert counterexample(TWO_P).broken.name == "L10"


def test_what_a_p_engine_may_bind_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsumerCells, "_has_room", lambda self, peer, num_blocks, now: True)
    scope = Scope(p_engines=2, requests=3, pool_blocks=8, concurrent=False, clocks=False, abort=0)
    assert counterexample(scope).broken.name == "L6"


def test_a_counterexample_of_one_engine_needs_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, (IN_FLIGHT, LeaseEnded), expired_unclaimed)
    at_p1 = [
        "finish x1",
        "decode u1-d0000001",
        "admit u1-d0000001",
        "handshake D.r0 -> P1.r0",
        "deliver Register u1-d0000001 D.r0 -> P1.r0",
        "handshake P1.r0 -> D.r0",
        "timer LEASE x1 at P1.r0",
    ]
    short = shrink(TWO_P, at_p1, "S2")
    assert (short.scope.p_engines, short.scope.requests) == (1, 1)
    assert short.names[-1] == "timer LEASE x0 at P.r0"


def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that lets an older grant land behind a fence."""

    def unbarred(self: Tasks, draft: Draft, name: str, peer: str) -> None:
        barred = self.space.shadow_of(draft).barred
        fence(self, draft, name, peer)
        for i, bits in enumerate(barred):
            self.space.put_shadow(draft, "barred", i, bits)

    fence = Tasks.fence
    monkeypatch.setattr(Tasks, "fence", unbarred)


def test_an_orphan_writes_where_no_fence_bars_it(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    found = counterexample(OUTLIVED)
    assert found.broken.name == "S1"
    assert "orphan P.r0" in found.broken.what


def test_only_an_orphan_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    assert explore(relation(Scope(p_restart=1, sync=1, abort=0, deadline=0, stall=0))).complete


def test_the_counterexample_of_an_orphan_replays_and_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    recorded = record(relation(OUTLIVED), named(relation(OUTLIVED), counterexample(OUTLIVED).moves))
    assert strict(relation(OUTLIVED), recorded).confirms(recorded)
    drawn = collect(recorded)
    assert drawn.prefill == ("P", "P.r0", "orphan P.r0")
    lines = [(line.style, line.at, line.text.split(",")[0]) for line in drawn.lines]
    assert (Style.NOTE, "P", "restart P") in lines
    assert (Style.BYTES, "orphan P.r0", "WRITE u0-d0000000 r0->r0") in lines
    assert "participant orphan_P_r0 as orphan P.r0" in mermaid(drawn)


def test_an_orphan_needs_a_world_that_can_have_one() -> None:
    for scope in (Scope(orphan=True, horizon=1), Scope(orphan=True, attempts=1)):
        with pytest.raises(ValueError, match="orphan"):
            ScopeCluster(scope)
