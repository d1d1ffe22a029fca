"""Finished runs read from their folders, checked as untrusted input: results.json with requests.jsonl of one run,
seeds.json of several.

Reads the few keys that a comparison needs; what else stands in the files is not looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.results import formatting
from pdflow.results.comparison.runs import OneRun, Runs, SeedRuns, done_of, good_of
from pdflow.results.comparison.seeds import Estimate, SeedsReport
from pdflow.results.explanation.recorded import RecordedRun
from pdflow.results.figures.itls import bounds_itl
from pdflow.results.files.bench_json import CostStatement, statements
from pdflow.results.files.write import REQUESTS_NAME, RESULTS_NAME, SEEDS_NAME
from pdflow.results.records import NEVER, STAGES, Outcome, Records
from pdflow.results.totals import NS_PER_S

_Instant = Annotated[int, Meta(ge=0, le=2**53)]
"""104 days in ns: SLOs are evaluated in ps, and int64 holds no more of them."""
_Number = Annotated[int, Meta(ge=0, le=2**53)]
_Tokens = Annotated[int, Meta(ge=0, le=2**40)]
_Rate = Annotated[float, Meta(ge=0, le=1e18)]
_Finite = Annotated[float, Meta(ge=-1e18, le=1e18)]


class UnreadableRunError(PdflowError):
    """A path that was given is not the folder of a finished run."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, path: Path, why: str) -> None:
        expected = f"expected a folder of `pdflow simulate --out` with {RESULTS_NAME} and {REQUESTS_NAME}"
        super().__init__(formatting.plain(f"{path}: {why}; {expected}, or with {SEEDS_NAME}"))


class _Bounds(msgspec.Struct):
    ttft_ms: _Rate | None = None
    tpot_ms: _Rate | None = None
    itl_ms: _Rate | None = None
    itl_percentile: Annotated[float, Meta(gt=0, le=100)] = 99.0
    e2e_ms: _Rate | None = None


class _Class(msgspec.Struct):
    slo: _Bounds | None = None


class _Scenario(msgspec.Struct):
    name: str
    sha256: str = ""


class _Warmup(msgspec.Struct):
    s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class _Cost(msgspec.Struct):
    pool: str
    model: str
    provenance: str
    error_bar: str


class _Link(msgspec.Struct):
    name: str


class _Ours(msgspec.Struct):
    scenario: _Scenario
    seed: int
    version: str = ""
    world: str = "simulated"
    command_line: str = ""
    links: list[_Link] = []
    interrupted: bool = False
    slo: _Bounds | None = None
    classes: dict[str, _Class] = {}
    warmup: _Warmup = msgspec.field(default_factory=_Warmup)
    cost: list[_Cost] = []


class _Results(msgspec.Struct):
    duration: _Rate
    request_throughput: _Rate
    output_throughput: _Rate
    pdflow: _Ours
    request_goodput: _Rate | None = None


class _Request(msgspec.Struct):
    outcome: Outcome | None
    input_tokens: _Tokens
    output_tokens: _Tokens
    arrival_ns: _Instant
    first_token_ns: _Instant | None
    last_token_ns: _Instant | None
    ends_ns: dict[str, _Instant | None]
    itl_ns: _Instant | None = None
    itl_max_ns: _Instant | None = None
    stalled_ns: _Instant | None = None
    class_: str = msgspec.field(default="", name="class")
    wrong_kv: bool | None = None
    reason: str | None = None
    attempts: Annotated[int, Meta(ge=0, le=2**31)] = 0
    prefill_engine: str | None = None
    decode_engine: str | None = None
    session: _Number | None = None
    turn: _Number | None = None


class _Figure(msgspec.Struct):
    values: list[_Finite]


class _Seeds(msgspec.Struct):
    name: str
    seeds: list[int]
    interrupted: bool
    figures: dict[str, _Figure]
    cost: list[str] = []


def read_runs(path: Path) -> Runs:
    """Read the runs of a folder, a results.json or a seeds.json. Raises UnreadableRunError with the reason."""
    if path.name == SEEDS_NAME:
        return _seeds(path)
    if path.name == RESULTS_NAME:
        return _run(path.parent)
    of_one, of_several = (path / RESULTS_NAME).exists(), (path / SEEDS_NAME).exists()
    if of_one and of_several:
        raise UnreadableRunError(
            path, f"the folder has both {RESULTS_NAME} and {SEEDS_NAME}; give the path of one of them"
        )
    if of_one or of_several:
        return _run(path) if of_one else _seeds(path / SEEDS_NAME)
    why = f"the folder has neither {RESULTS_NAME} nor {SEEDS_NAME}" if path.is_dir() else "it is not a folder"
    raise UnreadableRunError(path, why if path.exists() else "the folder does not exist")


