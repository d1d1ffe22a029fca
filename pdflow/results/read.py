"""A finished run from its folder: results.json and requests.jsonl, checked as what a stranger may have written.

Reads the few keys that a comparison needs; what else stands in the files is not looked at. Figures of requests are
worked out again from their records by the same rules as during a run, so that they can be resampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.results.metrics import completed
from pdflow.results.records import NEVER, STAGES, Outcome, Records
from pdflow.results.slo import Classes, Served, met_by
from pdflow.results.totals import NS_PER_S
from pdflow.results.write import REQUESTS_NAME, RESULTS_NAME

_Instant = Annotated[int, Meta(ge=0, le=2**53)]
"""104 days in ns: SLOs are judged in ps, and int64 holds no more of them."""
_Tokens = Annotated[int, Meta(ge=0, le=2**40)]
_Rate = Annotated[float, Meta(ge=0, le=1e18)]


class UnreadableRunError(PdflowError):
    """What was named is no folder of a finished run."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: {why}; name a folder that `pdflow simulate --out` wrote, with {RESULTS_NAME} and {REQUESTS_NAME}"
        )


class _Bounds(msgspec.Struct):
    ttft_ms: _Rate | None = None
    tpot_ms: _Rate | None = None
    e2e_ms: _Rate | None = None


class _Class(msgspec.Struct):
    slo: _Bounds | None = None


class _Scenario(msgspec.Struct):
    name: str


class _Warmup(msgspec.Struct):
    s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class _Ours(msgspec.Struct):
    scenario: _Scenario
    seed: int
    interrupted: bool = False
    slo: _Bounds | None = None
    classes: dict[str, _Class] = {}
    warmup: _Warmup = msgspec.field(default_factory=_Warmup)


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
    class_: str = msgspec.field(default="", name="class")


@attrs.frozen(kw_only=True, eq=False)
class SavedRun:
    """One run, as its files tell it."""

    path: Path
    name: str
    seed: int
    interrupted: bool
    requests_per_s: float
    output_tokens_per_s: float
    goodput_rps: float | None
    records: Records
    done: npt.NDArray[np.bool_]
    """Which requests were completed."""
    served: Served
    """Those."""
    good: npt.NDArray[np.bool_] | None
    """Which of those met every bound; None if nothing was demanded."""


def read_run(path: Path) -> SavedRun:
    """The run in a folder, or beside a results.json. Raises UnreadableRunError with the reason."""
    folder = path.parent if path.name == RESULTS_NAME else path
    results = _results(folder)
    ours = results.pdflow
    records = _records(folder / REQUESTS_NAME, path).arriving_from(round(ours.warmup.s * NS_PER_S))
    if not len(records):
        raise UnreadableRunError(path, "no request arrived after its warm-up")
    done = np.array([outcome == "completed" for outcome in records.outcome], dtype=np.bool_)
    served = completed(records)
    return SavedRun(
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
        good=_good(ours, records, served, done),
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
        raise UnreadableRunError(folder, f"{RESULTS_NAME} is not what a run writes ({cause})") from cause


def _records(path: Path, named: Path) -> Records:
    records = Records()
    decode = msgspec.json.Decoder(_Request).decode
    for number, line in enumerate(_bytes(path, named).splitlines(), start=1):
        try:
            request = decode(line)
            _add(records, request)
        except (msgspec.DecodeError, RecursionError, ValueError) as cause:
            raise UnreadableRunError(named, f"{path.name}:{number} is not what a run writes ({cause})") from cause
    if not len(records):
        raise UnreadableRunError(named, f"{path.name} holds no request")
    return records


def _add(records: Records, line: _Request) -> None:
    """Raises ValueError for a completed request whose times cannot be."""
    first, last = (NEVER if t is None else t for t in (line.first_token_ns, line.last_token_ns))
    if line.outcome == "completed" and not line.arrival_ns <= first <= last:
        raise ValueError("completed, but its arrival and its tokens are not in that order")
    request = records.add(line.arrival_ns, line.input_tokens, line.output_tokens)
    records.outcome[request] = line.outcome
    records.first_token_ns[request], records.last_token_ns[request] = first, last
    if line.class_:
        records.classify(request, line.class_)
    for stage, column in zip(STAGES, records.ends, strict=True):
        end = line.ends_ns.get(stage)
        column[request] = NEVER if end is None else end


def _good(ours: _Ours, records: Records, served: Served, done: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | None:
    bounds, codes = [], None
    if records.classes:
        classes = Classes.of(records.classes, len(records))
        bounds = [ours.classes[name].slo if name in ours.classes else ours.slo for name in classes.names]
        codes = classes.codes[done]
    met = met_by(ours.slo, served, bounds, codes)
    return np.logical_and.reduce(list(met.values())) if met else None
