"""The schema of [workload]: arrival processes, traces, sessions, clients, as attrs classes with one field per key.

The distributions of drawn quantities are in `distributions.py`. The other tables, and how to read these classes,
are in `scenario.py`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
from attrs import field

from pdflow.scenario.schema.distributions import Length, Time, Turns
from pdflow.scenario.schema.fields import (
    AT_LEAST_ONE,
    DELAY,
    FRACTION,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SCALE,
    SHAPE,
    SPAN,
    TIMER,
    field_doc,
)


@attrs.frozen(kw_only=True)
class PoissonArrival:
    """Poisson arrivals: independent, with exponential gaps."""

    rate_rps: float = field(metadata=field_doc("mean requests per second", POSITIVE))


@attrs.frozen(kw_only=True)
class GammaArrival:
    """Gamma-distributed gaps, as `vllm bench serve --burstiness` draws them."""

    rate_rps: float = field(metadata=field_doc("mean requests per second", POSITIVE))
    burstiness: float = field(
        metadata=field_doc("shape of the gap distribution: 1 is Poisson, below 1 burstier, above 1 more regular", SHAPE)
    )


@attrs.frozen(kw_only=True)
class ConstantArrival:
    """One arrival every 1/rate_rps seconds, without variation."""

    rate_rps: float = field(metadata=field_doc("requests per second", POSITIVE))


@attrs.frozen(kw_only=True)
class RampArrival:
    """Poisson arrivals at a rate that changes linearly from one value to another and then stays constant."""

    from_rps: float = field(metadata=field_doc("requests per second at the start", NOT_NEGATIVE))
    to_rps: float = field(metadata=field_doc("requests per second after over_s", POSITIVE))
    over_s: float = field(metadata=field_doc("duration of the change", DELAY))

    @property
    def rate_rps(self) -> float:
        """The rate in the long run: `to_rps`."""
        return self.to_rps


@attrs.frozen(kw_only=True)
class DiurnalArrival:
    """Poisson arrivals at a rate that oscillates: rate_rps * (1 + swing * sin(2 pi t / period_s))."""

    rate_rps: float = field(metadata=field_doc("mean requests per second", POSITIVE))
    swing: float = field(default=0.5, metadata=field_doc("amplitude, as a share of the mean rate", FRACTION))
    period_s: float = field(default=86400.0, metadata=field_doc("time from one peak to the next", SPAN))


@attrs.frozen(kw_only=True)
class ClosedArrival:
    """A fixed number of clients; each sends its next request when its previous one has ended."""

    concurrency: int = field(
        metadata=field_doc("number of clients, and of requests in the system at any time", AT_LEAST_ONE)
    )

    @property
    def rate_rps(self) -> None:
        """None: a closed loop has no rate of its own."""
        return


Arrival: TypeAlias = PoissonArrival | GammaArrival | ConstantArrival | RampArrival | DiurnalArrival | ClosedArrival


@attrs.frozen(kw_only=True)
class Columns:
    """The names of a CSV trace's columns; at most one of the four for arrival times."""

    arrival_s: str | None = field(default=None, metadata=field_doc("column of arrival times in seconds", NOT_EMPTY))
    arrival_ms: str | None = field(
        default=None, metadata=field_doc("column of arrival times in milliseconds", NOT_EMPTY)
    )
    arrival_ns: str | None = field(
        default=None, metadata=field_doc("column of arrival times in nanoseconds", NOT_EMPTY)
    )
    arrival_stamp: str | None = field(
        default=None,
        metadata=field_doc("column of arrival dates and times, such as 2023-11-16 18:17:03.9799600", NOT_EMPTY),
    )
    input_tokens: str | None = field(default=None, metadata=field_doc("column of prompt lengths in tokens", NOT_EMPTY))
    output_tokens: str | None = field(default=None, metadata=field_doc("column of output lengths in tokens", NOT_EMPTY))
    class_: str | None = field(
        default=None,
        metadata=field_doc("column of class names, to which [slo.class] can refer", NOT_EMPTY, key="class"),
    )

    def __attrs_post_init__(self) -> None:
        if len(self.arrival) > 1:
            raise ValueError(f"{' and '.join(self.arrival)} all give arrival times; keep one of them")

    @property
    def arrival(self) -> dict[str, str]:
        """The column of arrival times, under the key that gives its unit; empty if there is none."""
        keys = ("arrival_s", "arrival_ms", "arrival_ns", "arrival_stamp")
        return {key: name for key in keys if (name := getattr(self, key)) is not None}


TraceFormat: TypeAlias = Literal[
    "mooncake",
    "azure",
    "burstgpt",
    "vidur",
    "llmservingsim",
    "splitwise",
    "csv",
    "sharegpt",
    "vllm-custom",
    "servegen",
]


