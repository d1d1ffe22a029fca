"""Random schedules on vLLM's own Scheduler, and that they find what a connector does wrong.

The connector is a stub here: these tests are of the bed. 1,000 schedules take 15 s of CPU time.
"""

from __future__ import annotations

import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from vllm.v1.request import RequestStatus

    from tests.vllm.support.random_schedule import Mix, played
    from tests.vllm.support.stub_connector import StubLoad, StubRank
    from tests.vllm.support.stub_pair import StubPair

pytestmark = MARKS

SCHEDULES = 200
USUAL = Mix(tps=((1, 1), (2, 2), (1, 2), (2, 1)))
GROUPS = Mix(windows=((None, 32), (32, None), (None, None)))
"""Full attention beside a sliding window, as gpt-oss has it."""


def test_schedules_end_at_rest_and_reach_what_they_are_for() -> None:
    seen = played(range(SCHEDULES), StubPair, USUAL)
    for goal in (
        *("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR"),
        *("FINISHED_ABORTED while it loads", "FINISHED_ERROR while it loads", "aborted WAITING", "aborted RUNNING"),
        *("aborted WAITING_FOR_REMOTE_KVS", "aborted WAITING_FOR_REMOTE_KVS loaded", "load failed", "received", "sent"),
        *("hit", "matched, not allocated, matched again", "reset True", "reset False", "reset raises", "paused"),
    ):
        assert seen[goal] >= 5, (goal, seen)
    assert seen["preempted"] - seen["preempted by reset"] >= 20, seen
    assert not seen["loaded, behind one that failed"]


def test_two_kv_cache_groups() -> None:
    seen = played(range(SCHEDULES // 3), StubPair, GROUPS)
    for goal in ("received", "load failed", "sent", "hit", "preempted"):
        assert seen[goal] >= 5, (goal, seen)


@pytest.mark.nightly
@pytest.mark.parametrize("mix", [USUAL, GROUPS], ids=("one group", "two groups"))
@pytest.mark.parametrize("first", range(1_000, 21_000, 2_500))
def test_many_schedules_end_at_rest(first: int, mix: Mix) -> None:
    played(range(first, first + 2_500), StubPair, mix)


# Connectors that are wrong, and what finds them.


class SentTooEarly(StubPair):
    """P reports a prompt as sent when D begins to load it, so D may read blocks that have another owner."""

    early: frozenset[str] = frozenset()

    def carry_out(self) -> None:
        for source in sorted({load.source for rank in self.d_ranks for load in rank.loads} - self.early):
            if source in self.p_side.products:
                self.early |= {source}
                self.sending[source] = set(range(len(self.p_ranks)))
        super().carry_out()

    def _release(self, source: str) -> None:
        if source not in self.early:
            super()._release(source)


class NeverReleases(StubPair):
    """P forgets its prompts when D restarts."""

    def restart(self, name: str) -> None:
        super().restart(name)
        if name == "D":
            self.p_side.products.clear()


class ReportsAborted(StubPair):
    """D reports the end of a load for every request that is aborted."""

    def step(self) -> None:
        before = dict(self.d.answers)
        super().step()
        for request_id in sorted(set(self.d.answers) - set(before)):
            if self.d.answers[request_id][0] is RequestStatus.FINISHED_ABORTED:
                for rank in self.d_ranks:
                    rank.results.finished_recving.add(request_id)


class ForgetfulRank(StubPair):
    """One rank of D does not report a load that fails there."""

    def _end(self, number: int, rank: StubRank, load: StubLoad) -> None:
        super()._end(number, rank, load)
        if number == 1 and load.request_id in rank.results.failed_recving:
            rank.results.finished_recving.discard(load.request_id)


class ReportsTwice(StubPair):
    def _end(self, number: int, rank: StubRank, load: StubLoad) -> None:
        super()._end(number, rank, load)
        if load.request_id.endswith("0"):
            rank.loads.append(load)


class FailsWithoutEnd(StubPair):
    """A load is in `failed_recving`, and not in `finished_recving`."""

    def _end(self, number: int, rank: StubRank, load: StubLoad) -> None:
        super()._end(number, rank, load)
        rank.results.finished_recving -= rank.results.failed_recving


class HidesFailures(StubPair):
    def _end(self, number: int, rank: StubRank, load: StubLoad) -> None:
        super()._end(number, rank, load)
        rank.results.failed_recving.clear()


class ShiftedBlocks(StubPair):
    """P's blocks are read from the second on."""

    def _end(self, number: int, rank: StubRank, load: StubLoad) -> None:
        products = self.p_side.products
        product = products.get(load.source)
        if product is not None:
            products[load.source] = tuple(group[1:] + group[:1] for group in product)
        super()._end(number, rank, load)
        if product is not None and load.source in products:
            products[load.source] = product


FOREIGN_KV = "reads KV that is not of its tokens"
UNAWAITED = "no load of these is waited for"
AWAITED = "vLLM waits for finished_recving"


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (SentTooEarly, FOREIGN_KV),
        (HidesFailures, FOREIGN_KV),
        (ShiftedBlocks, FOREIGN_KV),
        (NeverReleases, "vLLM waits for finished_sending"),
        (ReportsAborted, UNAWAITED),
        (ReportsTwice, UNAWAITED),
        (ForgetfulRank, AWAITED),
        (FailsWithoutEnd, AWAITED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_schedules_find_a_connector_that_is_wrong(wrong: type[StubPair], found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        played(range(SCHEDULES), wrong, USUAL)
