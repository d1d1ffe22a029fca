"""Loading of a scenario file into a Scenario, or one ScenarioError with everything wrong with it and where.

This is the one module of the package that reads files. Paths in a scenario are relative to its file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from pdflow.cost.specs import ModelSpec
from pdflow.errors import Problem, ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow.scenario.costs.step_costs import check_costs
from pdflow.scenario.hf.config import DTYPES as HF_DTYPES
from pdflow.scenario.hf.config import computed_dtype, model_name, model_note, model_values
from pdflow.scenario.hf.keys import HfConfigError
from pdflow.scenario.hf.quantisation import QUANT_CONFIG, with_quant_config
from pdflow.scenario.reading.convert import Complaint, did_you_mean, shown, structure
from pdflow.scenario.reading.document import DTYPES, ScenarioTables, alias_notes, is_links_file, read_document
from pdflow.scenario.reading.draft import Draft
from pdflow.scenario.reading.locate import KeyPath, key_lines
from pdflow.scenario.schema.router import RouterConfig
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.schema.workload import FIRST_TURN, LATER_TURNS, MODELS, Workload
from pdflow.scenario.validation.fit import as_kept
from pdflow.scenario.validation.ignored import ignored_keys
from pdflow.scenario.validation.scenario import check
from pdflow.workload.model_file import ModelFileError
from pdflow.workload.traces.complaints import TraceError
from pdflow.workload.traces.readers import check_trace, has_arrival_times, load_model

if TYPE_CHECKING:
    from pdflow.scenario.transfer_config import TransferConfig

T = TypeVar("T")

SPECIFYING: Final = frozenset(
    field.name for field in attrs.fields(ModelSpec) if field.default is attrs.NOTHING and field.name != "name"
)
"""The keys of [model] that together specify a model; its name can come from elsewhere."""
_LINE_OF_ERROR: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def load(path: str | os.PathLike[str], *, overrides: Iterable[str] = (), seed: int | None = None) -> ResolvedScenario:
    """Read, override, resolve and check one scenario file.

    `overrides` are KEY=VALUE texts as `--set` takes them. Raises ScenarioError with every problem found.
    """
    draft = read(path)
    draft.override(overrides, seed)
    return resolve(draft)


def read(path: str | os.PathLike[str]) -> Draft:
    """Read a scenario file without resolving it. Raises ScenarioError for what is no TOML."""
    file = os.fspath(path)
    return parse(file, _read(file))


def parse(file: str, text: str) -> Draft:
    """Parse a TOML text as the content of that file. Raises ScenarioError."""
    return Draft(file, _parse(file, text), key_lines(text))


def resolve(draft: Draft) -> ResolvedScenario:
    """Resolve a draft's presets and other files, and check it; the draft stays as it is. Raises ScenarioError."""
    file = draft.file
    document, of_model, of_windows = _with_config(file, _with_served_dtype(file, draft.document))
    config, of_config = _transfer_config(file, document)
    if config is not None:
        document = config.under(document)
        draft = attrs.evolve(draft, overridden={**draft.overridden, **_config_locations(draft, config)})
    written = document
    document, of_links, links_locations = _with_links(draft.file, document)
    if links_locations:
        draft = attrs.evolve(draft, overridden={**links_locations, **draft.overridden})
    tables, complaints = read_document(document)
    complaints += of_links
    if of_model:
        # Whatever else is missing in [model] would have come from there.
        complaints = of_model + [complaint for complaint in complaints if complaint.path[:1] != ("model",)]
    if of_config:
        complaints += of_config
        tables.transfer = None  # which method it is would have come from there
    of_method: tuple[str, ...] = ()
    if tables.model is not None and tables.transfer is not None:
        tables.model, note = as_kept(tables.model, tables.transfer, [pool for pool in tables.pools if pool is not None])
        of_method = (note,) if note else ()
    of_costs, of_cost_files = check_costs(file, tables)
    complaints += of_costs
    complaints += check(tables)
    of_path, of_lines = _trace_problems(file, tables)
    problems = draft.problems(complaints + of_path) + of_lines + of_cost_files
    if problems:
        raise ScenarioError(problems)
    from_config = () if config is None else tuple(config.summary_lines())
    of_keys = () if config is None else _config_notes(draft, config)
    of_ignored = map(str, draft.problems(ignored_keys(written, tables)))
    notes = (*alias_notes(document), *of_windows, *of_method, *of_keys, *of_ignored)
    return _scenario(file, tables, from_config, notes)


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
        raise ScenarioError([Problem(f"{file}:{line}", "", "is not UTF-8 text; save it as UTF-8")]) from None


