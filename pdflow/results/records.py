"""The record of each request: the engines that served it, its outcome, and the end of each stage of its first token.

Every world fills the same columns (simulated and live), and every number, plot and comparison is computed from them.
Plain Python lists, one per field, indexed by the request's position in the workload: a trial of seven layouts found
list columns the cheapest to fill (0.12 us for twelve stamps, against 0.3 for array columns and 0.75 for structs);
numpy sees them once, at the end. The engines' own log is in `pdflow.results.steps`.

What a stage's duration means. Only the end of a stage is stamped. A stage lasts from the latest of all earlier ends
(and the arrival) to its own end, and never less than zero. So the stages of one request never overlap and add up to
its TTFT to the nanosecond, and a stage that another one hides (D's admission during prefill, under concurrent
dispatch) counts 0: it cost the client nothing. A retry stamps again, so that what a lost attempt took is counted in
the first stage that the next attempt passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pdflow.results.steps import Steps

__all__ = ["STAGES", "Outcome", "Records", "Steps", "stage_durations_ns", "stages_seen"]

STAGES = (
    "route",
    "p_queue",
    "prefill",
    "handoff",
    "d_admit",
    "handshake",
    "xfer_post",
    "xfer_wire",
    "notify",
    "first_decode",
)
"""In the order of a sequential dispatch, which is the order that decides which ends count as earlier."""

(ROUTE, P_QUEUE, PREFILL, HANDOFF, D_ADMIT, HANDSHAKE, XFER_POST, XFER_WIRE, NOTIFY, FIRST_DECODE) = range(len(STAGES))

NEVER = -1
"""The stamp of what has not happened."""

Outcome: TypeAlias = Literal["completed", "failed", "cancelled"]

TokenSteps: TypeAlias = tuple[int, ...]
"""In which steps of its decode engine, counted from 0, a request got its tokens: (first, last), one in each step from
the one to the other; then, for each preemption, the first and the last one after it."""


class EngineTokens(NamedTuple):
    """The tokens of an answer that one engine generated."""

    engine: str
    steps: TokenSteps
    """Those of its steps that its log has."""
    ends_ns: tuple[int, ...]
    """The ends of its last steps, which the log does not have."""

    def __len__(self) -> int:
        return sum(self.steps[1::2]) - sum(self.steps[::2]) + len(self.steps) // 2 + len(self.ends_ns)

    def limited_to(self, most: int) -> EngineTokens:
        """Return the first `most` of these tokens."""
        steps: TokenSteps = ()
        for first, last in zip(self.steps[::2], self.steps[1::2], strict=True):
            if most > 0:
                steps += (first, min(last, first + most - 1))
                most -= last - first + 1
        return EngineTokens(self.engine, steps, self.ends_ns[: max(0, most)])


IntColumn: TypeAlias = npt.NDArray[np.int64]
T = TypeVar("T")


class Records:
    """The records of a run's requests, as columns. Times are instants in ns on the run's clock; `NEVER` where something
    was not reached.

    Give the number of requests when it is known (columns are then pre-sized and written by index), or append with
    `add`. `ends[STAGE][request] = now` stamps a stage; `first_decode` and `first_token_ns` are both the instant at
    which the client has the first token.
    """

    __slots__ = (
        "arrival_ns",
        "attempts",
        "classes",
        "decode_engine",
        "earlier",
        "ends",
        "first_token_ns",
        "input_tokens",
        "itl_max_ns",
        "itl_ns",
        "last_token_ns",
        "outcome",
        "output_tokens",
        "prefill_engine",
        "reason",
        "sessions",
        "stalled_ns",
        "token_steps",
        "wrong_kv",
    )

    def __init__(self, requests: int = 0) -> None:
        self.arrival_ns: list[int] = [NEVER] * requests
        self.input_tokens: list[int] = [0] * requests
        self.output_tokens: list[int] = [0] * requests
        self.prefill_engine: list[str | None] = [None] * requests
        self.decode_engine: list[str | None] = [None] * requests
        self.attempts: list[int] = [0] * requests
        self.outcome: list[Outcome | None] = [None] * requests
        self.reason: list[str | None] = [None] * requests
        self.first_token_ns: list[int] = [NEVER] * requests
        self.last_token_ns: list[int] = [NEVER] * requests
        self.token_steps: list[TokenSteps | None] = [None] * requests
        self.earlier: dict[int, list[EngineTokens]] = {}
        """Of each answer that was resumed, the tokens generated before, by each engine. `token_steps` has the rest."""
        self.itl_ns: list[int] = []
        """The percentile of each request's inter-token latencies that its SLO bounds, and below their maximum, and the
        sum of those beyond the bound (`figures/itls.py`). Empty unless an SLO bounds them, and `NEVER` for a request
        that was not completed."""
        self.itl_max_ns: list[int] = []
        self.stalled_ns: list[int] = []
        self.classes: list[str] = []
        """The classes of the requests up to the last that has one; empty for a workload without classes."""
        self.sessions: list[tuple[int, int]] = []
        """The session of each request, and its turn in that, counted from 1; empty for a workload without sessions."""
        self.wrong_kv: set[int] | None = None
        """Requests whose answer was decoded with KV that is not all their prompt's; None where that cannot happen."""
        self.ends: tuple[list[int], ...] = tuple([NEVER] * requests for _ in STAGES)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each request as a dict, made when it is accessed."""
        return map(self.record, range(len(self)))

    def add(self, arrival_ns: int, input_tokens: int, output_tokens: int) -> int:
        """Append one request and return its index."""
        self.arrival_ns.append(arrival_ns)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.prefill_engine.append(None)
        self.decode_engine.append(None)
        self.attempts.append(0)
        self.outcome.append(None)
        self.reason.append(None)
        self.first_token_ns.append(NEVER)
        self.last_token_ns.append(NEVER)
        self.token_steps.append(None)
        for column in self.ends:
            column.append(NEVER)
        return len(self.arrival_ns) - 1

    def arriving_from(self, instant_ns: int) -> Records:
        """Return the requests that arrived at this instant or later; the records themselves, no copy, if it is 0."""
        if instant_ns <= 0:
            return self
        return self.only([request for request, arrival in enumerate(self.arrival_ns) if arrival >= instant_ns])

    def only(self, chosen: list[int]) -> Records:
        """Return the records of these requests, in this order."""
        found = Records()
        found.arrival_ns = _of(self.arrival_ns, chosen)
        found.input_tokens = _of(self.input_tokens, chosen)
        found.output_tokens = _of(self.output_tokens, chosen)
        found.prefill_engine = _of(self.prefill_engine, chosen)
        found.decode_engine = _of(self.decode_engine, chosen)
        found.attempts = _of(self.attempts, chosen)
        found.outcome = _of(self.outcome, chosen)
        found.reason = _of(self.reason, chosen)
        found.first_token_ns = _of(self.first_token_ns, chosen)
        found.last_token_ns = _of(self.last_token_ns, chosen)
        found.token_steps = _of(self.token_steps, chosen)
        if self.earlier:
            found.earlier = {n: self.earlier[request] for n, request in enumerate(chosen) if request in self.earlier}
        if self.itl_ns:
            found.itl_ns = _of(self.itl_ns, chosen)
            found.itl_max_ns = _of(self.itl_max_ns, chosen)
            found.stalled_ns = _of(self.stalled_ns, chosen)
        found.classes = [self.class_of(request) for request in chosen] if self.classes else []
        found.sessions = _of(self.sessions, chosen) if self.sessions else []
        if self.wrong_kv is not None:
            found.wrong_kv = {number for number, request in enumerate(chosen) if request in self.wrong_kv}
        found.ends = tuple([_of(column, chosen) for column in self.ends])
        return found

    def classify(self, request: int, name: str) -> None:
        """Set the class of a request."""
        self.classes.extend([""] * (request + 1 - len(self.classes)))
        self.classes[request] = name

    def class_of(self, request: int) -> str:
        """Return the class of a request, "" if it has none."""
        return self.classes[request] if request < len(self.classes) else ""

    def latencies_ms(self, request: int) -> tuple[float, float | None] | None:
        """Return TTFT and TPOT of a completed request, no TPOT of a single token; None if it was not completed."""
        if self.outcome[request] != "completed":
            return None
        first, gaps = self.first_token_ns[request], self.output_tokens[request] - 1
        tpot_ms = (self.last_token_ns[request] - first) / gaps / 1e6 if gaps else None
        return (first - self.arrival_ns[request]) / 1e6, tpot_ms

    def record(self, request: int) -> dict[str, Any]:
        """Return one request as a dict for requests.jsonl, its keys in a fixed order. None where nothing happened."""
        first_ns, last_ns = self.first_token_ns[request], self.last_token_ns[request]
        return {
            "request": request,
            **({"class": self.class_of(request)} if self.classes else {}),
            **(dict(zip(("session", "turn"), self.sessions[request], strict=True)) if self.sessions else {}),
            "outcome": self.outcome[request],
            "reason": self.reason[request],
            **({} if self.wrong_kv is None else {"wrong_kv": request in self.wrong_kv}),
            "attempts": self.attempts[request],
            "prefill_engine": self.prefill_engine[request],
            "decode_engine": self.decode_engine[request],
            "input_tokens": self.input_tokens[request],
            "output_tokens": self.output_tokens[request],
            "arrival_ns": self.arrival_ns[request],
            "first_token_ns": None if first_ns < 0 else first_ns,
            "last_token_ns": None if last_ns < 0 else last_ns,
            **(self._inter_token(request) if self.itl_ns else {}),
            "ends_ns": {
                stage: None if column[request] < 0 else column[request]
                for stage, column in zip(STAGES, self.ends, strict=True)
            },
        }

    def _inter_token(self, request: int) -> dict[str, int | None]:
        columns = {"itl_ns": self.itl_ns, "itl_max_ns": self.itl_max_ns, "stalled_ns": self.stalled_ns}
        return {name: None if column[request] < 0 else column[request] for name, column in columns.items()}


def stages_seen(records: Records) -> tuple[str, ...]:
    """Return all stages, or none if no stage was stamped: a client sees only their sum."""
    completed = [request for request, outcome in enumerate(records.outcome) if outcome == "completed"]
    stamped = not completed or any(column[completed[0]] != NEVER for column in records.ends)
    return STAGES if stamped else ()


def _of(column: list[T], chosen: list[int]) -> list[T]:
    return [column[request] for request in chosen]


def stage_durations_ns(records: Records) -> IntColumn:
    """Return the stages' durations in ns, shape [len(STAGES), requests], int64, by the module's rule."""
    durations: IntColumn = np.diff(stage_marks_ns(records), axis=0)
    return durations


def stage_marks_ns(records: Records) -> IntColumn:
    """Return the instants in ns between which the stages last, shape [len(STAGES) + 1, requests], int64: the arrival,
    then the end of each stage, or that of the one before if it is not earlier.

    Where a first token was delivered, ends after it are cut back to it (with `first_token = "prefill"` the transfer
    happens after TTFT), so the column of such a request sums to its TTFT exactly as soon as one end reaches it.
    """
    arrival = np.array(records.arrival_ns, dtype=np.int64)
    first = np.array(records.first_token_ns, dtype=np.int64)
    limit = np.where(first >= 0, first, np.iinfo(np.int64).max)
    marks = np.empty((len(STAGES) + 1, len(arrival)), dtype=np.int64)
    marks[0] = arrival
    for row, column in enumerate(records.ends, start=1):
        np.minimum(np.array(column, dtype=np.int64), limit, out=marks[row])
    np.maximum.accumulate(marks, axis=0, out=marks)
    return marks
