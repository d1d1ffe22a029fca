"""Groups that make room for others in the simulated world: never too many, never one in use, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.nccl.table import Groups
from pdflow_sim.observe.text_trace import TextTrace
from tests.sim.support.fault_plans import disturbed_scenarios
from tests.sim.support.simulations import random_simulations, scenarios

Play = Callable[..., Any]
Lines = Callable[[Any], bytes]
NCCL = ["p2p-nccl-put", "p2p-nccl-put-async", "p2p-nccl-get"]
MADE, EVICTED = "NCCL groups made again", "NCCL groups evicted"

IN_TURN = {
    "transfer.method": "p2p-nccl-put-async",
    "workload.requests": 12,
    "workload.arrival": '{ process = "constant", rate_rps = 1 }',
    "pool.p.replicas": 1,
    "pool.d.replicas": 3,
    "model.num_layers": 4,
    "network.handshake_s": 0.2,
}
"""One prompt after the other, to three engines in turn."""


class Watched(Groups):
    """Looks at every use: nobody has too many, and what went was idle."""

    __slots__ = ("dead",)

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.dead: set[str] = set()
        """Ranks whose process has ever died."""

    def died(self, ranks: Any) -> Any:
        self.dead.update(ranks)
        return super().died(ranks)

    def use(self, p_rank: str, d_rank: str) -> Any:
        before = {ranks: group.users for ranks, group in self.open.items()}
        used = super().use(p_rank, d_rank)
        assert not [ranks for ranks in before if ranks not in self.open and before[ranks]]
        assert max(Counter(rank for ranks in self.open for rank in ranks).values(), default=0) <= self.most
        return used


def watched(most: int) -> Callable[[Any], None]:
    """From now on, with every piece that is sent: it has its group, which has been made."""

    def watch(world: Any) -> None:
        assert world.shipping.groups.most == most
        groups = world.shipping.groups = Watched(most)

        def trace_line(who: str, what: str) -> None:
            if what.startswith(("announces and sends", "fetches")):
                p_rank, d_rank = sorted((who, what.rpartition(": ")[2]), reverse=True)
                ranks = p_rank, d_rank
                if groups.dead & {*ranks}:
                    # A rank that has not noticed its peer's death posts over the group that it held, which is closed.
                    held = [group for group in world.shipping.held.values() if group.ranks == ranks]
                    assert any(group.ready_ns <= world.clock.now for group in held)
                    return
                group = groups.open[ranks]
                assert group.users
                assert group.ready_ns <= world.clock.now

        world.metrics.trace_line = trace_line

    return watch


def assert_all_released(world: Any) -> None:
    """Nothing is under way over any group, and nobody waits for one."""
    assert not world.shipping.held
    assert not any(world.shipping.waiting.values())
    assert not [group for group in world.shipping.groups.open.values() if group.users]


def first_tokens(world: Any) -> list[float]:
    """Waits for the first token, in s."""
    records = world.records
    assert set(records.outcome) == {"completed"}
    return [(first - at) / 1e9 for first, at in zip(records.first_token_ns, records.arrival_ns, strict=True)]


@pytest.mark.parametrize("dialect", ["strict", "as-published"])
@pytest.mark.parametrize("method", NCCL)
def test_each_group_is_made_again_at_its_next_use_and_that_takes_time(play: Play, method: str, dialect: str) -> None:
    settings = IN_TURN | {"transfer.method": method, "transfer.dialect": dialect}
    kept = first_tokens(play(settings))
    world = play(settings | {"transfer.nccl_max_groups": 2}, prepared=watched(2))
    assert world.totals.notes[MADE] == 9
    assert world.totals.notes[EVICTED] == 10
    later = [round(b - a, 6) for a, b in zip(kept, first_tokens(world), strict=True)]
    # PUT_ASYNC begins with the first of four layers, three quarters of 0.02 s before the last is computed.
    assert later == [0.0] * 3 + [0.185 if method == "p2p-nccl-put-async" else 0.2] * 9
    assert_all_released(world)


@pytest.mark.parametrize("most", [3, 100])
def test_as_many_as_there_are_peers_are_as_good_as_any_number(play: Play, lines: Lines, most: int) -> None:
    world = play(IN_TURN | {"transfer.nccl_max_groups": most})
    assert lines(world) == lines(play(IN_TURN))
    assert not {MADE, EVICTED} & world.totals.notes.keys()


def test_who_is_busy_is_waited_for(play: Play) -> None:
    """Two prompts at once for one engine that keeps a single group: the second goes when the first has gone."""
    together = IN_TURN | {
        "workload.requests": 2,
        "workload.arrival": '{ process = "constant", rate_rps = 100000 }',
        "workload.input_tokens": 100,
        "pool.p.replicas": 2,
        "pool.d.replicas": 1,
        "network.bandwidth_bytes_per_s": 1_000_000,
        "network.handshake_s": 0.0,
    }
    both = first_tokens(play(together))
    one = first_tokens(play(together | {"transfer.nccl_max_groups": 1}, prepared=watched(1)))
    assert min(one) > min(both) / 2
    assert max(one) == pytest.approx(max(both), rel=0.3), "the same bytes over the same link"


def test_a_text_trace_has_the_groups(play: Play) -> None:
    traces: list[TextTrace] = []

    def prepared(world: Any) -> None:
        traces.append(TextTrace(world))

    play(IN_TURN | {"transfer.nccl_max_groups": 1, "workload.requests": 4}, checked=False, prepared=prepared)
    lines = [line for line in traces[0].lines if "group" in line]
    assert [" ".join(line.split()) for line in lines] == [
        "p-0.r0 creates a group: d-0.r0",
        "p-0.r0 evicts its group: d-0.r0",
        "p-0.r0 creates a group: d-1.r0",
        "p-0.r0 evicts its group: d-1.r0",
        "p-0.r0 creates a group: d-2.r0",
        "p-0.r0 evicts its group: d-2.r0",
        "p-0.r0 creates a group again: d-0.r0",
    ]


def test_a_restarted_engine_repeats_its_handshakes(play: Play) -> None:
    """Its groups are gone, and its handshake makes them: nine would be made again, and d-0's next is not."""
    crash = '[{ kind = "crash", engine = "d-0", at_s = 3.5, restart_after_s = 0.1 }]'
    world = play(IN_TURN | {"transfer.nccl_max_groups": 1, "fault": crash})
    assert set(world.records.outcome) == {"completed"}
    assert world.totals.notes[MADE] == 8
    assert_all_released(world)


