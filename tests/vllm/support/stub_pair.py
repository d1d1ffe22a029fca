"""A P and a D with the stub connector, and between them transfers that end when the network gets to them."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.vllm.support.random_schedule import EnginePair, PairSetting, Params
from tests.vllm.support.real_engine import RealEngine
from tests.vllm.support.stub_connector import StubDecode, StubLoad, StubPrefill, StubRank

LEASE_NS = 30_000_000_000


class StubPair(EnginePair):
    """Each rank of D loads from every rank of P that has heads of its own."""

    def __init__(self, setting: PairSetting) -> None:
        self.setting = setting
        self.random = Random(setting.seed)
        self.held = False
        self.before: Counter[str] = Counter()
        """What the engines saw that are gone."""
        self.failing: set[str] = set()
        self.sending: dict[str, set[int]] = {}
        """P's requests that some ranks have not reported: which."""
        self.p_side, self.p = self._start_p()
        self.d_side, self.d = self._start_d()

    def _start_p(self) -> tuple[StubPrefill, RealEngine]:
        side = StubPrefill(self.setting.p["block_size"])
        self.p_ranks = [StubRank() for _ in range(self.setting.p_tp)]
        return side, RealEngine(side, self.p_ranks, lags=self.setting.lags(self.random), **self.setting.p)

    def _start_d(self) -> tuple[StubDecode, RealEngine]:
        self.d_ranks = [StubRank() for _ in range(self.setting.d_tp)]
        side = StubDecode()
        return side, RealEngine(side, self.d_ranks, lags=self.setting.lags(self.random), **self.setting.d)

    # Requests.

    def prefill_params(self, xid: str, prompt: list[int]) -> Params:
        return {"do_remote_decode": True}

    def decode_params(self, xid: str, answer: Params, prompt: list[int]) -> Params:
        return dict(answer)

    # Steps, and the network.

    def step(self) -> None:
        self.p.step()
        self.d.step()
        if not self.held:
            self.carry_out()

    def carry_out(self) -> None:
        """Some of what is under way ends; ranks end on their own."""
        for number, rank in enumerate(self.d_ranks):
            for load in list(rank.loads):
                if self.random.random() < 0.5:
                    rank.loads.remove(load)
                    self._end(number, rank, load)
        for request_id, ranks in list(self.sending.items()):
            for number in sorted(ranks):
                if self.random.random() < 0.5:
                    self.p_ranks[number].results.finished_sending.add(request_id)
                    ranks.discard(number)
            if not ranks:
                del self.sending[request_id]

    def _end(self, number: int, rank: StubRank, load: StubLoad) -> None:
        product = self.p_side.products.get(load.source)
        rank.results.finished_recving.add(load.request_id)
        if product is None or load.request_id in self.failing:
            rank.results.failed_recving.add(load.request_id)
        else:
            for group, blocks in enumerate(load.blocks):
                pairs = [(a, b) for a, b in zip(product[group], blocks, strict=True) if a and b]
                for source in self.p.memories:
                    self.d.memories[number].copy_from(source, [a for a, _ in pairs], [b for _, b in pairs], group)
        if not any(load in other.loads for other in self.d_ranks):
            self.failing.discard(load.request_id)
            self._release(load.source)

    def _release(self, source: str) -> None:
        """P's blocks are no longer needed."""
        if self.p_side.products.pop(source, None) is not None:
            self.sending[source] = set(range(len(self.p_ranks)))

    def hold(self, random: Random) -> None:
        self.held = not self.held

    def fail(self, random: Random) -> None:
        under_way = sorted({load.request_id for rank in self.d_ranks for load in rank.loads})
        if under_way:
            self.failing.add(random.choice(under_way))

    def idle(self, ns: int) -> None:
        if ns > LEASE_NS:
            loading = {load.source for rank in self.d_ranks for load in rank.loads}
            loading |= {load.source for load in self.d_side.beginning}
            for source in set(self.p_side.products) - loading:
                self._release(source)

    def restart(self, name: str) -> None:
        if name == "P":
            self.before += self.p.seen
            self.sending.clear()
            self.p_side, self.p = self._start_p()
        else:
            self.before += self.d.seen
            self.failing.clear()
            self.d_side, self.d = self._start_d()

    def seen(self) -> Counter[str]:
        return self.before + self.p.seen + self.d.seen

    def assert_at_rest(self) -> None:
        self.held = False
        for _ in range(400):
            self.idle(LEASE_NS + 1)
            self.step()
            if self.p.parked() and self.d.parked():
                break
        self.p.assert_at_rest()
        self.d.assert_at_rest()