@attrs.frozen(kw_only=True)
class Trace:
    """A recorded workload: arrival times, lengths and, where it has them, prefix hashes and classes."""

    path: str = field(metadata=field_doc("the trace file, relative to the scenario file", NOT_EMPTY))
    format: TraceFormat = field(metadata=field_doc("format of the file; docs/traces.md describes each"))
    columns: Columns = field(factory=Columns, metadata=field_doc("CSV traces: names of the columns"))
    dataset: str | None = field(
        default=None,
        metadata=field_doc("servegen: the file with the client's lengths; default: the dataset file next to the trace"),
    )
    characters_per_token: float = field(
        default=4.0,
        metadata=field_doc("traces of texts without token counts: characters per token, to estimate lengths", POSITIVE),
    )
    start_s: float | None = field(
        default=None,
        metadata=field_doc("skip requests that arrive earlier; time 0 of the run is this instant", NOT_NEGATIVE),
    )
    end_s: float | None = field(
        default=None, metadata=field_doc("skip requests that arrive at or after this time", NOT_NEGATIVE)
    )
    skip: int = field(default=0, metadata=field_doc("number of requests to skip at the start", NOT_NEGATIVE))
    time_scale: float = field(default=1.0, metadata=field_doc("factor on arrival times: 0.5 doubles the rate", SCALE))

    def __attrs_post_init__(self) -> None:
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise ValueError(f"end_s is {self.end_s:g}, expected more than start_s, which is {self.start_s or 0:g}")


MODELS = ("mooncake-conversation", "azure-code", "azure-conv")
"""Bundled models of published traces."""


FIRST_TURN, LATER_TURNS = "turn 1", "turn 2+"
"""Classes of the requests of sessions: later turns find some of their prompt computed."""


@attrs.frozen(kw_only=True)
class Sessions:
    """[workload.sessions]: `arrival` says when sessions begin; each is several requests, one after the other.

    A turn's prompt is the whole conversation so far (system prompt, earlier prompts and their answers) and new tokens.
    """

    turns: Turns = field(metadata=field_doc("number of requests in a session: a number or a distribution"))
    think_s: Time = field(
        metadata=field_doc("time from the end of an answer to the next turn: a number or a distribution")
    )
    new_tokens: Length = field(
        metadata=field_doc(
            "tokens that each later turn adds to the conversation; the first turn adds workload.input_tokens"
        )
    )
    system_prompt_tokens: int = field(
        default=0,
        metadata=field_doc(
            "length of the system prompt that all sessions share, before workload.input_tokens", NOT_NEGATIVE
        ),
    )
    max_context_tokens: int | None = field(
        default=None,
        metadata=field_doc(
            "a session ends before a turn whose prompt and answer together would exceed this", AT_LEAST_ONE
        ),
    )


@attrs.frozen(kw_only=True)
class Client:
    """[workload.client]: how long clients wait. A client that stops waiting hangs up, and its request is cancelled."""

    timeout_s: float | None = field(
        default=None, metadata=field_doc("the client cancels if the answer is not complete after this time", TIMER)
    )
    first_token_timeout_s: float | None = field(
        default=None, metadata=field_doc("the client cancels if no token has arrived after this time", TIMER)
    )
    cancel_probability: float | None = field(
        default=None,
        metadata=field_doc("share of clients that cancel without a timeout, for example by closing a tab", FRACTION),
    )
    cancel_after_s: Time | None = field(
        default=None,
        metadata=field_doc("time after which these clients cancel an unfinished request: a number or a distribution"),
    )

    def __attrs_post_init__(self) -> None:
        if (self.cancel_probability is None) != (self.cancel_after_s is None):
            raise ValueError("cancel_probability and cancel_after_s need each other; set both or neither")
        first, whole = self.first_token_timeout_s, self.timeout_s
        if first is not None and whole is not None and first >= whole:
            raise ValueError(f"first_token_timeout_s is {first:g}, expected less than timeout_s, which is {whole:g}")


@attrs.frozen(kw_only=True)
class Workload:
    """[workload]: the source of requests: an `arrival` process, a `trace`, both, or `like` a model."""

    requests: int | None = field(
        default=None,
        metadata=field_doc("number of requests; with trace: the first ones, default: all", AT_LEAST_ONE),
    )
    arrival: Arrival | None = field(
        default=None,
        metadata=field_doc(
            "synthetic arrival process; needs input_tokens and output_tokens, or a trace for the lengths"
        ),
    )
    input_tokens: Length | None = field(
        default=None, metadata=field_doc("prompt length in tokens: a number or a distribution")
    )
    output_tokens: Length | None = field(
        default=None, metadata=field_doc("output length in tokens: a number or a distribution")
    )
    trace: Trace | None = field(default=None, metadata=field_doc("a recorded trace to replay"))
    like: str | None = field(
        default=None,
        metadata=field_doc(
            f"model of a trace to draw requests from: {', '.join(MODELS)}, or the path of a file that `pdflow trace "
            "model` wrote",
            NOT_EMPTY,
        ),
    )
    rate_rps: float | None = field(default=None, metadata=field_doc("with like: mean requests per second", POSITIVE))
    rate_scale: float | None = field(
        default=None, metadata=field_doc("with like: mean rate as a multiple of the model's", SCALE)
    )
    input_factor: float = field(
        default=1.0,
        metadata=field_doc(
            "factor on the length of each prompt, for what-if questions; prefixes that requests share keep theirs",
            SCALE,
        ),
    )
    output_factor: float = field(
        default=1.0, metadata=field_doc("factor on the number of output tokens of each request", SCALE)
    )
    sessions: Sessions | None = field(
        default=None,
        metadata=field_doc("with arrival: requests are the turns of sessions, and arrival says when sessions begin"),
    )
    client: Client | None = field(default=None, metadata=field_doc("when clients cancel; default: never"))
    warmup_s: float = field(
        default=0.0, metadata=field_doc("requests that arrive earlier are served but not counted in any figure", DELAY)
    )
