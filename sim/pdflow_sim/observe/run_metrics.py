"""The metrics of a run as it goes: each request's record, totals, each engine's steps; and a text trace, if asked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from pdflow.engine.sequence import Sequence
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, Instant, RequestId
from pdflow.results.records import FIRST_DECODE, Records
from pdflow.results.steps import Steps
from pdflow.results.totals import Totals
from pdflow.routing.effects import Reply

REASONS = {
    Code.REJECTED: "does not fit the engine's KV cache",
    Code.DEADLINE: "deadline",
    Code.UNREACHABLE: "no engine was reachable",
    Code.PEER_DEAD: "its engine or the engine's peer died",
}


class RunMetrics:
    """The metrics of one run: filled by nodes, network and clients; read by the result."""

    def __init__(self) -> None:
        self.records = Records()
        self.totals = Totals()
        self.steps: dict[str, Steps] = {}
        """The logged steps, by engine that decodes."""
        self.corrupted: set[RequestId] = set()
        """Attempts whose KV at D is not all their prompt's, which D does not know."""
        self.trace_line: Callable[[Address, str], None] | None = None
        """Adds a line to the text trace: the address, and in words what is copied there and which memories are taken
        (`pdflow_sim.observe.text_trace`).
        """

    def count(self, what: str, times: int = 1) -> None:
        """Add to the number of times that the result says this happened."""
        notes = self.totals.notes
        notes[what] = notes.get(what, 0) + times

    def stamp_first_token(self, request: int, at_ns: Instant) -> None:
        """Record that the client has the answer's first token."""
        self.records.first_token_ns[request] = at_ns
        self.records.last_token_ns[request] = at_ns

    def stamp_tokens(
        self, request: int, seq: Sequence, at_ns: Instant, engine: str, hop_ns: int, keeps_first: bool
    ) -> None:
        """Record all tokens of an answer, the last one generated at `at_ns`; each takes one hop to the client.

        `engine` generated them, and its step log has them. A hedge may have arrived at another engine since.

        `keeps_first`: if the client has a first token already, that one counts.
        """
        records = self.records
        first = seq.first_token_ns + hop_ns
        records.ends[FIRST_DECODE][request] = first
        if records.first_token_ns[request] < 0 or not keeps_first:
            records.first_token_ns[request] = first
        records.last_token_ns[request] = at_ns + hop_ns
        records.decode_engine[request] = engine
        runs = seq.token_runs
        records.token_steps[request] = runs[0] if len(runs) == 1 else tuple(chain.from_iterable(runs))

    def stamp_reply(self, effect: Reply) -> None:
        """Record that the client has its answer, or learns that there will be none."""
        records = self.records
        records.outcome[effect.request] = effect.outcome
        records.attempts[effect.request] = effect.attempts
        if effect.outcome != "completed":
            default_reason = REASONS.get(effect.code, effect.code.name.lower().replace("_", " "))
            records.reason[effect.request] = effect.reason or default_reason


def request_of(request_id: RequestId) -> int:
    """Return the request that an attempt's id belongs to: "r17.1" is request 17."""
    return int(request_id[1 : request_id.index(".")])