def test_what_is_fetched_from_a_dead_engine_needs_no_group(play: Play) -> None:
    """P dies between the announcement of a piece and its READ."""
    case = {
        "scenario.seed": 1,
        "workload.requests": 1,
        "workload.arrival": '{ process = "poisson", rate_rps = 20.0 }',
        "workload.output_tokens": "1",
        "transfer.method": "p2p-nccl-get",
        "transfer.nccl_max_groups": 1,
        "network.bandwidth_bytes_per_s": 131_072_000,
        "network.latency_s": 0.002,
        "network.control_latency_s": 0.002,
        "network.http_latency_s": 0.002,
        "network.handshake_s": 0.0,
        "pool.p.kv_tokens": 192,
        "pool.d.kv_tokens": 192,
        "model.num_layers": 4,
        "router.max_attempts": 1,
        "fault": '[{ kind = "crash", engine = "p-0", at_s = 0.1 }]',
    }
    assert list(play(case, prepared=watched(1)).records.outcome) == ["failed"]


@st.composite
def grouped(draw: st.DrawFn, others: Callable[[], st.SearchStrategy[dict[str, Any]]]) -> tuple[dict[str, Any], int]:
    """Those worlds, by these methods, with few groups."""
    found = others().filter(lambda found: found["transfer.dialect"] == "strict")
    most = draw(st.integers(1, 2))
    overrides = draw(found) | {
        "transfer.method": draw(st.sampled_from(NCCL)),
        "transfer.nccl_max_groups": most,
        "pool.p.replicas": draw(st.integers(1, 3)),
        "pool.d.replicas": draw(st.integers(1, 3)),
        "network.handshake_s": draw(st.sampled_from([0.0, 0.003, 0.01])),
        "model.num_layers": 4,
    }
    return overrides, most


def holds(case: tuple[dict[str, Any], int], play: Play, lines: Lines) -> Any:
    overrides, most = case
    world = play(overrides, prepared=watched(most))
    assert_all_released(world)
    assert lines(play(overrides, exact=True, checked=False)).splitlines() == lines(world).splitlines()
    return world


@random_simulations(60)
@given(case=grouped(scenarios))
def test_in_random_simulations_every_request_completes(
    case: tuple[dict[str, Any], int], play: Play, lines: Lines
) -> None:
    assert set(holds(case, play, lines).records.outcome) == {"completed"}


@random_simulations(40)
@given(case=grouped(disturbed_scenarios))
def test_whatever_goes_wrong_every_group_is_released(
    case: tuple[dict[str, Any], int], play: Play, lines: Lines
) -> None:
    outcomes = holds(case, play, lines).records.outcome
    assert all(outcome in ("completed", "failed", "cancelled") for outcome in outcomes)
