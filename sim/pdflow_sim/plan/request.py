"""What the options of `pdflow plan` ask for, checked before anything is simulated: every problem at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import attrs

from pdflow.errors import Problem, ScenarioError
from pdflow.results.figures.service_level import ServiceLevel, ServiceLevelError
from pdflow.scenario.presets import find_preset, presets
from pdflow.scenario.reading.convert import did_you_mean
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.overrides import values_of
from pdflow_sim.plan.options import KINDS, OPTIONS
from pdflow_sim.plan.planner import MOST_GPUS, PlanRequest
from pdflow_sim.plan.search import Target
from pdflow_sim.plan.space import TP_SIZES, Space

SHAPE_KEYS: Final = ("tp", "ep", "xpyd")
SEARCH_KEYS: Final = (*SHAPE_KEYS, *OPTIONS)
TARGETS: Final[tuple[Target, ...]] = get_args(Target)


@attrs.frozen(kw_only=True)
class PlanOptions:
    """The options as they are written on the command line."""

    slo: str | None = None
    gpus: int | None = None
    rate: float | None = None
    gpu: Sequence[str] = ()
    search: str | None = None
    values: Sequence[str] = ()
    kind: str | None = None
    target: str | None = None
    seeds: int = 3
    requests: int | None = None
    robust: bool = True


def request_of(scenario: Scenario, options: PlanOptions) -> PlanRequest:
    """Return the request of these options. Raises ScenarioError with every problem."""
    problems: list[Problem] = []
    level = _level(scenario, options.slo, problems)
    types, prices = _gpus(scenario, options.gpu, problems)
    names = _search(options.search, problems)
    values = _values(scenario, options.values, names, problems)
    target = _target(options, prices, types, problems)
    problems += _limits(options, names)
    if problems:
        raise ScenarioError(problems)
    assert level is not None
    tp = tuple(values.get("tp", TP_SIZES)) if "tp" in names else ()
    kinds = tuple(kind for kind in KINDS if options.kind in (None, kind))
    space = Space(types, tp=tp, xpyd="xpyd" in names, ep="ep" in names, kinds=kinds)
    return PlanRequest(
        level=level,
        gpus=options.gpus,
        rate=options.rate,
        gpu_types=types,
        prices=prices,
        target=target,
        space=space,
        options=tuple(name for name in OPTIONS if name in names),
        values={name: tuple(values[name]) for name in values if name in OPTIONS},
        seeds=options.seeds,
        requests=options.requests,
        robust=options.robust,
    )


def level_of(scenario: Scenario, text: str | None) -> ServiceLevel:
    """Return the service level of a text, or else of the scenario's [slo]. Raises ScenarioError."""
    problems: list[Problem] = []
    level = _level(scenario, text, problems)
    if level is None:
        raise ScenarioError(problems)
    return level


def _level(scenario: Scenario, text: str | None, problems: list[Problem]) -> ServiceLevel | None:
    level = _written_level(scenario, text, problems)
    if level is not None and not level.longest_wait_ms:
        message = "bounds neither ttft nor e2e, so requests may wait without a limit; add one, as in ttft=10s@p99"
        problems.append(Problem(f"--slo {level.text}", "", message))
    return level


def _written_level(scenario: Scenario, text: str | None, problems: list[Problem]) -> ServiceLevel | None:
    if text is None:
        level = ServiceLevel.of_table(scenario.resolved.slo)
        if level is None:
            message = "is empty, and there is no --slo; say what must be met, as in --slo ttft=2s@p95,itl=50ms@p99"
            problems.append(Problem(scenario.resolved.path, "slo", message))
        return level
    try:
        return ServiceLevel.parse(text)
    except ServiceLevelError as error:
        problems.append(Problem(f"--slo {text}", "", str(error)))
        return None


