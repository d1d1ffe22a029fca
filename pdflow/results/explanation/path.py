"""The critical path of one request's TTFT: its stages, their durations, and what each of them waited for.

The stages of a request never overlap and add up to its TTFT (`records.py`), so they are the critical path. A request
without a first token is explained as far as it came.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import attrs

from pdflow.results.explanation.others import BlockSupply, OtherRequests, StageWait
from pdflow.results.explanation.recorded import RecordedRun
from pdflow.results.records import NEVER, STAGES, Records, stage_marks_ns


@attrs.frozen
class StageRow:
    """One stage of one request; `wait` is None if it took no time."""

    stage: str
    duration_ns: int
    wait: StageWait | None


@attrs.frozen(kw_only=True)
class RequestPath:
    """The path of one request. `stopped_in`: the first stage that it did not pass; None if it has a first token."""

    request: int
    class_: str
    outcome: str
    reason: str | None
    attempts: int
    prefill_engine: str | None
    decode_engine: str | None
    input_tokens: int
    output_tokens: int
    arrival_ns: int
    ttft_ns: int | None
    rows: tuple[StageRow, ...]
    stopped_in: str | None

    @property
    def known_ns(self) -> int:
        """The time that the stages explain: TTFT, or the time until the last stage that was passed."""
        return sum(row.duration_ns for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the path for --json, times in ns."""
        whole = self.known_ns
        return {
            "request": self.request,
            **({"class": self.class_} if self.class_ else {}),
            "outcome": self.outcome,
            "reason": self.reason,
            "stopped_in": self.stopped_in,
            "attempts": self.attempts,
            "prefill_engine": self.prefill_engine,
            "decode_engine": self.decode_engine,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "arrival_ns": self.arrival_ns,
            "ttft_ns": self.ttft_ns,
            "stages": [
                {
                    "stage": row.stage,
                    "duration_ns": row.duration_ns,
                    "share": row.duration_ns / whole if whole else 0.0,
                    "waited_for": None if row.wait is None else attrs.asdict(row.wait),
                }
                for row in self.rows
            ],
        }


def durations_of(records: Records, request: int) -> tuple[int, ...]:
    """Return the durations of one request's stages in ns."""
    marks = stage_marks_ns(records)[:, request].tolist()
    return tuple(after - before for before, after in pairwise(marks))


def path_of(
    run: RecordedRun, request: int, memory: BlockSupply | None = None, pulls: bool | None = None
) -> RequestPath:
    """Return the path of one request. `memory` and `pulls` are known if the run has been simulated again."""
    records = run.records
    first_ns = records.first_token_ns[request]
    others = OtherRequests(records, request, run.links, pulls)
    return RequestPath(
        request=request,
        class_=records.class_of(request),
        outcome=records.outcome[request] or "unfinished",
        reason=records.reason[request],
        attempts=records.attempts[request],
        prefill_engine=records.prefill_engine[request],
        decode_engine=records.decode_engine[request],
        input_tokens=records.input_tokens[request],
        output_tokens=records.output_tokens[request],
        arrival_ns=records.arrival_ns[request],
        ttft_ns=None if first_ns == NEVER else first_ns - records.arrival_ns[request],
        rows=tuple(_rows(records, request, others, memory)),
        stopped_in=None if first_ns != NEVER else _not_passed(records, request),
    )


def _rows(records: Records, request: int, others: OtherRequests, memory: BlockSupply | None) -> Iterator[StageRow]:
    marks = stage_marks_ns(records)[:, request].tolist()
    for stage, name in enumerate(STAGES):
        begin, end = marks[stage], marks[stage + 1]
        yield StageRow(name, end - begin, others.wait(stage, begin, end, memory))


def _not_passed(records: Records, request: int) -> str:
    """Return the first stage that a request without a first token has not passed."""
    ends = zip(STAGES, records.ends, strict=True)
    return next((stage for stage, column in ends if column[request] == NEVER), STAGES[-1])
