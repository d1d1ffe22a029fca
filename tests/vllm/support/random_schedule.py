"""Random schedules of what clients, engines and a network do to a P and a D: `RandomSchedule(seed, pair).play(60)`.

`EnginePair` is what a schedule needs of the pair. Engines are small, so that requests wait for blocks, are preempted,
and hit what others left in the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Protocol, TypeAlias

import attrs
from vllm.v1.request import RequestStatus

from tests.vllm.support.real_engine import RealEngine

Params: TypeAlias = Any
"""kv_transfer_params, in whatever shape the connector under test reads."""

S = 1_000_000_000
LENGTH = 60
"""Acts of a schedule."""
BLOCK = 16
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
LENGTHS = (1, 15, 16, 17, 20, 32, 33, 40, 48, 60)
FAMILIES = (list(range(100, 160)), list(range(200, 260)))
"""Prompts share a prefix of one of these."""
MOST_PROMPTS = 6
MOST_OPEN = 5
PREFILL_POOLS = (5, 8, 12, 64)
"""Blocks. The longest prompt and its output fit into the smallest pool, or vLLM would wait for room without end."""
DECODE_POOLS = (7, 7, 8, 12, 64)
BUDGETS = (17, 32, 64)


@attrs.frozen(kw_only=True)
class PairSetting:
    """How a schedule starts its pair. `p` and `d` are EngineSetting's, without the number of ranks."""

    seed: int
    pulls: bool
    p_tp: int
    d_tp: int
    p: dict[str, Any]
    d: dict[str, Any]
    lag: float
    """How often a step's execution is put off until its result is needed."""

    def lags(self, random: Random) -> Callable[[], bool]:
        return lambda: random.random() < self.lag


class EnginePair(Protocol):
    """A P and a D, their connectors, and the network between them."""

    p: RealEngine
    d: RealEngine

    def prefill_params(self, xid: str, prompt: list[int]) -> Params:
        """Of a prefill leg."""

    def decode_params(self, xid: str, answer: Params, prompt: list[int]) -> Params:
        """Of a decode leg, with what P's hook returned for this xid. `prompt` may be another one than P's."""

    def step(self) -> None:
        """One turn of each engine's loop, and then what the network gets done."""

    def hold(self, random: Random) -> None:
        """Some kinds of transfer or message are held back from now on, or no longer."""

    def fail(self, random: Random) -> None:
        """One transfer that is under way fails, if there is any."""

    def idle(self, ns: int) -> None:
        """Time passes, in which no engine steps."""

    def restart(self, name: str) -> None:
        """ "P" or "D" is killed, and started anew. `p` or `d` is another engine then."""

    def seen(self) -> Counter[str]:
        """What RealEngine.seen counts, of all engines there were."""

    def assert_at_rest(self) -> None:
        """Nothing is held back or fails any more. Everything ends, and nothing is left."""


@attrs.frozen(kw_only=True)
class Mix:
    """What schedules are made of.

    Args:
        tps: pairs of P's and D's ranks.
        windows: of the KV cache groups, see EngineSetting.
        foreign: the params of one prompt may come with another prompt, and a connector must refuse them.
        restarts: engines may be killed.
        roles: of P and of D. With kv_both vLLM defers more frees.
    """

    tps: tuple[tuple[int, int], ...] = ((1, 1), (2, 2))
    windows: tuple[tuple[int | None, ...], ...] = ((None,),)
    foreign: bool = False
    restarts: bool = True
    roles: tuple[tuple[str, ...], tuple[str, ...]] = (("kv_producer", "kv_both"), ("kv_consumer", "kv_both"))


