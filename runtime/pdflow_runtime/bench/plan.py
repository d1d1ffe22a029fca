"""The plan of a benchmark, made from options: a [workload] as in scenario files, drawn by the functions of `simulate`.

The same seed gives the same requests: the same lengths, at the same instants. vLLM's own generator draws others from
the same distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Final, get_args

import attrs

from pdflow.results.files.bench_json import content_sha256
from pdflow.scenario.reading.content import content_of
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.distributions import FixedLength, Length, UniformLength
from pdflow.scenario.schema.scenario import Slo
from pdflow.scenario.schema.workload import (
    Arrival,
    ClosedArrival,
    ConstantArrival,
    GammaArrival,
    PoissonArrival,
    Trace,
    TraceFormat,
    Workload,
)
from pdflow.scenario.summary import trace_note
from pdflow.workload.build import burstiness_of, rate_of, requests
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, SESSION_BLOCK_TOKENS, Request
from pdflow.workload.traces.command import TraceOptions
from pdflow.workload.traces.readers import check_trace, has_arrival_times, read_texts
from pdflow.workload.traces.traces import OF_TEXTS
from pdflow_runtime.bench.asked import AskedError, BenchOptions

PROMPTS: Final = 1_000
"""--num-prompts, where nothing says how many."""
HERE: Final = Path()
RANDOM, TRACE, CUSTOM = "random", "trace", "custom"
DATASETS: Final = (RANDOM, "sharegpt", CUSTOM, TRACE, *(form for form in get_args(TraceFormat) if form != "sharegpt"))
"""What --dataset-name may be: `trace` is a file whose format its beginning says, `custom` is vllm-custom."""


@attrs.frozen(kw_only=True)
class BenchPlan:
    """The workload to send, and what the results quote of it. Paths in `workload` start at `base_dir`."""

    name: str
    sha256: str
    seed: int
    workload: Workload
    base_dir: Path
    slo: Slo | None
    max_concurrency: int | None
    ignore_eos: bool
    return_token_ids: bool

    @property
    def block_tokens(self) -> int:
        """The number of tokens that one name of a request's prefix stands for."""
        return PREFIX_BLOCK_TOKENS if self.workload.sessions is None else SESSION_BLOCK_TOKENS

    @property
    def rate_rps(self) -> float | None:
        """The workload's request rate, if it has one."""
        return rate_of(self.workload, self.base_dir)

    @property
    def burstiness(self) -> float | None:
        """The burstiness of the arrivals, as vLLM defines it."""
        return burstiness_of(self.workload.arrival)

    @property
    def note(self) -> str:
        """The ways in which the requests differ from what was recorded."""
        trace = self.workload.trace
        content = "lengths of the file, generated prompts" if self._texts is None else "texts of the file"
        return content if trace is None else "; ".join(filter(None, (trace_note(trace), content)))

    @property
    def _texts(self) -> Trace | None:
        """The trace, if it holds texts."""
        trace = self.workload.trace
        return trace if trace is not None and trace.format in OF_TEXTS else None

    def texts(self) -> Iterator[str | None]:
        """Yield the text of each request in turn, None where it is to be made up."""
        trace = self._texts
        return repeat(None) if trace is None else islice(read_texts(trace, self.base_dir), trace.skip, None)

    def requests(self) -> Iterator[Request]:
        """Yield the requests of a workload without sessions. Raises TraceError, when the last has been drawn, if lines
        are bad."""
        return requests(self.workload, self.seed, self.base_dir)


def plan_of(asked: BenchOptions) -> BenchPlan:
    """Return the plan for these options. Raises ScenarioError, TraceError or AskedError."""
    return _of_flags(asked) if asked.scenario is None else _of_scenario(asked, asked.scenario)