def _parse(file: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ScenarioError([Problem(f"{file}:1", "", "is nested too deeply")]) from None
    except ValueError as error:
        message = str(error)
        match = _LINE_OF_ERROR.search(message)
        line = int(match[1]) if match and match[1] else text.count("\n") + 1
        column = f", column {match[2]}" if match and match[2] else ""
        reason = message[: match.start()] if match else message
        problem = Problem(f"{file}:{line}", "", f"is not TOML: {reason}{column}")
        raise ScenarioError([problem]) from None


def _with_served_dtype(file: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document with the dtype of the folder in `serve.model`, which torch engines compute in and keep KV in,
    unless [model] has one for KV. It counts before a preset's and `hf_config`'s, which may be of another copy of the
    model.

    A folder that cannot be read changes nothing here: a simulation does not need it, and `serve` refuses it.
    """
    model, serve, pools = (document.get(table) for table in ("model", "serve", "pool"))
    if not (isinstance(model, Mapping) and isinstance(serve, Mapping) and isinstance(pools, list)):
        return document
    folder = serve.get("model")
    computed = any(isinstance(pool, Mapping) and pool.get("engine") == "torch" for pool in pools)
    if not computed or not isinstance(folder, str) or not {"kv_dtype", "kv_bytes_per_value"}.isdisjoint(model):
        return document
    try:
        config = json.loads((Path(file).parent / folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return document
    dtype = computed_dtype(config) if isinstance(config, dict) else None
    return document if dtype is None else {**document, "model": {**model, "kv_dtype": HF_DTYPES[dtype]}}


def _with_config(file: str, document: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Complaint], tuple[str, ...]]:
    """Return the document with the values of `hf_config`, or of the folder in `serve.model` where [model] does not
    specify a model, under those that [model] has itself; what is wrong with it, and notes on it."""
    table = document.get("model", {})
    if not isinstance(table, Mapping):
        return document, [], ()
    own = {key: value for key, value in table.items() if key != "hf_config"}
    if "hf_config" in table:
        values, complaints, notes = _config_values(file, table["hf_config"], own, ("model", "hf_config"))
    elif (folder := _specifying_folder(document, own)) is not None:
        values, complaints, notes = _config_values(file, f"{folder}/config.json", own, ("serve", "model"))
    else:
        return document, [], ()
    return {**document, "model": {**values, **own}}, complaints, notes


def _specifying_folder(document: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return the folder in `serve.model` if the model is specified there alone: [model] is absent, or has neither a
    preset nor all values."""
    serve = document.get("serve")
    folder = serve.get("model") if isinstance(serve, Mapping) else None
    if not isinstance(folder, str) or not folder or "preset" in own or own.keys() >= SPECIFYING:
        return None
    return folder


def _config_values(
    file: str, name: object, own: Mapping[str, Any], path: KeyPath
) -> tuple[dict[str, Any], list[Complaint], tuple[str, ...]]:
    """Return the values of a config.json that [model] does not have itself. `path`: the key that names the file."""
    if "preset" in own:
        return {}, [Complaint(path, "cannot be combined with preset; remove one of the two")], ()
    if not isinstance(name, str) or not name:
        return {}, [Complaint(path, f"is {shown(name)}, expected the path of a config.json")], ()
    config_file = Path(file).parent / name
    try:
        config = json.loads(config_file.read_bytes())
        if not isinstance(config, dict):
            raise HfConfigError("is not a JSON object")
        config = _with_quant_config(config, config_file)
        values = model_values(config)
    except OSError as error:
        looked = os.path.normpath(config_file)
        return {}, [Complaint(path, f'"{name}" cannot be read: {error.strerror}; looked for {looked}')], ()
    except HfConfigError as error:
        return {}, [Complaint(path, f'"{name}" {error}')], ()
    except (ValueError, RecursionError):
        return {}, [Complaint(path, f'"{name}" is not JSON')], ()
    for key, (field, _) in DTYPES.items():
        if key in own or field in own:
            values.pop(key, None)
            values.pop(field, None)
            if key == "weight_dtype":
                values.pop("expert_bytes_per_param", None)
                if values.pop("expert_activation_dtype", None) or values.get("activation_dtype") == "fp4":
                    values.pop("activation_dtype", None)
    spec, _ = structure({"name": "", **values, **{key: own[key] for key in own if key in values}}, ModelSpec)
    name_of = model_name(config, None if spec is None else spec.parameters)
    note = model_note(config)
    return {"name": name_of, **values}, [], (f"{'.'.join(map(str, path))}: {note}",) if note else ()


def _with_quant_config(config: Mapping[str, Any], config_file: Path) -> Mapping[str, Any]:
    """Return a config.json with what hf_quant_config.json next to it says. Raises OSError, ValueError and
    HfConfigError."""
    file = config_file.with_name(QUANT_CONFIG)
    if not file.exists():
        return config
    quant_config = json.loads(file.read_bytes())
    if not isinstance(quant_config, dict):
        raise HfConfigError(f"has a {QUANT_CONFIG} next to it that is not a JSON object")
    return with_quant_config(config, quant_config)


def _with_links(
    file: str, document: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[Complaint], dict[KeyPath, str]]:
    """Return the document with the values of the user's own link preset under those that [network] has itself, and the
    locations of these values. The file has the form of pdflow's presets; `pdflow calibrate` writes such a file."""
    table = document.get("network")
    name = table.get("preset") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not is_links_file(name):
        return document, [], {}
    links_file = Path(file).parent / name
    where = os.path.normpath(links_file)
    values: Any = None
    try:
        text = _read_text(links_file, "TOML")
        values = _parse(where, text).get("values")
        wrong = (
            None
            if isinstance(values, Mapping)
            else "has no table [values]; expected a file as `pdflow calibrate` writes links.toml"
        )
    except _UnreadableError as error:
        wrong = str(error)
    except ScenarioError as error:
        wrong = "; ".join(str(problem) for problem in error.problems)
    if wrong is not None:
        own = {key: value for key, value in table.items() if key != "preset"}
        return {**document, "network": own}, [Complaint(("network", "preset"), f'"{name}" {wrong}')], {}
    lines = key_lines(text)
    locations: dict[KeyPath, str] = {
        ("network", key): f"{where}:{lines['values', key]}" for key in values if key not in table
    }
    return {**document, "network": {**values, **table}}, [], locations


class _UnreadableError(Exception):
    """A file that a scenario names cannot be read; the message follows the file's name."""


def _read_text(path: Path, form: str) -> str:
    """Read the text of a file that a scenario names, of that form. Raises _UnreadableError."""
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise _UnreadableError(f"is not UTF-8 text, expected {form}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _UnreadableError(f"cannot be read: {reason}; looked for {os.path.normpath(path)}") from None


def _transfer_config(file: str, document: Mapping[str, Any]) -> tuple[TransferConfig | None, list[Complaint]]:
    """Return the values of the file that [transfer] names, without those that the scenario has itself."""
    table = document.get("transfer")
    name = table.get("config") if isinstance(table, Mapping) else None
    if not isinstance(name, str) or not name:
        return None, []
    # Its classes take a tenth of pdflow's start, and few scenarios need them.
    from pdflow.scenario.transfer_config import TransferConfigError, read_transfer_config

    config_file = Path(file).parent / name
    try:
        return read_transfer_config(_read_text(config_file, "JSON"), document).not_overridden_by(document), []
    except (TransferConfigError, _UnreadableError) as error:
        wrong = str(error)
    return None, [Complaint(("transfer", "config"), f'"{name}" {wrong}')]


def _config_locations(draft: Draft, config: TransferConfig) -> dict[KeyPath, str]:
    """Return the locations of the values that came from such a file."""
    return {value.key: _config_location(draft, config.line(value)) for value in config.values}


def _config_notes(draft: Draft, config: TransferConfig) -> tuple[str, ...]:
    """Return what the scenario does not honour of such a file, with the locations."""
    return tuple(f"{_config_location(draft, config.lines.get(path))}: {text}" for path, text in config.notes)


def _config_location(draft: Draft, line: int | None) -> str:
    name = os.path.normpath(Path(draft.file).parent / draft.document["transfer"]["config"])
    return name if line is None else f"{name}:{line}"


def _trace_problems(file: str, tables: ScenarioTables) -> tuple[list[Complaint], list[Problem]]:
    """Return everything wrong with the trace or the model that the scenario names: complaints about its keys, and
    problems of the file's lines."""
    workload, base_dir = tables.workload, Path(file).parent
    if workload is None:
        return [], []
    if workload.trace is None:
        classes = set() if workload.sessions is None else {FIRST_TURN, LATER_TURNS}
        return _model_problems(workload, base_dir) + _class_problems(tables, classes), []
    trace = workload.trace
    path = base_dir / trace.path
    if not os.path.isfile(path) and not (trace.format == "servegen" and os.path.isdir(path)):
        looked = os.path.normpath(path)
        what = "is not a file" if os.path.exists(path) else "does not exist"
        return [Complaint(("workload", "trace", "path"), f'"{trace.path}" {what}; looked for {looked}')], []
    try:
        timed = workload.arrival is None
        if timed and not has_arrival_times(trace, base_dir):
            what = "has no arrival times; set workload.arrival too"
            return [Complaint(("workload", "trace", "path"), f'"{trace.path}" {what}')], []
        classes = check_trace(trace, base_dir, timed)
        return _class_problems(tables, classes), []
    except TraceError as error:
        rest = [Problem(str(path), "", f"and {error.more} more problems of this kind")] if error.more else []
        return [], [*error.problems, *rest]


def _class_problems(tables: ScenarioTables, known: set[str]) -> list[Complaint]:
    """Refuse bounds for classes that no request is of, which would otherwise have no effect and go unnoticed."""
    named = {} if tables.slo is None else tables.slo.classes
    expected = f"expected one of {', '.join(sorted(known))}" if known else "but its requests have no classes"
    return [
        Complaint(("slo", "class", name), f"is no class of the workload, {expected}{did_you_mean(name, known)}")
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


def _scenario(
    file: str, tables: ScenarioTables, from_config: tuple[str, ...], notes: tuple[str, ...]
) -> ResolvedScenario:
    header = _sound(tables.header)
    return ResolvedScenario(
        name=_as_text(header.name or Path(file).stem),
        seed=header.seed,
        workload=_sound(tables.workload),
        model=_sound(tables.model),
        pools=tuple(_sound(pool) for pool in tables.pools),
        transfer=_sound(tables.transfer),
        network=_sound(tables.network),
        router=_with_attempts(_sound(tables.router), tables),
        slo=_sound(tables.slo),
        noise=_sound(tables.noise),
        path=file,
        scales=tuple(scale for scale in tables.scales if scale is not None),
        faults=tuple(fault for fault in tables.fault_list if fault is not None),
        fault_table=_sound(tables.fault_table),
        serve=_sound(tables.serve),
        from_config=from_config,
        notes=notes,
    )


def _with_attempts(router: RouterConfig, tables: ScenarioTables) -> RouterConfig:
    """Return the router's table with a second attempt where another engine could make it.

    Routers of published systems do not retry.
    """
    engines = Counter({"prefill": 0, "decode": 0})
    for pool in map(_sound, tables.pools):
        engines[pool.leg] += pool.replicas
    alone = max(engines.values()) == 1 and not tables.scales
    transfer = _sound(tables.transfer)
    published = METHODS[transfer.method].is_published(transfer.dialect)
    if router.max_attempts is not None or router.on_failure is not None or alone or published:
        return router
    return attrs.evolve(router, max_attempts=2)


def _as_text(name: str) -> str:
    """Return a name from the command line as results, which are UTF-8, can have it: what the locale could not decode is
    UTF-8 too, or becomes escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _sound(table: T | None) -> T:
    """Return a table that has no complaint."""
    assert table is not None
    return table