def setting_of(seed: int, mix: Mix) -> PairSetting:
    random = Random(f"setting {seed}")
    p_tp, d_tp = random.choice(mix.tps)
    windows = random.choice(mix.windows)

    def engine(tp: int, pools: tuple[int, ...], roles: tuple[str, ...]) -> dict[str, Any]:
        return {
            "role": random.choice(roles),
            "num_blocks": random.choice(pools) * len(windows),
            "block_size": BLOCK,
            "max_num_batched_tokens": random.choice(BUDGETS),
            "max_num_seqs": random.choice((2, 16)),
            "recompute": random.random() < 0.5,
            "async_scheduling": random.random() < 0.5,
            "windows": windows,
            "uniproc": tp == 1 and random.random() < 0.3,
        }

    return PairSetting(
        seed=seed,
        pulls=random.random() < 0.5,
        p_tp=p_tp,
        d_tp=d_tp,
        p=engine(p_tp, PREFILL_POOLS, mix.roles[0]),
        d=engine(d_tp, DECODE_POOLS, mix.roles[1]),
        lag=random.choice((0.0, 0.5, 1.0)),
    )


class RandomSchedule:
    """Args: `seed` decides on everything that the schedule does; `make_pair` starts what it is done to."""

    def __init__(self, seed: int, make_pair: Callable[[PairSetting], EnginePair], mix: Mix) -> None:
        self.random = Random(seed)
        self.mix = mix
        self.pair = make_pair(setting_of(seed, mix))
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, Params] = {}
        """Of prefill legs, by xid: also of those whose P is gone."""
        self.decodes: list[str] = []
        self.params: dict[str, Params] = {}
        self.paused: set[str] = set()
        self.log: list[str] = []
        """What was done, for the message of a failure."""

    ACTS = (
        *("prefill", "prefill", "decode", "decode", "decode", "alone", "abort_decode", "abort_prefill", "hang_up"),
        *("hold", "fail", "idle", "reset", "pause", "resume", *["steps"] * 6),
    )

    def play(self, length: int) -> None:
        for _ in range(length):
            act = self.random.choice(self.ACTS)
            if self.mix.restarts and self.random.random() < 0.01:
                act = "restart"
            self.log.append(act)
            getattr(self, act)()
        self.resume()
        self.pair.assert_at_rest()

    def flip(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def engine(self, name: str) -> RealEngine:
        return self.pair.p if name == "P" else self.pair.d

    # Clients.

    def prompt(self) -> list[int]:
        """New tokens, after none or some of a family's."""
        length = self.random.choice(LENGTHS)
        shared = min(length, self.random.choice((0, 16, 33, 60)))
        first = 1_000 * (1 + self.random.randrange(9))
        return [*self.random.choice(FAMILIES)[:shared], *range(first, first + length - shared)]

    def prefill(self) -> None:
        if len(self.prompts) < MOST_PROMPTS:
            xid = f"x{len(self.prompts)}"
            prompt = self.prompts[xid] = self.prompt()
            tokens = 3 if self.flip(0.1) else 1
            stops_at = 1 if self.flip(0.2) else None
            params = self.pair.prefill_params(xid, prompt)
            self.pair.p.add_request(f"p-{xid}", prompt, tokens, params, stops_at=stops_at)

    def answered(self) -> list[str]:
        """Xids that P has answered with params."""
        for xid in self.prompts:
            _, params = self.pair.p.answers.get(f"p-{xid}", (None, None))
            if params is not None:
                self.answers[xid] = params
        return list(self.answers)

    def decode(self) -> None:
        """Of a prompt that P has answered: mostly one that was not decoded before."""
        ready = self.answered()
        if not ready or len(self.pair.d.requests) >= MOST_OPEN:
            return
        fresh = [xid for xid in ready if f"d-{xid}" not in self.decodes]
        if not fresh and self.flip(0.8):
            return
        xid = self.random.choice(fresh or ready)
        request_id = f"d-{xid}" if fresh else f"d-{xid}-{len(self.decodes)}"
        prompt = self.prompts[xid]
        if self.mix.foreign and self.flip(0.2):
            prompt = self.other_prompt(prompt)
        params = self.params[request_id] = self.pair.decode_params(xid, self.answers[xid], prompt)
        self.decodes.append(request_id)
        self.pair.d.add_request(
            request_id,
            prompt,
            self.random.choice((1, 3, 12, 40)),
            params,
            stops_at=2 if self.flip(0.2) else None,
            prompt_logprobs=1 if self.flip(0.05) else None,
        )

    def other_prompt(self, prompt: list[int]) -> list[int]:
        """Another one of P's, or this one with another token somewhere."""
        if self.flip():
            return self.random.choice(list(self.prompts.values()))
        position = self.random.randrange(len(prompt))
        return [*prompt[:position], 19_999, *prompt[position + 1 :]]

    def alone(self) -> None:
        """A request that an engine serves without a peer."""
        name = self.random.choice("PDD")
        engine = self.engine(name)
        if len(engine.requests) < MOST_OPEN:
            number = len(self.log)
            tokens = self.random.choice((1, 6, 12) if name == "P" else (1, 12, 40))
            engine.add_request(f"alone-{name}-{number}", self.prompt(), tokens)

    def abort_decode(self) -> None:
        if self.decodes:
            self.pair.d.abort(self.random.choice(self.decodes), late=self.flip())

    def abort_prefill(self) -> None:
        if self.prompts:
            self.pair.p.abort(f"p-{self.random.choice(list(self.prompts))}", late=self.flip())

    def hang_up(self) -> None:
        if self.decodes:
            request_id = self.random.choice(self.decodes)
            self.pair.d.hang_up(request_id, "bare", self.params[request_id])

    # Engines and network.

    def steps(self) -> None:
        for _ in range(self.random.randrange(1, 4)):
            self.pair.step()

    def hold(self) -> None:
        self.pair.hold(self.random)

    def fail(self) -> None:
        self.pair.fail(self.random)

    def idle(self) -> None:
        if self.flip(0.2):
            self.pair.idle(self.random.choice((1, 5, 16, 31)) * S)

    def reset(self) -> None:
        """vLLM raises if blocks are held that no running request has. Then it has preempted all the same."""
        engine = self.engine(self.random.choice("PD"))
        try:
            reset = engine.reset_prefix_cache(reset_running_requests=self.flip())
            engine.seen[f"reset {reset}"] += 1
        except RuntimeError:
            engine.seen["reset raises"] += 1
        if self.flip(0.1):
            self.reset_connector(engine)

    def reset_connector(self, engine: RealEngine) -> None:
        """As before a change of weights, which mostly reaches all instances: a connector may tell KV of before it from
        KV of after it by the number of resets."""
        engine.reset_prefix_cache(reset_connector=True)
        if self.flip(0.8):
            other = self.pair.d if engine is self.pair.p else self.pair.p
            other.reset_prefix_cache(reset_connector=True)

    def pause(self) -> None:
        if self.flip(0.2):
            name = self.random.choice("PD")
            self.engine(name).pause(self.random.choice(("abort", "keep", "wait")))
            self.paused.add(name)

    def resume(self) -> None:
        """A complete pause ends with a reset of the caches, as sleep and a change of weights do. It raises while vLLM
        keeps blocks of loads, or a connector holds references without having pending work."""
        for name in sorted(self.paused):
            engine = self.engine(name)
            loads = [each for each in engine.requests.values() if each.status is LOADING]
            if engine.parked() and not loads:
                engine.finish_pause()
                self.pair.p.reset_prefix_cache(reset_connector=engine is self.pair.d)
                self.pair.d.reset_prefix_cache(reset_connector=engine is self.pair.p)
                engine.seen["paused"] += 1
            engine.resume()
        self.paused.clear()

    def restart(self) -> None:
        name = self.random.choice("PD")
        self.answered()
        self.pair.restart(name)
        self.paused.discard(name)


def played(seeds: Iterable[int], make_pair: Callable[[PairSetting], EnginePair], mix: Mix) -> Counter[str]:
    """Play a schedule for each seed, and return what they saw. AssertionError with the seed and the acts of one that
    fails."""
    seen = Counter[str]()
    for seed in seeds:
        schedule = RandomSchedule(seed, make_pair, mix)
        try:
            schedule.play(LENGTH)
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {schedule.log}: {error!r}") from error
        seen += schedule.pair.seen()
    return seen