def _of_scenario(asked: BenchOptions, file: str) -> BenchPlan:
    for option in ("dataset_name", "dataset_path", "request_rate"):
        if getattr(asked, option) is not None:
            raise AskedError(f"--{option.replace('_', '-')}: not with --scenario, which sets it; use --set KEY=VALUE")
    scenario = load(file, overrides=asked.overrides, seed=asked.seed)
    workload = scenario.workload
    if asked.num_prompts is not None:
        workload = attrs.evolve(workload, requests=asked.num_prompts)
    users = workload.arrival.concurrency if isinstance(workload.arrival, ClosedArrival) else None
    return BenchPlan(
        name=asked.label or scenario.name,
        sha256=content_sha256(content_of(attrs.evolve(scenario, workload=workload))),
        seed=scenario.seed,
        workload=workload,
        base_dir=scenario.base_dir,
        slo=asked.slo or scenario.slo,
        max_concurrency=asked.max_concurrency or users,
        ignore_eos=asked.ignore_eos is not False,
        return_token_ids=(workload.sessions is not None) if asked.return_token_ids is None else asked.return_token_ids,
    )


def _of_flags(asked: BenchOptions) -> BenchPlan:
    if asked.overrides:
        raise AskedError("--set replaces values of a scenario: add --scenario FILE")
    workload = _random(asked) if asked.dataset_name in (None, RANDOM) else _recorded(asked)
    seed = asked.seed or 0
    return BenchPlan(
        name=asked.label or asked.dataset_name or RANDOM,
        sha256=content_sha256({"workload": attrs.asdict(workload), "seed": seed}),
        seed=seed,
        workload=workload,
        base_dir=HERE,
        slo=asked.slo,
        max_concurrency=asked.max_concurrency,
        ignore_eos=bool(asked.ignore_eos),
        return_token_ids=bool(asked.return_token_ids),
    )


def _random(asked: BenchOptions) -> Workload:
    if asked.dataset_path is not None:
        raise AskedError("--dataset-path: add --dataset-name; `trace` detects the format of the file")
    count = asked.num_prompts or PROMPTS
    return Workload(
        requests=count,
        arrival=_arrival(asked, count),
        input_tokens=_length(asked.random_input_len, asked.random_range_ratio),
        output_tokens=_length(asked.random_output_len, asked.random_range_ratio),
    )


def _recorded(asked: BenchOptions) -> Workload:
    """Return the workload of a trace file, which is read to its end first: at its own instants, unless it has none or a
    rate is asked for."""
    if asked.dataset_name not in DATASETS:
        raise AskedError(f"--dataset-name {asked.dataset_name}: expected one of {', '.join(DATASETS)}")
    if asked.dataset_path is None:
        raise AskedError(f"--dataset-name {asked.dataset_name} needs --dataset-path FILE: nothing is downloaded")
    form: Any = {TRACE: None, CUSTOM: "vllm-custom"}.get(str(asked.dataset_name), asked.dataset_name)
    trace = TraceOptions(path=asked.dataset_path, form=form, columns=asked.columns).trace()
    own = asked.request_rate is None and has_arrival_times(trace, HERE)
    check_trace(trace, HERE, own)
    count = asked.num_prompts if own else asked.num_prompts or PROMPTS
    return Workload(requests=count, trace=trace, arrival=None if own else _arrival(asked, count or PROMPTS))


def _arrival(asked: BenchOptions, count: int) -> Arrival:
    rate = math.inf if asked.request_rate is None else asked.request_rate
    if math.isinf(rate):
        return ClosedArrival(concurrency=count)  # all of them at 0
    if math.isinf(asked.burstiness):
        return ConstantArrival(rate_rps=rate)
    if asked.burstiness == 1.0:
        return PoissonArrival(rate_rps=rate)
    return GammaArrival(rate_rps=rate, burstiness=asked.burstiness)


def _length(tokens: int, ratio: float) -> Length:
    """Return the distribution of vLLM's random dataset: from (1 - ratio) to (1 + ratio) times `tokens`, whole tokens,
    at least one."""
    low, high = max(1, math.floor(tokens * (1 - ratio))), math.ceil(tokens * (1 + ratio))
    return FixedLength(tokens=tokens) if low >= high else UniformLength(low=low, high=high)