def _gpus(
    scenario: Scenario, texts: Sequence[str], problems: list[Problem]
) -> tuple[tuple[str, ...], Mapping[str, float]]:
    own = [pool.gpu.name for pool in scenario.resolved.pools]
    prices: dict[str, float] = {}
    types: dict[str, None] = {}
    for text in texts:
        name, sign, price = text.partition("=")
        preset = find_preset("gpus", name)
        if preset is None and name not in own:
            message = f"no GPU of that name{did_you_mean(name, presets('gpus'))}; `pdflow presets` lists them"
            problems.append(Problem(f"--gpu {text}", "", message))
            continue
        known = name if preset is None else preset.name
        types[known] = None
        if sign:
            try:
                prices[known] = float(price)
            except ValueError:
                prices[known] = 0.0
            if not 0 < prices[known] < 1e6:
                problems.append(Problem(f"--gpu {text}", "", "expected dollars per hour, as in h100-sxm=2.80"))
    return tuple(types) or tuple(dict.fromkeys(own)), prices


def _search(text: str | None, problems: list[Problem]) -> tuple[str, ...]:
    if text is None:
        return SEARCH_KEYS
    names = tuple(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))
    for name in names:
        if name not in SEARCH_KEYS:
            expected = f"expected some of {', '.join(SEARCH_KEYS)}{did_you_mean(name, SEARCH_KEYS)}"
            problems.append(Problem(f"--search {text}", "", f"{name!r} cannot be searched, {expected}"))
    return names


def _values(
    scenario: Scenario, texts: Sequence[str], names: Sequence[str], problems: list[Problem]
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, sign, given = text.partition("=")
        allowed = ("tp", *OPTIONS)
        if not sign or name not in allowed:
            expected = f"expected KEY=VALUE,... with a key of {', '.join(allowed)}{did_you_mean(name, allowed)}"
            problems.append(Problem(f"--values {text}", "", expected))
        elif name not in names:
            problems.append(Problem(f"--values {text}", "", f"{name} is not searched; add it to --search"))
        else:
            found[name] = [None if value == "off" else value for value in values_of(given)]
    for name, values in found.items():
        if name in OPTIONS:
            problems += (Problem(f"--values {name}", "", why) for why in OPTIONS[name].refusals(scenario, values))
    for value in found.get("tp", ()):
        if not isinstance(value, int) or value < 1:
            problems.append(Problem("--values tp", "", f"{value!r} is no number of GPUs"))
    return found


def _target(options: PlanOptions, prices: Mapping[str, float], types: Sequence[str], problems: list[Problem]) -> Target:
    target = next((known for known in TARGETS if known == options.target), None)
    if target is None:
        return "goodput-per-gpu" if options.rate is None else "cost" if len(prices) == len(types) else "min-gpus"
    if target == "min-gpus" and options.rate is None:
        problems.append(Problem("--target min-gpus", "", "needs --rate: without one, no GPUs are the fewest"))
    missing = [name for name in types if name not in prices]
    if target == "cost" and missing:
        example = f"as in --gpu {missing[0]}=2.80"
        problems.append(Problem("--target cost", "", f"needs the price of {', '.join(missing)}, {example}"))
    return target


def _limits(options: PlanOptions, names: Sequence[str]) -> Iterator[Problem]:
    if (options.gpus is None) == (options.rate is None):
        what = "cannot both be given" if options.gpus is not None else "are both missing"
        yield Problem("--gpus and --rate", "", f"{what}; give the GPUs that there are, or the rate to serve")
    if options.gpus is not None and not 1 <= options.gpus <= MOST_GPUS:
        yield Problem(f"--gpus {options.gpus}", "", f"expected 1 to {MOST_GPUS}")
    if options.rate is not None and "xpyd" not in names:
        yield Problem("--rate", "", "needs xpyd in --search: without it the number of engines is fixed")
    if options.rate is not None and not 0 < options.rate < 1e6:
        yield Problem(f"--rate {options.rate:g}", "", "expected a rate above 0")
