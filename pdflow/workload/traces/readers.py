"""Reading of traces and of workload models. No other module of the package reads files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final, TextIO

from pdflow.errors import Problem
from pdflow.scenario.schema.workload import MODELS, Trace
from pdflow.workload import servegen
from pdflow.workload.model import WorkloadModel
from pdflow.workload.model_file import ModelFileError, model_of
from pdflow.workload.request import Request
from pdflow.workload.traces.complaints import Complaints, TraceError
from pdflow.workload.traces.traces import has_times, parse, texts

LONGEST_LINE: Final = 1 << 20
"""Characters; the longest line of the published traces has 2,000."""
DATASET_BYTES: Final = 1 << 28
"""The most bytes of a ServeGen client's lengths; the published ones have up to some MB."""


def read_trace(trace: Trace, base_dir: Path, seed: int = 0, timed: bool = True) -> Iterator[Request]:
    """Yield all requests of a trace, streamed: slices are `traces.sliced`. Of a generator, those that `seed` draws.

    Without `timed` all arrive at 0. Raises TraceError, after the last good line, if any line is bad.
    """
    path = base_dir / trace.path
    if trace.format == "servegen":
        yield from servegen.drawn(read_clients(trace, base_dir), seed)
        return
    with _opened(path, f"{trace.format} trace") as file:
        yield from parse(_lines(file, trace), str(path), trace, timed)


def read_texts(trace: Trace, base_dir: Path) -> Iterator[str | None]:
    """Yield the prompts of a trace of texts, one for each request; None where it has none. Raises TraceError."""
    path = base_dir / trace.path
    with _opened(path, f"{trace.format} trace") as file:
        yield from (text for _, _, text in texts(_lines(file, trace), str(path), trace))


def check_trace(trace: Trace, base_dir: Path, timed: bool = True) -> set[str]:
    """Read a trace to its end and return the classes of its requests. Raises TraceError if any line is bad."""
    if trace.format == "servegen":
        read_clients(trace, base_dir)
        return set()
    return {request.class_ for request in read_trace(trace, base_dir, timed=timed) if request.class_}


def has_arrival_times(trace: Trace, base_dir: Path) -> bool:
    """True if a trace, by its first lines, has arrival times. Raises TraceError if it cannot be read."""
    if trace.format == "servegen":
        return True
    with _opened(base_dir / trace.path, "trace") as file:
        return has_times(trace, file.readline(LONGEST_LINE))


def is_folder(path: Path) -> bool:
    """True if the path is a folder, as of a ServeGen model's clients."""
    return path.is_dir()


def first_lines(path: Path, number: int = 3) -> list[str]:
    """Return the first lines of a trace. Raises TraceError if it cannot be read."""
    with _opened(path, "trace") as file:
        return [line for _ in range(number) if (line := file.readline(LONGEST_LINE))]


def read_clients(trace: Trace, base_dir: Path) -> list[servegen.ServegenClient]:
    """Read the clients of a ServeGen trace: one, or all of a folder. Raises TraceError with any file's problems."""
    path = base_dir / trace.path
    paths = sorted(path.glob("*trace*.csv")) if path.is_dir() else [path]
    if not paths:
        raise TraceError([Problem(str(path), "", "has no *trace*.csv, expected a folder of ServeGen clients")])
    clients: list[servegen.ServegenClient] = []
    problems: list[Problem] = []
    for one in paths:
        default_dataset = one.with_name(one.name.replace("trace", "dataset")).with_suffix(".json")
        dataset = default_dataset if trace.dataset is None else base_dir / trace.dataset
        try:
            with _opened(one, "ServeGen client's trace") as file:
                windows = servegen.read_windows(_whole(_pieces(file), str(one)), str(one))
            with _opened(dataset, "ServeGen client's lengths") as file:
                text = file.read(DATASET_BYTES)
            clients.append(servegen.ServegenClient(windows, servegen.read_lengths(text, str(dataset))))
        except TraceError as error:
            problems += error.problems
    if problems:
        raise TraceError(problems)
    return clients


def load_model(name: str, base_dir: Path = Path()) -> WorkloadModel:
    """Load one of MODELS, or a model file. Raises ModelFileError."""
    if name in MODELS:
        text = files("pdflow.workload.models").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        return model_of(name, tomllib.loads(text))
    if not name.endswith(".toml"):
        raise ModelFileError(f"unknown model, expected one of {', '.join(MODELS)} or the path of a .toml")
    path = base_dir / name
    try:
        figures = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"cannot be read: {error.strerror}; looked for {path}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"is not TOML: {error}") from None
    return model_of(path.stem, figures)


def _opened(path: Path, what: str) -> TextIO:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        wrong = "no such file" if isinstance(error, FileNotFoundError) else reason
        raise TraceError([Problem(str(path), "", f"{wrong}, expected a {what}")]) from None


def _lines(file: TextIO, trace: Trace) -> Iterator[str]:
    return _pieces(file) if trace.format == "sharegpt" else _whole(_pieces(file), file.name)


def _pieces(file: TextIO) -> Iterator[str]:
    """Yield lines, those that are too long in parts."""
    return iter(lambda: file.readline(LONGEST_LINE), "")


def _whole(pieces: Iterator[str], location: str) -> Iterator[str]:
    """Yield lines, none of them cut short. Raises TraceError for one that is too long."""
    for number, line in enumerate(pieces, start=1):
        if len(line) == LONGEST_LINE and not line.endswith("\n"):
            raise Complaints(location).refuse(number, f"the line has more than {LONGEST_LINE:,} characters")
        yield line
