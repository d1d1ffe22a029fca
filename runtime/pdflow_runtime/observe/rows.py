"""The rows of a live run, in the form of a simulated one: each request, the ends of its stages, the engines' steps, the
totals.

They are computed from the notes of all processes (`observe/event_log.py`). The meaning of a row is defined in
`results.records`; this module only says which note ends which stage. Instant 0 is the first request's arrival at the
router, and the first token is there when its piece passes the router: of an answer that is not streamed, with the last
one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from pdflow.protocol.values import Instant, RequestId
from pdflow.results.recording import Recording, TimeSeries
from pdflow.results.records import (
    D_ADMIT,
    FIRST_DECODE,
    NEVER,
    NOTIFY,
    PREFILL,
    STAGES,
    Records,
)
from pdflow.results.steps import Steps
from pdflow.results.totals import PS_PER_NS, EngineTotals, Totals
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow_runtime.observe.event_log import (
    LAST,
    RELEASED,
    TOKEN,
    FirstPiecePassed,
    Frame,
    Generated,
    Moved,
    Noted,
    Page,
    Passed,
    Replied,
    RequestReceived,
    Sent,
    Stepped,
)

NUMBERS: Final = {stage: number for number, stage in enumerate(STAGES)}


class Rows(NamedTuple):
    """The rows, steps and totals of a run."""

    records: Records
    steps: dict[str, Steps]
    totals: Totals
    recording: Recording


def timed(pages: Iterable[Page]) -> Iterator[tuple[str, Instant, Noted]]:
    """Yield every note with its node and its time on the wall's clock, in no order."""
    for page in pages:
        for noted in page.notes:
            yield page.node, noted.t + page.offset_ns, noted


def rows(pages: Sequence[Page], scenario: ResolvedScenario) -> Rows:
    """Return the rows of all requests that the router received, by their arrival."""
    notes = sorted(timed(pages), key=lambda entry: entry[1])
    zero = next((t for _, t, noted in notes if isinstance(noted, RequestReceived)), 0)
    table = _RowTable()
    engines = _Engines()
    for node, t, noted in notes:
        if isinstance(noted, Stepped):
            engines.stepped(node, t - zero, noted)
        else:
            table.take(t - zero, noted)
    table.end()
    totals = table.totals
    totals.engines = engines.totals(scenario)
    return Rows(table.records, engines.steps, totals, Recording((), dict(engines.blocks)))


class _RowTable:
    """Fills the rows of requests from notes."""

    def __init__(self) -> None:
        self.records: Final = Records()
        self.totals: Final = Totals()
        self._rows: dict[int, int] = {}
        """The row of each request, by the router's number of it."""
        self._legs: dict[RequestId, int] = {}
        self._alone: set[int] = set()
        self._bytes: Counter[RequestId] = Counter()
        self._marks: defaultdict[RequestId, dict[str, Instant]] = defaultdict(dict)

    def take(self, t: Instant, noted: Noted) -> None:
        records = self.records
        match noted:
            case RequestReceived(request=request, tokens=tokens):
                self._rows[request] = records.add(t, tokens, 0)
            case Sent(request=request) if request in self._rows:
                self._sent(self._rows[request], noted)
            case FirstPiecePassed(request=request) if request in self._rows:
                row = self._rows[request]
                records.first_token_ns[row] = records.ends[FIRST_DECODE][row] = t
            case Replied(request=request) if request in self._rows:
                self._replied(self._rows[request], t, noted)
            case Passed(request_id=request_id, stage=stage):
                self._marks[request_id][stage] = t
            case Generated(request_id=request_id, tokens=tokens) if request_id in self._legs:
                # Of two attempts at once, the one that was taken back may tell its part last.
                row = self._legs[request_id]
                records.output_tokens[row] = max(records.output_tokens[row], tokens)
            case Moved(request_id=request_id, nbytes=nbytes):
                self._bytes[request_id] += nbytes
                self.totals.bytes_moved += nbytes
                self.totals.transfers += 1
            case Frame(received=False):
                self.totals.messages += 1

    def _sent(self, row: int, sent: Sent) -> None:
        records = self.records
        self._legs[sent.request_id] = row
        if sent.role != "decode":
            records.attempts[row] += 1
            records.prefill_engine[row] = sent.engine
        if sent.role != "prefill":
            records.decode_engine[row] = sent.engine
        (self._alone.add if sent.role == "alone" else self._alone.discard)(row)

    def _replied(self, row: int, t: Instant, replied: Replied) -> None:
        records = self.records
        records.outcome[row] = replied.outcome
        records.reason[row] = replied.reason.replace("_", " ") or None
        records.attempts[row] = replied.attempts
        self.totals.duration_ns = max(self.totals.duration_ns, t)

    def end(self) -> None:
        """Write the stages of attempts to the rows of their requests: the latest stamp of all attempts counts."""
        records = self.records
        for request_id, marks in self._marks.items():
            row = self._legs.get(request_id)
            if row is None:
                continue
            for stage, t in marks.items():
                if stage in NUMBERS:
                    column = records.ends[NUMBERS[stage]]
                    column[row] = max(column[row], t)
            records.last_token_ns[row] = max(records.last_token_ns[row], marks.get(LAST, NEVER))
            if row in self._alone and TOKEN in marks:
                for number in range(PREFILL, NOTIFY + 1):
                    records.ends[number][row] = marks[TOKEN]
            self._account_stranded(marks, self._bytes[request_id])
        for row, outcome in enumerate(records.outcome):
            if outcome == "completed":
                self._in_order(row)

    def _in_order(self, row: int) -> None:
        """Put the times of a row in order: those of two processes may be out of order by what their clocks differ."""
        records = self.records
        first = max(records.first_token_ns[row], records.arrival_ns[row])
        records.first_token_ns[row] = records.ends[FIRST_DECODE][row] = first
        records.last_token_ns[row] = max(records.last_token_ns[row], first)

    def _account_stranded(self, marks: Mapping[str, Instant], nbytes: int) -> None:
        """Add KV that nothing is computed on: at P until its blocks are free, at D until all of it is there."""
        for since, until in ((STAGES[PREFILL], RELEASED), (STAGES[D_ADMIT], STAGES[NOTIFY])):
            if since in marks and until in marks:
                self.totals.stranded_byte_ns += nbytes * max(0, marks[until] - marks[since])


class _Engines:
    """Sums of the engines' steps."""

    def __init__(self) -> None:
        self.steps: Final[dict[str, Steps]] = {}
        self.blocks: Final[defaultdict[str, TimeSeries]] = defaultdict(TimeSeries)
        self._busy_ns: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()

    def stepped(self, name: str, t: Instant, noted: Stepped) -> None:
        lasted_ps = noted.lasted_ns * PS_PER_NS
        self.steps.setdefault(name, Steps()).add(t * PS_PER_NS, lasted_ps, 0, 1, noted.later)
        self.blocks[name].record(t + noted.lasted_ns, noted.used)
        self._busy_ns[name] += noted.lasted_ns
        self._peak[name] = max(self._peak[name], noted.used)

    def totals(self, scenario: ResolvedScenario) -> list[EngineTotals]:
        return [
            EngineTotals(
                name=name,
                role=pool.role,
                busy_ps=self._busy_ns[name] * PS_PER_NS,
                gpus=pool.gpus_per_engine,
                kv_blocks=kv_tokens_of(scenario.model, pool) // pool.block_size,
                peak_kv_blocks=self._peak[name],
                max_num_seqs=pool.max_num_seqs,
            )
            for pool in scenario.pools
            for name in (f"{pool.name}-{number}" for number in range(pool.replicas))
        ]
