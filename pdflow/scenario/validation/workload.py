"""The rules between the keys of [workload], and between the longest request and the engines.

As in `validate.py`, a rule looks only at what is sound by itself. Whether a trace's file is what it should be is found
out by reading it (`load.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from pdflow.cost.capacity import extra_blocks
from pdflow.cost.specs import ModelSpec
from pdflow.scenario.reading.convert import Complaint
from pdflow.scenario.reading.document import ScenarioTables
from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.schema.distributions import Length
from pdflow.scenario.schema.scenario import Pool
from pdflow.scenario.schema.workload import Columns, RampArrival, Sessions, Workload
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow.workload.traces.csv_rows import CSV_FORMATS
from pdflow.workload.traces.traces import OF_TEXTS

LONGEST_SPAN_S = 1e9
"""30 years, a ninth of what instants can count."""


def check_workload(tables: ScenarioTables) -> Iterator[Complaint]:
    """Yield everything that is wrong within [workload], of keys that are sound by themselves."""
    if tables.workload_keys is not None:
        yield from _sources(tables.workload_keys)
    if tables.workload is not None:
        yield from _span(tables.workload)
        yield from _trace(tables.workload)
        yield from _first_turn(tables.workload)


def _sources(keys: frozenset[str]) -> Iterator[Complaint]:
    """Check which keys of [workload] need or forbid which others, whatever their values."""
    sources = [key for key in ("arrival", "trace", "like") if key in keys]
    if not sources:
        yield Complaint(("workload",), "has no source of requests, expected one of arrival, trace, like")
        return
    source = "trace" if sources[:2] == ["arrival", "trace"] else sources[0]  # a trace may get its instants elsewhere
    for extra in sources:
        if extra != source and (source, extra) != ("trace", "arrival"):
            yield Complaint(
                ("workload", extra), f"cannot be combined with {source}, expected one of arrival, trace, like"
            )
    needed = {"arrival": ("requests", "input_tokens", "output_tokens"), "trace": (), "like": ("requests",)}[source]
    for key in needed:
        if key not in keys:
            yield Complaint(("workload",), f"{key} is missing: {source} needs it")
    if source != "arrival":
        for key in ("input_tokens", "output_tokens"):
            if key in keys:
                yield Complaint(
                    ("workload", key), f"cannot be combined with {source}, which has its own lengths; remove it"
                )
    if source != "like":
        hint = "trace.time_scale" if source == "trace" else "arrival.rate_rps"
        for key in ("rate_rps", "rate_scale"):
            if key in keys:
                yield Complaint(("workload", key), f"needs like, which is not set (did you mean {hint}?)")
    if source != "arrival" and "sessions" in keys:
        yield Complaint(("workload", "sessions"), f"cannot be combined with {source}; it needs an arrival process")
    if "sessions" in keys:
        for key in ("input_factor", "output_factor"):
            if key in keys:
                yield Complaint(("workload", key), "cannot be combined with sessions; change their lengths")
    if source == "like" and {"rate_rps", "rate_scale"} <= keys:
        yield Complaint(("workload", "rate_scale"), "cannot be combined with rate_rps; remove one of the two")


def _trace(workload: Workload) -> Iterator[Complaint]:
    """Check that a trace's keys have a meaning for its format, and beside an arrival process."""
    trace = workload.trace
    if trace is None:
        return
    at: KeyPath = ("workload", "trace")
    if trace.columns != Columns() and trace.format not in CSV_FORMATS:
        yield Complaint((*at, "columns"), f"has no effect with format {trace.format}, which is not CSV; remove it")
    if trace.format == "csv" and None in (trace.columns.input_tokens, trace.columns.output_tokens):
        yield Complaint((*at, "columns"), "is incomplete, expected at least input_tokens and output_tokens")
    if trace.characters_per_token != 4.0 and trace.format not in OF_TEXTS:
        yield Complaint(
            (*at, "characters_per_token"),
            f"has no effect with format {trace.format}, which has token counts; remove it",
        )
    if trace.dataset is not None and trace.format != "servegen":
        yield Complaint(
            (*at, "dataset"), f"has no effect with format {trace.format}, which has its own lengths; remove it"
        )
    if workload.arrival is not None:
        for key, plain in (("start_s", None), ("end_s", None), ("time_scale", 1.0)):
            if getattr(trace, key) != plain:
                what = "cannot be combined with arrival, which sets the times; use skip and requests to select requests"
                yield Complaint((*at, key), what)


def _span(workload: Workload) -> Iterator[Complaint]:
    """Check how long the arrivals take: instants are nanoseconds in 64 bits, so a rate must not be all but 0."""
    key: KeyPath = ("workload", "rate_rps")
    rate = workload.rate_rps
    arrival = workload.arrival
    if arrival is not None and arrival.rate_rps is not None:
        key = ("workload", "arrival", "to_rps" if isinstance(arrival, RampArrival) else "rate_rps")
        rate = arrival.rate_rps
    requests = workload.requests or 0
    if rate is not None and requests > rate * LONGEST_SPAN_S:
        yield Complaint(
            key,
            f"is {rate:g}, expected at least {requests / LONGEST_SPAN_S:g}: {requests} requests in 30 years",
        )


def _first_turn(workload: Workload) -> Iterator[Complaint]:
    """Check that max_context_tokens leaves every session its first turn."""
    sessions, first, answer = workload.sessions, workload.input_tokens, workload.output_tokens
    if sessions is None or sessions.max_context_tokens is None or first is None or answer is None:
        return
    longest = sessions.system_prompt_tokens + first.high + answer.high
    if longest > sessions.max_context_tokens:
        what = f"is {sessions.max_context_tokens}, expected at least {longest}: the longest first turn with its answer"
        yield Complaint(("workload", "sessions", "max_context_tokens"), what)


def check_longest_request(model: ModelSpec, workload: Workload, pools: list[Pool]) -> Iterator[Complaint]:
    """Check that every request fits an engine by itself, or it would wait for ever."""
    if workload.input_tokens is None or workload.output_tokens is None:
        return
    prompt, whole = _longest(workload.sessions, workload.input_tokens, workload.output_tokens)
    for pool in pools:
        capacity = kv_tokens_of(model, pool) // pool.attention_replicas
        key, need, what = (
            ("input_tokens", prompt, "a prompt") if pool.role == "prefill" else ("output_tokens", whole, "a request")
        )
        extra = extra_blocks(model, pool.block_size, pool.tp)
        if extra is not None:
            need += extra.of(-(-need // pool.block_size)) * pool.block_size
        if need > capacity:
            message = f"{what} of up to {need} tokens does not fit an engine of pool {pool.name} ({capacity} tokens)"
            at: KeyPath = ("workload", key)
            how = "shorten it"
            if workload.sessions is not None:
                at, how = ("workload", "sessions", "max_context_tokens"), "limit it here"
            yield Complaint(at, f"{message}; {how}, or raise kv_tokens, tp or the GPU's memory")


def _longest(sessions: Sessions | None, first: Length, answer: Length) -> tuple[int, int]:
    """Return the most tokens of a prompt, and of a prompt with its answer."""
    if sessions is None:
        return first.high, first.high + answer.high
    later = sessions.turns.high - 1
    prompt = sessions.system_prompt_tokens + first.high + later * (answer.high + sessions.new_tokens.high)
    whole = prompt + answer.high
    if sessions.max_context_tokens is not None and whole > sessions.max_context_tokens:
        whole = sessions.max_context_tokens
        prompt = min(prompt, whole - answer.low)
    return prompt, whole
