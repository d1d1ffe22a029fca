"""The bench client's records of a running benchmark: each request's row, its tokens' times, how late it was sent.

A request's arrival is when it was due, not when this process got round to it: where the client is late, the server's
latencies look worse, never better, and `late_ns` says by how much. With --max-concurrency it arrives when it gets a
slot, as in `vllm bench serve`; `queued_ns` is what that took.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

from pdflow.protocol.values import Instant
from pdflow.results.records import Outcome, Records
from pdflow.results.steps import Steps
from pdflow.results.totals import PS_PER_NS
from pdflow.workload.request import Request
from pdflow_runtime.bench.answer import AnswerReader
from pdflow_runtime.bench.run_clock import RunClock


class Ledger:
    """The requests by number, in the order in which they were due."""

    def __init__(self, clock: RunClock, keep_texts: bool = False) -> None:
        self.clock = clock
        self.keep_texts = keep_texts
        self.records = Records()
        self.itls_ns: list[array[int]] = []
        """The inter-token latencies of each completed request; empty for any other."""
        self.texts: list[str] = []
        """The text of each answer, as far as it came, if texts are to be kept."""
        self.queued_ns: list[int] = []
        self.late_ns: list[int] = []
        """Of each request that was sent: how long after its arrival."""
        self.ended = 0
        self.last_end_ns: Instant = 0
        self.tokens = Steps()
        """Each token of a completed request but its first, as a step of its own."""
        self.recent: list[tuple[Instant, int]] = []
        """The requests that ended, and when, since the progress display last took these away."""

    def due(self, at: Instant, request: Request, session: tuple[int, int] | None = None) -> int:
        """Record that a request is due at `at`; return its number. `session` is its session, and its turn in that, from
        1."""
        number = self.records.add(at, request.input_tokens, request.output_tokens)
        if request.class_:
            self.records.classify(number, request.class_)
        if session is not None:
            self.records.sessions.append(session)
        self.itls_ns.append(array("q"))
        self.texts.append("")
        self.queued_ns.append(0)
        return number

    def placed(self, number: int) -> None:
        """Record that the request has got one of --max-concurrency's slots: it arrives now."""
        now = self.clock.now()
        self.queued_ns[number] = now - self.records.arrival_ns[number]
        self.records.arrival_ns[number] = now

    def sent(self, number: int) -> None:
        self.late_ns.append(max(0, self.clock.now() - self.records.arrival_ns[number]))
        self.records.attempts[number] = 1

    def over(self, number: int, answer: AnswerReader, outcome: Outcome, reason: str | None = None) -> None:
        """Record how the request ended; `reason` says why if there is no whole answer."""
        records = self.records
        records.outcome[number] = outcome
        records.reason[number] = reason
        if self.keep_texts:
            self.texts[number] = "".join(answer.pieces)
        if answer.prompt_tokens is not None and outcome == "completed":
            records.input_tokens[number] = answer.prompt_tokens
        if answer.times:
            arrival = records.arrival_ns[number]
            records.first_token_ns[number] = max(arrival, answer.times[0])
            records.last_token_ns[number] = max(arrival, answer.times[-1])
        if outcome == "completed":
            records.output_tokens[number] = answer.output_tokens
            self.itls_ns[number] = array("q", [at - before for before, at in pairwise(answer.times)])
            for before, at in pairwise(answer.times):
                self.tokens.add(before * PS_PER_NS, (at - before) * PS_PER_NS, 0, 1, 1)
        self.ended += 1
        self.last_end_ns = self.clock.now()
        self.recent.append((self.last_end_ns, number))
