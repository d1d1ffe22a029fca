"""What the router notes of a request that gets to an engine, for the access log: the engines, how it ended, and how
long its stages took, as the engines measure them (`pdflow_request_stage_seconds`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdflow.protocol.values import Instant
from pdflow_runtime.observe.passing_answers import EndedAnswer


class CallRecord(msgspec.Struct):
    """The record of one request."""

    number: int = 0
    """The router's number of the request, with which the names of its attempts begin in the engines' logs."""
    prompt_tokens: int = 0
    prefill: str = ""
    """The engine of the latest prefill leg."""
    decode: str = ""
    outcome: str = ""
    code: str = ""
    attempts: int = 0
    resumed: bool = False
    first_ns: Instant = 0
    """When the first piece of the answer passed; 0: none did."""
    stages_ms: dict[str, float] = {}
    """Those of a later attempt replace those of an earlier one."""
    answer: EndedAnswer = EndedAnswer(0, "")
    trace: object = None
    """Its spans, if it has any (`request_traces.py`)."""


def of_several(records: Sequence[CallRecord]) -> CallRecord:
    """Return the record of a request for several answers: the sums, and the engines and stages of the first one. It
    ended as the first one that failed, by which the others were cancelled, or else the first that did not complete."""
    first = records[0]
    ranks = {"failed": 0, "completed": 2}
    worst = min(records, key=lambda record: ranks.get(record.outcome, 1))
    tokens = sum(record.answer.tokens for record in records)
    return msgspec.structs.replace(
        first,
        prompt_tokens=sum(record.prompt_tokens for record in records),
        outcome=worst.outcome,
        code=worst.code,
        attempts=sum(record.attempts for record in records),
        resumed=any(record.resumed for record in records),
        first_ns=min((record.first_ns for record in records if record.first_ns), default=0),
        answer=first.answer._replace(tokens=tokens),
    )
