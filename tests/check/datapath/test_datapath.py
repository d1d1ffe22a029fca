"""What `pdflow check methods` finds of each method, and that it would find more were more wrong."""

from __future__ import annotations

import attrs
import pytest

from pdflow.memory.ring import Ring
from pdflow.methods.catalogue import METHODS
from pdflow.methods.guards import Guards
from pdflow.methods.method import AS_PUBLISHED, PipelinePolicy
from pdflow.methods.shipment import Piece, Shipment
from pdflow.methods.staging import Staging
from pdflow.methods.store.memory import StoreMemory
from pdflow.protocol.values import Allocation
from pdflow_sim.check.datapath.acts import Acts
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.rows import PUBLISHED, STRICT, row
from pdflow_sim.check.datapath.setting import Setting
from pdflow_sim.check.datapath.store import StoreWorld
from pdflow_sim.check.search.forward import Explored, explore

STATES = {
    ("nixl-push", STRICT): 2160,
    ("nixl-push", AS_PUBLISHED): 2160,
    ("nixl-pull", STRICT): 151,
    ("nixl-pull", AS_PUBLISHED): 151,
    ("cpu-staged", STRICT): 23422,
    ("cpu-staged", AS_PUBLISHED): 3819,
    ("p2p-nccl-put", STRICT): 771,
    ("p2p-nccl-put", AS_PUBLISHED): 815,
    ("p2p-nccl-put-async", STRICT): 2149,
    ("p2p-nccl-put-async", AS_PUBLISHED): 2315,
    ("p2p-nccl-get", STRICT): 369,
    ("p2p-nccl-get", AS_PUBLISHED): 2345,
    ("kv-store", STRICT): 3185,
    ("kv-store", AS_PUBLISHED): 3996,
    ("mooncake-v0", STRICT): 197,
    ("mooncake-v0", AS_PUBLISHED): 2186,
    ("mooncake-v1", STRICT): 178,
    ("mooncake-v1", AS_PUBLISHED): 178,
}
CASES = [
    pytest.param(*case, marks=pytest.mark.slow if states > 10_000 else (), id="-".join(case))
    for case, states in STATES.items()
]


def test_every_method_is_looked_at() -> None:
    assert {(name, dialect) for name in METHODS for dialect in (STRICT, AS_PUBLISHED)} == STATES.keys()


@pytest.mark.parametrize(("name", "dialect"), CASES)
def test_nothing_is_found_in_strict_and_what_is_known_as_published(name: str, dialect: str) -> None:
    found = row(METHODS[name], dialect)
    expected = PUBLISHED.get(name, frozenset()) if dialect == AS_PUBLISHED else frozenset()
    assert found.counterexamples.keys() == expected
    assert found.ok, found.missed
    assert found.states == STATES[name, dialect]


def explored(name: str, ps: int, **lacking: bool) -> Explored:
    """In strict but for these guards; what goes in many pieces, without faults."""
    method = METHODS[name]
    pipeline_policy = attrs.evolve(method.strict, guards=Guards(**lacking))
    return explore(Acts(Setting(method, pipeline_policy, ps, faults=name != "cpu-staged")))


@pytest.mark.parametrize(
    ("name", "ps", "lacking", "finding"),
    [
        ("cpu-staged", 2, {"reserves_whole": False}, Finding.RING),
        ("p2p-nccl-put-async", 2, {"reserves_whole": False, "survives_exhaustion": False}, Finding.DEAF),
        ("p2p-nccl-put-async", 1, {"invalidates_lost": False}, Finding.SKIPPED),
        ("p2p-nccl-get", 1, {"invalidates_lost": False}, Finding.SKIPPED),
        ("p2p-nccl-get", 2, {"ends_receives": False}, Finding.PEER),
        ("nixl-push", 1, {"invalidates_lost": False}, Finding.SKIPPED),
    ],
)
def test_what_each_guard_keeps_away(name: str, ps: int, lacking: dict[str, bool], finding: Finding) -> None:
    assert explored(name, ps, **lacking).counterexamples.keys() == {finding}


def test_a_piece_that_finds_no_room_is_refused_and_its_prompt_computed_again() -> None:
    """What is left of a buffer's exhaustion once the listener survives it."""
    assert not explored("p2p-nccl-put-async", 1, reserves_whole=False).counterexamples


def test_by_pieces_a_ring_is_full_of_prompts_that_cannot_end_though_nothing_is_lost() -> None:
    method = METHODS["cpu-staged"]
    pipeline_policy = attrs.evolve(
        method.strict, answer_first=True, guards=Guards(reserves_whole=False, ends_receives=False)
    )
    found = explore(Acts(Setting(method, pipeline_policy, ps=2, faults=0)))
    assert found.counterexamples.keys() == {Finding.RING}
    assert found.counterexamples[Finding.RING][-1] == "r0 and r1 cannot end"
    assert found.ends, "in other orders all is well"


@pytest.mark.parametrize("name", ["p2p-nccl-put", "cpu-staged"])
def test_two_memories_would_wait_for_each_other_if_p_had_room_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D's room is another prompt's, which P will not send before this one has gone: D asks in another order than P
    computes. So P's room comes with the WRITE."""
    assert not explore(strict(name, faults=0)).counterexamples
    monkeypatch.setattr(Setting, "room_with_write", False)
    found = explore(strict(name, faults=0))
    assert found.counterexamples
    assert found.ends, "in other orders all is well"


# Were something else wrong.


def strict(name: str, faults: int = 1) -> Acts:
    """Of one P."""
    return Acts(Setting(METHODS[name], METHODS[name].strict, ps=1, faults=faults))


def test_room_that_is_given_out_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "allocate", lambda self, owner, size: 0)
    assert explore(strict("cpu-staged")).counterexamples.keys() == {Finding.TWICE}


def test_room_that_is_never_given_back_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "release", lambda self, allocation: None)
    found = explore(Acts(Setting(METHODS["p2p-nccl-get"], METHODS["p2p-nccl-get"].strict, ps=2)))
    assert found.counterexamples.keys() == {Finding.KEPT}
    assert not found.ends


def test_a_notification_before_the_data_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    landed = Shipment.landed

    def all_at_once(self: Shipment, piece: Piece) -> None:
        landed(self, piece)
        self._left = 0

    monkeypatch.setattr(Shipment, "landed", all_at_once)
    assert Finding.INDEX in explore(strict("p2p-nccl-put-async", faults=0)).counterexamples


def test_a_store_that_gives_others_bytes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: StoreMemory, generation: int) -> Allocation:
        return Allocation(generation, tuple(reversed(table(self, generation).blocks)))

    table = StoreMemory.table
    monkeypatch.setattr(StoreMemory, "table", wrong)
    assert Finding.STALE in explore(StoreWorld(PipelinePolicy())).counterexamples