def _run(folder: Path) -> OneRun:
    results = _results(folder)
    ours = results.pdflow
    records = _records(folder / REQUESTS_NAME, folder).arriving_from(round(ours.warmup.s * NS_PER_S))
    if not len(records):
        raise UnreadableRunError(folder, "no request arrived after the warm-up")
    of_class = {name: row.slo for name, row in ours.classes.items()}
    if not bounds_itl(ours.slo, {name: slo for name, slo in of_class.items() if slo is not None}):
        records.itl_ns, records.itl_max_ns, records.stalled_ns = [], [], []
    elif any(itl < 0 for itl, outcome in zip(records.itl_ns, records.outcome, strict=True) if outcome == "completed"):
        raise UnreadableRunError(folder, f"the SLO bounds ITL, and {REQUESTS_NAME} lacks itl_ns of a completed request")
    done, served = done_of(records)
    return OneRun(
        path=folder,
        name=ours.scenario.name,
        seed=ours.seed,
        interrupted=ours.interrupted,
        requests_per_s=results.request_throughput,
        output_tokens_per_s=results.output_throughput,
        goodput_rps=results.request_goodput,
        records=records,
        done=done,
        served=served,
        good=good_of(ours.slo, of_class, records),
        costs=statements(CostStatement(**msgspec.structs.asdict(cost)) for cost in ours.cost),
    )


def read_recorded(folder: Path) -> RecordedRun:
    """Read one run with all that its records have. Raises UnreadableRunError with the reason."""
    if not (folder / RESULTS_NAME).exists() and (folder / SEEDS_NAME).exists():
        raise UnreadableRunError(folder, f"it is of several seeds; give the folder of one, such as {folder / 'seed-1'}")
    results = _results(folder)
    ours = results.pdflow
    records = _records(folder / REQUESTS_NAME, folder)
    if len(records.sessions) not in (0, len(records)):
        raise UnreadableRunError(folder, f"{REQUESTS_NAME} has sessions of some requests only")
    itls = zip(records.itl_max_ns, records.outcome, strict=True)
    if any(itl == NEVER and outcome == "completed" for itl, outcome in itls):
        records.itl_ns, records.itl_max_ns, records.stalled_ns = [], [], []
    return RecordedRun(
        folder=folder,
        name=ours.scenario.name,
        seed=ours.seed,
        world=ours.world,
        version=ours.version,
        scenario_sha256=ours.scenario.sha256,
        command_line=ours.command_line,
        interrupted=ours.interrupted,
        warmup_ns=round(ours.warmup.s * NS_PER_S),
        links=tuple(link.name for link in ours.links),
        records=records,
    )


def _seeds(path: Path) -> SeedRuns:
    try:
        decoded = msgspec.json.decode(_bytes(path, path.parent), type=_Seeds)
        if any(len(figure.values) != len(decoded.seeds) for figure in decoded.figures.values()):
            raise ValueError("a figure does not have one value per seed")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as cause:
        raise UnreadableRunError(path.parent, f"{path.name} is damaged or not from pdflow ({cause})") from cause
    if not decoded.seeds:
        raise UnreadableRunError(path.parent, "none of its runs was completed")
    figures = {name: Estimate.of(figure.values) for name, figure in decoded.figures.items()}
    asked = len(decoded.seeds) + decoded.interrupted
    return SeedRuns(
        path=path.parent,
        report=SeedsReport(name=decoded.name, seeds=decoded.seeds, asked=asked, figures=figures, costs=decoded.cost),
    )


def _bytes(path: Path, named: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise UnreadableRunError(named, f"{path.name} cannot be read ({cause.strerror})") from cause


def _results(folder: Path) -> _Results:
    try:
        return msgspec.json.decode(_bytes(folder / RESULTS_NAME, folder), type=_Results)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise UnreadableRunError(folder, f"{RESULTS_NAME} is damaged or not from pdflow ({cause})") from cause


def _records(path: Path, named: Path) -> Records:
    records = Records()
    decode = msgspec.json.Decoder(_Request).decode
    for number, line in enumerate(_bytes(path, named).splitlines(), start=1):
        try:
            request = decode(line)
            _add(records, request)
        except (msgspec.DecodeError, RecursionError, ValueError) as cause:
            raise UnreadableRunError(named, f"{path.name}:{number} is damaged or not from pdflow ({cause})") from cause
    if not len(records):
        raise UnreadableRunError(named, f"{path.name} has no requests")
    return records


def _add(records: Records, line: _Request) -> None:
    """Append one request to the records. Raises ValueError for a completed request whose times are impossible."""
    first, last = (NEVER if t is None else t for t in (line.first_token_ns, line.last_token_ns))
    if line.outcome == "completed" and not line.arrival_ns <= first <= last:
        raise ValueError("completed, but a token is earlier than the arrival or a previous token")
    request = records.add(line.arrival_ns, line.input_tokens, line.output_tokens)
    records.outcome[request], records.reason[request] = line.outcome, line.reason
    records.prefill_engine[request], records.decode_engine[request] = line.prefill_engine, line.decode_engine
    records.attempts[request] = line.attempts
    if line.session is not None and line.turn is not None:
        records.sessions.append((line.session, line.turn))
    records.first_token_ns[request], records.last_token_ns[request] = first, last
    for column, value in (
        (records.itl_ns, line.itl_ns),
        (records.itl_max_ns, line.itl_max_ns),
        (records.stalled_ns, line.stalled_ns),
    ):
        column.append(NEVER if value is None else value)
    if line.class_:
        records.classify(request, line.class_)
    if line.wrong_kv is not None:
        records.wrong_kv = records.wrong_kv or set()
        if line.wrong_kv:
            records.wrong_kv.add(request)
    for stage, column in zip(STAGES, records.ends, strict=True):
        end = line.ends_ns.get(stage)
        column[request] = NEVER if end is None else end
