"""A scenario file into a Scenario, or one ScenarioError that says everything wrong with it and where.

This is the one module of the room that reads files. Paths in a scenario are relative to its file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.convert import Complaint, MisfitError, did_you_mean, shown
from pdflow.scenario.costs import check_costs
from pdflow.scenario.document import DTYPES, Parts, read_document
from pdflow.scenario.hf_config import HfConfigError, model_values
from pdflow.scenario.locate import KeyPath, key_lines
from pdflow.scenario.overrides import Override, apply_override, parse_override
from pdflow.scenario.schema import Scenario
from pdflow.scenario.validate import check
from pdflow.scenario.workload_schema import MODELS, Workload
from pdflow.workload.complaints import TraceError
from pdflow.workload.model_file import ModelFileError
from pdflow.workload.readers import check_trace, load_model, says_when

T = TypeVar("T")

_LINE_OF_ERROR: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def load(path: str | os.PathLike[str], *, overrides: Iterable[str] = (), seed: int | None = None) -> Scenario:
    """Read, override, resolve and check one scenario file.

    `overrides` are KEY=VALUE texts as `--set` takes them. Raises ScenarioError with every problem found.
    """
    file = os.fspath(path)
    text = _read(file)
    document = _parse(file, text)
    source = _Source(file, key_lines(text), document)
    source.override(overrides, seed)
    of_model = _take_config(file, document)
    parts, complaints = read_document(document)
    if of_model:
        # Whatever else is missing in [model] would have come from there.
        complaints = of_model + [complaint for complaint in complaints if complaint.path[:1] != ("model",)]
    of_costs, of_cost_files = check_costs(file, parts)
    complaints += of_costs
    complaints += check(parts)
    of_path, of_lines = _trace_problems(file, parts)
    problems = source.problems(complaints + of_path) + of_lines + of_cost_files
    if problems:
        raise ScenarioError(problems)
    return _scenario(file, parts)


def _read(file: str) -> str:
    try:
        raw = Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError([Problem(file, "", f"cannot be read: {reason}")]) from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ScenarioError([Problem(f"{file}:{line}", "", "is not UTF-8 text, as TOML must be")]) from None


def _parse(file: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ScenarioError([Problem(f"{file}:1", "", "is nested too deeply to be read")]) from None
    except ValueError as error:
        message = str(error)
        match = _LINE_OF_ERROR.search(message)
        line = int(match[1]) if match and match[1] else text.count("\n") + 1
        column = f", column {match[2]}" if match and match[2] else ""
        reason = message[: match.start()] if match else message
        problem = Problem(f"{file}:{line}", "", f"is not TOML: {reason}{column}")
        raise ScenarioError([problem]) from None


@attrs.define
class _Source:
    """Where each part of a document was written: on a line of the file, or on the command line."""

    file: str
    lines: Mapping[KeyPath, int]
    document: dict[str, Any]
    overridden: dict[KeyPath, str] = attrs.field(factory=dict)
    refused: list[Problem] = attrs.field(factory=list)

    def override(self, texts: Iterable[str], seed: int | None) -> None:
        """Apply `--set`s in order, then `--seed`; those that lead nowhere are remembered as problems."""
        for text in texts:
            try:
                override = parse_override(text)
                self.overridden[apply_override(self.document, override)] = override.place
            except MisfitError as error:
                self.refused.append(Problem(f"--set {text}", "", str(error)))
        if seed is not None and isinstance(self.document.setdefault("scenario", {}), dict):
            override = Override(f"--seed {seed}", ("scenario", "seed"), seed)
            self.overridden[apply_override(self.document, override)] = override.place

    def problems(self, complaints: Iterable[Complaint]) -> list[Problem]:
        """Complaints with their places, in the order of the file, the command line's last."""
        placed = [(self._line(c.path), i, c) for i, c in enumerate(complaints)]
        placed.sort(key=lambda item: (item[0] is None, item[0] or 0, item[1]))
        located = [Problem(self._place(c.path), self._shown(c.path), c.message) for _, _, c in placed]
        return list(dict.fromkeys(located)) + self.refused

    def _place(self, path: KeyPath) -> str:
        line = self._line(path)
        return f"{self.file}:{line}" if line is not None else self._override_of(path) or self.file

    def _line(self, path: KeyPath) -> int | None:
        """The line of the key, or of the nearest table around it; None if the command line said it."""
        if self._override_of(path) is not None:
            return None
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def _override_of(self, path: KeyPath) -> str | None:
        """The option that said this key, a table around it, or all that there is of it."""
        around = [path[:end] for end in range(len(path), 0, -1)]
        for table in around:
            if table in self.overridden:
                return self.overridden[table]
        for table in around:
            if table in self.lines:
                return None
            for key, place in self.overridden.items():
                if key[: len(table)] == table:
                    return place
        return None

    def _shown(self, path: KeyPath) -> str:
        """The path as --set would say it: pools by their names."""
        shown = ""
        for depth, part in enumerate(path):
            if depth == 1 and path[0] == "pool":
                name = self._pool_name(part)
                shown += f".{name}" if name else f"[{part}]"
            elif isinstance(part, int):
                shown += f"[{part}]"
            else:
                key = part if _BARE_KEY.fullmatch(part) else f'"{part}"'
                shown += f".{key}" if shown else key
        return shown

    def _pool_name(self, index: str | int) -> str | None:
        """The name of a pool, if it has one that is its own."""
        pools = self.document["pool"]
        names = [pool.get("name") if isinstance(pool, dict) else None for pool in pools]
        name = names[index] if isinstance(index, int) else None
        return name if isinstance(name, str) and _BARE_KEY.fullmatch(name) and names.count(name) == 1 else None


