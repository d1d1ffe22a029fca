"""The metrics of the router: what clients got. Names, labels and buckets are vLLM's where vLLM has the metric; an error
is there as 0 before it first happens, so that an alert on its rate sees the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdflow.protocol.messages import Code
from pdflow.protocol.values import S
from pdflow_runtime.clock import cpu_ns, now_ns
from pdflow_runtime.observe.metrics import MODEL, Meter
from pdflow_runtime.observe.passing_answers import EndedAnswer, TokenIntervals
from pdflow_runtime.observe.router_figures import FIRST_TOKEN_NS, RouterFigures, first_token_bucket

FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's buckets (vllm/v1/metrics/buckets.py)."""
FINISHED_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
"""vLLM's: an error is a failed request, an abort one whose client has gone (vllm/v1/engine/__init__.py)."""
REASONS: Final = {"cancelled": "abort", "failed": "error"}
"""The finished_reason, by a request's outcome; a completed one's is that of its answer."""
SHED: Final = "shed"
"""The code of a request that the router has shed (429)."""
HTTP_ERRORS: Final = (400, 401, 403, 404, 408, 413, 417, 429, 431, 500, 502, 503, 504)
"""The statuses with which requests are refused that no engine gets."""


class RouterMeter(Meter):
    """The metrics of the router. `passing` returns the tokens of answers that are passed on now."""

    def __init__(self, model: str = "") -> None:
        super().__init__(model)
        registry = self.registry
        self.intervals: Final = TokenIntervals()
        self.passing: Callable[[], int] = lambda: 0
        self._requests: Final = Counter(
            "pdflow_router_requests", "Requests that ended, by outcome and code", ["outcome", "code"], registry=registry
        )
        self._attempts: Final = Counter("pdflow_router_attempts", "Attempts of these requests", registry=registry)
        self._errors: Final = Counter(
            "pdflow_router_errors",
            "Requests that failed, by code; shed: by the limits of [router]; http_STATUS: before an engine was chosen",
            ["code"],
            registry=registry,
        )
        self._first: Final = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token, of answers that are streamed",
            MODEL,
            buckets=FIRST_TOKEN_S,
            registry=registry,
        ).labels(model)
        self._whole: Final = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to its last token",
            MODEL,
            buckets=REQUEST_S,
            registry=registry,
        ).labels(model)
        self._prompt_tokens: Final = Counter(
            "vllm:prompt_tokens", "Prompt tokens of requests whose answers began", MODEL, registry=registry
        ).labels(model)
        success = Counter(
            "vllm:request_success", "Requests that ended, by reason", [*MODEL, "finished_reason"], registry=registry
        )
        self._ended: Final = {reason: success.labels(model, reason) for reason in FINISHED_REASONS}
        self.resumed: Final = Counter(
            "pdflow_router_answers_resumed", "Answers that another attempt has continued", registry=registry
        )
        self.stalled: Final = Counter(
            "pdflow_router_engines_stalled",
            "Times that an engine owed answers and sent nothing for too long",
            registry=registry,
        )
        self.hanging: Final = Counter(
            "pdflow_router_requests_hanging",
            "Attempts that left an engine which served others and passed them over",
            registry=registry,
        )
        self.log_lines_dropped: Final = Counter(
            "pdflow_access_log_dropped", "Lines of the access log that could not be written", registry=registry
        )
        self.open: Final = Gauge("pdflow_router_requests_open", "Open requests", registry=registry)
        self._first_tokens: Final = [0] * (len(FIRST_TOKEN_NS) + 1)
        self._over = self._failed = 0
        self.generated = 0
        """Tokens of the answers that have ended."""
        registry.register(_Tokens(self))
        self._requests.labels("completed", _name(Code.NONE))
        self._requests.labels("cancelled", _name(Code.CANCELLED))
        for code in Code:
            if code is not Code.NONE:
                self._requests.labels("failed", _name(code))
                self._errors.labels(_name(code))
        self._errors.labels(SHED)
        for status in HTTP_ERRORS:
            self._errors.labels(f"http_{status}")

    def first_token(self, begun_ns: int, prompt_tokens: int, streams: bool) -> None:
        """Record that an answer has begun. Of one that is not streamed it is unknown when its first token was there."""
        self._prompt_tokens.inc(prompt_tokens)
        if streams:
            lasted_ns = now_ns() - begun_ns
            self._first.observe(lasted_ns / S)
            self._first_tokens[first_token_bucket(lasted_ns)] += 1

    def over(self, begun_ns: int, outcome: str, code: Code, attempts: int, shed: bool = False) -> None:
        """Record that the router has ended a request. Args: `shed`: by its own rules, before an engine got it."""
        self._requests.labels(outcome, _name(code)).inc()
        self._attempts.inc(attempts)
        self._over += 1
        self._failed += outcome == "failed"
        if outcome == "completed":
            self._whole.observe((now_ns() - begun_ns) / S)
        elif outcome == "failed":
            self._errors.labels(SHED if shed else _name(code)).inc()

    def answered(self, outcome: str, answer: EndedAnswer) -> None:
        """Record that nothing more of this answer is passed on."""
        self.generated += answer.tokens
        reason = REASONS.get(outcome, answer.reason)
        self._ended[reason if reason in self._ended else "stop"].inc()

    @property
    def tokens(self) -> int:
        """Tokens that clients got, also of answers that have not ended."""
        return self.generated + self.passing()

    def figures(self) -> RouterFigures:
        """Return the figures of `pdflow top`."""
        first_tokens = list(self._first_tokens)
        return RouterFigures(now_ns(), cpu_ns(), self._over, self._failed, self.tokens, first_tokens)

    def refused(self, status: int) -> None:
        """Record a request that was answered with an error and that no engine got."""
        self._errors.labels(f"http_{status}").inc()


class _Tokens(Collector):
    """The metrics of tokens, also of answers that have not ended: read when they are collected, so that a token costs
    no more than its count."""

    def __init__(self, meter: RouterMeter) -> None:
        self.meter: Final = meter

    def collect(self) -> Iterator[Metric]:
        meter = self.meter
        tokens = CounterMetricFamily(
            "vllm:generation_tokens", "Generated tokens; of the router: those that clients got", labels=MODEL
        )
        tokens.add_metric([meter.model], meter.tokens)
        yield tokens
        intervals = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a streamed answer", labels=MODEL
        )
        intervals.add_metric([meter.model], meter.intervals.buckets(), meter.intervals.sum_ns / S)
        yield intervals


def _name(code: Code) -> str:
    return code.name.lower()
