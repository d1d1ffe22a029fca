"""What would help: one resource of a design is made larger at a time, and the highest rate searched again.

The resource that helps most is the one that binds the design. It is found by what changes, not by how busy things are:
a prefill engine that is busy all the time binds nothing if D's memory is what requests wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from pdflow.scenario.schema.scenario import Pool, ResolvedScenario, Role, RooflineCost
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow_sim.experiments.edits import faster_network
from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.max_rate import RateSearch, search_together
from pdflow_sim.plan.probes import UNCHANGED, Change, DesignProbe, Prober, ProbeResult

MORE: Final = 2
"""How many times as much of a resource each lever gives."""
LETTERS: Final[dict[Role, str]] = {"prefill": "P", "decode": "D", "aggregated": "the engines"}
_TOLERANCE: Final = 0.04
_STEP: Final = 1.15
_WORTH_A_LOOK: Final = 1.03
_FULL: Final = 0.9
_ALIKE: Final = 0.7


@attrs.frozen
class Lever:
    """One change of a design: `resource` is what binds the design if this helps most."""

    name: str
    resource: str
    design: Design
    change: Change = UNCHANGED


@attrs.frozen
class LeverResult:
    """What a lever is worth: the highest rate with it, by that of the design as it is, with the same seed."""

    lever: Lever
    rate: float
    base_rate: float
    scale: float | None = None
    """Where neither meets the service level: the factor on all bounds with the lever, by that without it."""

    @property
    def gain(self) -> float:
        """The relative gain: 0.3 is 30 % more requests, or bounds that are missed by so much less."""
        if self.scale is not None:
            return 1 / self.scale - 1 if self.scale > 0 else 0.0
        return self.rate / self.base_rate - 1 if self.base_rate > 0 else 0.0


def gain_text(gain: float) -> str:
    """Return a gain with its sign."""
    return f"{round(gain * 100):+,} %"


def levers_of(design: Design, scenario: ResolvedScenario) -> Iterator[Lever]:
    """Yield the changes that are tried; `scenario` is the design's own."""
    for pool in scenario.pools:
        yield from _of_pool(design, pool, scenario)
    if design.kind == "aggregated":
        return
    network = scenario.network
    if faster_network(network, MORE):
        yield Lever("network x 2", "network bandwidth", design, Change(faster_network(network, MORE)))
    posting = {f"network.{key}": getattr(network, key) / MORE for key in ("per_descriptor_s", "per_message_s")}
    yield Lever("posting in half the time", "posting of descriptors", design, Change(posting))
    if network.poll:
        yield Lever("no polling", "polling once per step", design, Change({"network.poll": False}))


def _of_pool(design: Design, pool: Pool, scenario: ResolvedScenario) -> Iterator[Lever]:
    letter, gpu = LETTERS[pool.role], pool.gpu

    def lever(what: str, resource: str, **values: Any) -> Lever:
        change = Change({f"pool.{pool.name}.{key.replace('__', '.')}": value for key, value in values.items()})
        return Lever(f"{letter}: {what}", f"{resource} of {letter}", design, change)

    if pool.role == "aggregated":
        yield Lever("one more engine", "the number of engines", design.resized(pool.role, 1))
    else:
        yield Lever(f"one more {letter}", f"the number of {letter}", design.resized(pool.role, 1))
    if isinstance(pool.cost, RooflineCost):
        flops = {name: getattr(gpu, name) for name in ("bf16_flops", "fp8_flops", "fp4_flops")}
        faster = {f"gpu__{name}": value * MORE for name, value in flops.items() if value}
        yield lever("compute x 2", "compute", **faster)
        yield lever("memory bandwidth x 2", "memory bandwidth", gpu__hbm_bytes_per_s=gpu.hbm_bytes_per_s * MORE)
    else:
        yield lever("steps in half the time", "step times", step_time_factor=pool.step_time_factor / MORE)
    tokens = kv_tokens_of(scenario.model, pool) // pool.attention_replicas
    yield lever("KV memory x 2", "KV memory", kv_tokens=tokens * MORE)
    if pool.role != "prefill":
        yield lever("max_num_seqs x 2", "admission (max_num_seqs)", max_num_seqs=pool.max_num_seqs * MORE)


def pull_levers(prober: Prober, design: Design, rate: float, requests: int) -> list[LeverResult]:
    """Return what each lever of a design is worth, the best first. `rate`: its highest, from any runs."""
    base = RateSearch(design, requests, rate or prober.traffic.rate, _TOLERANCE, first_step=_STEP)
    search_together(prober, [base])
    at = base.rate or base.first_rate
    scenario = prober.scenario_of(DesignProbe(design, at, requests)).resolved
    levers = list(levers_of(design, scenario))
    if base.rate == 0:
        return _by_scale(prober, base, levers, requests)
    least = base.rate * _WORTH_A_LOOK
    # A rate may meet although a lower one does not, so the design as it is gets the same second chance.
    searches = [
        RateSearch(each.design, requests, least, _TOLERANCE, change=each.change, first_step=_STEP, above=True)
        for each in (Lever("", "", design), *levers)
    ]
    search_together(prober, searches)
    own = max(base.rate, searches[0].rate)
    results = [
        LeverResult(lever, max(search.rate, own), own)
        for lever, search in zip(levers, searches[1:], strict=True)
        if search.error is None
    ]
    at_limit = base.missed or base.met
    assert at_limit is not None
    return ranked(results, full_resources(prober.outcomes[at_limit.probe]))


def full_resources(outcome: ProbeResult) -> frozenset[str]:
    """Return the resources that a run used up, by their names in levers."""
    figures = outcome.figures
    shares = {
        "posting of descriptors": figures.get("posting_busy_share"),
        "network bandwidth": figures.get("busiest_link_share"),
        **{f"KV memory of {letter}": figures.get(f"kv_peak_share_{role}") for role, letter in LETTERS.items()},
    }
    return frozenset(name for name, share in shares.items() if share is not None and share > _FULL)


def ranked(results: Sequence[LeverResult], full: frozenset[str]) -> list[LeverResult]:
    """Return levers by their gain. Of those that help about as much as the best, a resource that was used up is first:
    faster decoding frees memory too, but memory is what was missing."""
    by_gain = sorted(results, key=lambda result: -result.gain)
    if not by_gain:
        return []
    alike = [it for it in by_gain if it.gain > _ALIKE * by_gain[0].gain > 0 and it.lever.resource in full]
    return [*alike, *(it for it in by_gain if it not in alike)]


def _by_scale(prober: Prober, base: RateSearch, levers: Sequence[Lever], requests: int) -> list[LeverResult]:
    """Return what levers are worth where no rate meets the service level: at the lowest rate that was tried."""
    assert base.missed is not None
    low, scale = base.missed
    outcomes = prober.run([attrs.evolve(low, design=lever.design, change=lever.change) for lever in levers])
    results = [
        LeverResult(lever, 0.0, 0.0, outcome.scale / scale)
        for lever, outcome in zip(levers, outcomes, strict=True)
        if outcome.error is None
    ]
    return sorted(results, key=lambda result: -result.gain)