def _take_config(file: str, document: dict[str, Any]) -> list[Complaint]:
    """Put what `hf_config` says under what [model] says itself."""
    table = document.get("model")
    if not isinstance(table, dict) or "hf_config" not in table:
        return []
    name, path = table.pop("hf_config"), ("model", "hf_config")
    if "preset" in table:
        return [Complaint(path, "and a preset both say what the model is; give one of the two")]
    if not isinstance(name, str) or not name:
        return [Complaint(path, f"is {shown(name)}, expected the path of a config.json")]
    config_file = Path(file).parent / name
    try:
        config = json.loads(config_file.read_bytes())
        if not isinstance(config, dict):
            raise HfConfigError("is not a JSON object")
        values = model_values(config)
    except OSError as error:
        return [
            Complaint(path, f'"{name}" cannot be read: {error.strerror}; looked for {os.path.normpath(config_file)}')
        ]
    except HfConfigError as error:
        return [Complaint(path, f'"{name}" {error}')]
    except (ValueError, RecursionError):
        return [Complaint(path, f'"{name}" is not JSON')]
    for key in DTYPES:
        if key in table:
            values.pop(DTYPES[key][0], None)
    document["model"] = {"name": config_file.resolve().parent.name, **values, **table}
    return []


def _trace_problems(file: str, parts: Parts) -> tuple[list[Complaint], list[Problem]]:
    """What is wrong with the trace or the model that the scenario names: with its place in the scenario, and line by
    line."""
    workload, base_dir = parts.workload, Path(file).parent
    if workload is None:
        return [], []
    if workload.trace is None:
        return _model_problems(workload, base_dir) + _class_problems(parts, set()), []
    trace = workload.trace
    path = base_dir / trace.path
    if not os.path.isfile(path) and not (trace.format == "servegen" and os.path.isdir(path)):
        looked = os.path.normpath(path)
        what = "is not a file" if os.path.exists(path) else "does not exist"
        return [Complaint(("workload", "trace", "path"), f'"{trace.path}" {what}; looked for {looked}')], []
    try:
        timed = workload.arrival is None
        if timed and not says_when(trace, base_dir):
            what = "does not say when requests arrive, expected an arrival process beside it"
            return [Complaint(("workload", "trace", "path"), f'"{trace.path}" {what}')], []
        classes = check_trace(trace, base_dir, timed)
        return _class_problems(parts, classes), []
    except TraceError as error:
        rest = [Problem(str(path), "", f"and {error.more} more lines like these")] if error.more else []
        return [], [*error.problems, *rest]


def _class_problems(parts: Parts, known: set[str]) -> list[Complaint]:
    """Bounds for classes that no request is of would hold for nobody, unnoticed."""
    named = {} if parts.slo is None else parts.slo.classes
    expected = f"expected one of {', '.join(sorted(known))}" if known else "whose requests have no classes"
    return [
        Complaint(("slo", "class", name), f"is no class of the trace, {expected}{did_you_mean(name, known)}")
        for name in named
        if name not in known
    ]


def _model_problems(workload: Workload, base_dir: Path) -> list[Complaint]:
    if workload.like is None:
        return []
    if workload.like not in MODELS and not workload.like.endswith(".toml"):
        known = f"expected one of {', '.join(MODELS)} or the path of a model's .toml"
        hint = did_you_mean(workload.like, MODELS)
        return [Complaint(("workload", "like"), f"is {shown(workload.like)}, {known}{hint}")]
    try:
        load_model(workload.like, base_dir)
    except ModelFileError as error:
        return [Complaint(("workload", "like"), f'"{workload.like}" {error}')]
    return []


def _scenario(file: str, parts: Parts) -> Scenario:
    header = _sound(parts.header)
    return Scenario(
        name=header.name or Path(file).stem,
        seed=header.seed,
        workload=_sound(parts.workload),
        model=_sound(parts.model),
        pools=tuple(_sound(pool) for pool in parts.pools),
        transfer=_sound(parts.transfer),
        network=_sound(parts.network),
        router=_sound(parts.router),
        slo=_sound(parts.slo),
        path=file,
        faults=tuple(fault for fault in parts.fault_list if fault is not None),
        fault_table=_sound(parts.fault_table),
    )


def _sound(part: T | None) -> T:
    """A part of which nothing was complained."""
    assert part is not None
    return part
