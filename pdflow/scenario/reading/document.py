"""Conversion of a document (plain tables) to the parts of a scenario, presets resolved.

Each table is structured on its own, and a part that is wrong is None, so that the checks that follow can still cover
all others: the author sees every error at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard, TypeVar

import attrs

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.scenario.presets import Kind, Preset, alias_note, find_preset, presets
from pdflow.scenario.reading.convert import Complaint, did_you_mean, nearest, one_of, shown, structure
from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.schema import faults
from pdflow.scenario.schema import scenario as schema
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.noise import Noise
from pdflow.scenario.schema.router import RouterConfig
from pdflow.scenario.schema.scale import Scale
from pdflow.scenario.schema.serve import Serve
from pdflow.scenario.schema.transfer import Transfer
from pdflow.scenario.schema.workload import Workload

T = TypeVar("T")

TABLES: Final[Mapping[str, Any]] = {
    "scenario": schema.Header,
    "workload": Workload,
    "model": ModelSpec,
    "pool": schema.Pool,
    "transfer": Transfer,
    "network": Network,
    "router": RouterConfig,
    "slo": schema.Slo,
    "noise": Noise,
    "scale": Scale,
    "fault": faults.Fault,
    "faults": faults.Faults,
    "serve": Serve,
}
REQUIRED_TABLES: Final = ("workload", "model", "pool")

WEIGHT_DTYPES: Final = {
    "fp64": 8.0,
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5625,
    "int4": 0.52,
}
"""Bytes per weight, scales included: NVFP4 has one of 8 bits for every 16 weights, GPTQ and AWQ one of 16 bits and a
zero for every 128."""
KV_DTYPES: Final = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
DTYPES: Final[Mapping[str, tuple[str, Mapping[str, float]]]] = {
    "weight_dtype": ("weight_bytes_per_param", WEIGHT_DTYPES),
    "kv_dtype": ("kv_bytes_per_value", KV_DTYPES),
}
"""Keys of [model] that give a size by a dtype's name. That of KV is kept beside the size: engines compute in it."""
LINKS_FILE: Final = ".toml"
"""The suffix of link presets that are files."""


@attrs.define
class ScenarioTables:
    """The tables of a document; None where one is wrong or missing. Lists have the document's order and length.

    `workload_keys` are what [workload] says, rightly or wrongly.
    """

    workload_keys: frozenset[str] | None = None
    header: schema.Header | None = None
    workload: Workload | None = None
    model: ModelSpec | None = None
    pools: list[schema.Pool | None] = attrs.field(factory=list)
    transfer: Transfer | None = None
    network: Network | None = None
    router: RouterConfig | None = None
    slo: schema.Slo | None = None
    noise: Noise | None = None
    scales: list[Scale | None] = attrs.field(factory=list)
    fault_list: list[faults.Fault | None] = attrs.field(factory=list)
    fault_table: faults.Faults | None = None
    serve: Serve | None = None


def read_document(document: Mapping[str, Any]) -> tuple[ScenarioTables, list[Complaint]]:
    """Return the tables of a document and everything wrong with them, each on its own."""
    found: list[Complaint] = []
    for key in document:
        if key not in TABLES:
            hint = did_you_mean(key, TABLES) or f", expected one of {', '.join(TABLES)}"
            found.append(Complaint((key,), "unknown table" + hint))
    for key in REQUIRED_TABLES:
        if key not in document and not any(nearest(other, TABLES) == key for other in document if other not in TABLES):
            written = f"[[{key}]]" if key == "pool" else f"[{key}]"
            hint = ": name a preset in it, or a model's folder in serve.model" if key == "model" else ""
            found.append(Complaint((), f"the table {written} is missing{hint}"))
    tables = ScenarioTables()
    tables.header = _table(document.get("scenario", {}), schema.Header, ("scenario",), found)
    if "workload" in document:
        if isinstance(document["workload"], Mapping):
            tables.workload_keys = frozenset(document["workload"])
        tables.workload = _table(document["workload"], Workload, ("workload",), found)
    if "model" in document:
        tables.model = _model(document["model"], found)
    if "pool" in document:
        tables.pools = _pools(document["pool"], found)
    tables.transfer = _table(document.get("transfer", {}), Transfer, ("transfer",), found)
    tables.network = _network(document.get("network", {}), found)
    tables.router = _table(document.get("router", {}), RouterConfig, ("router",), found)
    tables.slo = _table(document.get("slo", {}), schema.Slo, ("slo",), found)
    tables.noise = _table(document.get("noise", {}), Noise, ("noise",), found)
    tables.scales = _tables(document.get("scale", []), Scale, "scale", found)
    tables.fault_list = _tables(document.get("fault", []), faults.Fault, "fault", found)
    tables.fault_table = _table(document.get("faults", {}), faults.Faults, ("faults",), found)
    tables.serve = _table(document.get("serve", {}), Serve, ("serve",), found)
    return tables, found


def _table(value: object, into: type[T], path: KeyPath, found: list[Complaint]) -> T | None:
    structured, complaints = structure(value, into)
    found += [attrs.evolve(complaint, path=(*path, *complaint.path)) for complaint in complaints]
    return structured


def _network(table: object, found: list[Complaint]) -> Network | None:
    if not isinstance(table, Mapping):
        return _table(table, Network, ("network",), found)
    name = table.get("preset", "rdma-400g")
    if is_links_file(name):
        return _table(table, Network, ("network",), found)
    preset = _preset_of("links", name, ("network", "preset"), found)
    if preset is None:
        ideal = presets("links")["ideal"]
        _table({**ideal.values, **table, "preset": ideal.name}, Network, ("network",), found)
        return None
    return _table({**preset.values, **table}, Network, ("network",), found)


def is_links_file(name: object) -> TypeGuard[str]:
    """True if a link preset is a file of the user's, whose values the loader puts into the table."""
    return isinstance(name, str) and name.endswith(LINKS_FILE)


def _model(table: object, found: list[Complaint]) -> ModelSpec | None:
    if not isinstance(table, Mapping):
        return _table(table, ModelSpec, ("model",), found)
    before = len(found)
    own = {key: value for key, value in table.items() if key not in ("preset", *DTYPES)}
    for key, (field, sizes) in DTYPES.items():
        dtype = table.get(key)
        if dtype is None:
            continue
        if field in own:
            found.append(Complaint(("model", key), f"sets the same value as {field}; remove one of the two"))
        elif not isinstance(dtype, str) or dtype not in sizes:
            found.append(Complaint(("model", key), str(one_of(dtype, sizes))))
        else:
            own[field] = sizes[dtype]
            if key == "kv_dtype":
                own[key] = dtype
            if dtype == "fp4":
                own.setdefault("activation_dtype", dtype)
    model = _specified(own, table.get("preset"), "models", ModelSpec, ("model",), found)
    return model if len(found) == before or model is None else _if_harmless(model, found[before:])


def _pools(value: object, found: list[Complaint]) -> list[schema.Pool | None]:
    if not isinstance(value, list):
        hint = ": write [[pool]]" if isinstance(value, Mapping) else ""
        found.append(Complaint(("pool",), f"is {shown(value)}, expected an array of tables{hint}"))
        return []
    return [_pool(table, ("pool", index), found) for index, table in enumerate(value)]


def _tables(value: object, into: Any, key: str, found: list[Complaint]) -> list[Any]:
    """Structure an array of tables of one kind, or of kinds that a key tells apart."""
    if not isinstance(value, list):
        hint = f": write [[{key}]]" if isinstance(value, Mapping) else ""
        found.append(Complaint((key,), f"is {shown(value)}, expected an array of tables{hint}"))
        return []
    return [_table(table, into, (key, index), found) for index, table in enumerate(value)]


def _pool(table: object, path: KeyPath, found: list[Complaint]) -> schema.Pool | None:
    """Structure a pool. Its GPU is resolved first; a sound one replaces a wrong one while other keys are checked."""
    if not isinstance(table, Mapping) or "gpu" not in table:
        return _table(table, schema.Pool, path, found)
    gpu = _gpu(table["gpu"], (*path, "gpu"), found)
    pool = _table({**table, "gpu": gpu or _some_gpu()}, schema.Pool, path, found)
    return pool if gpu is not None else None


def _some_gpu() -> GpuSpec | None:
    name, preset = next(iter(presets("gpus").items()))
    return structure({"name": name, **preset.values}, GpuSpec)[0]


def _gpu(value: object, path: KeyPath, found: list[Complaint]) -> GpuSpec | None:
    if isinstance(value, str):
        return _specified({}, value, "gpus", GpuSpec, path, found, preset_at=path)
    if isinstance(value, Mapping):
        own = {key: inner for key, inner in value.items() if key != "preset"}
        return _specified(own, value.get("preset"), "gpus", GpuSpec, path, found)
    names = ", ".join(presets("gpus"))
    found.append(Complaint(path, f"is {shown(value)}, expected a preset's name ({names}) or a table"))
    return None


def _specified(
    own: Mapping[str, Any],
    preset: object,
    kind: Kind,
    into: type[T],
    path: KeyPath,
    found: list[Complaint],
    *,
    preset_at: KeyPath | None = None,
) -> T | None:
    """Structure a spec of a preset's values under the table's own; without a preset the table must have them all."""
    if preset is None:
        return _table(own, into, path, found)
    base = _preset_of(kind, preset, preset_at or (*path, "preset"), found)
    return None if base is None else _table({"name": base.name, **base.values, **own}, into, path, found)


def _preset_of(kind: Kind, name: object, path: KeyPath, found: list[Complaint]) -> Preset | None:
    preset = find_preset(kind, name) if isinstance(name, str) else None
    if preset is not None:
        return preset
    hint = did_you_mean(name, presets(kind)) if isinstance(name, str) else ""
    hint = hint or ": `pdflow presets` lists them"
    found.append(Complaint(path, f"is {shown(name)}, expected a preset's name{hint}"))
    return None


def alias_notes(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each alias among the GPUs of a sound document: which preset was taken, for which pools."""
    pools: dict[str, list[str]] = {}
    for table in document["pool"]:
        gpu = table["gpu"]
        name = gpu.get("preset") if isinstance(gpu, Mapping) else gpu
        if name is not None and (note := alias_note("gpus", name)):
            pools.setdefault(note, []).append(f"pool.{table['name']}.gpu")
    return tuple(f"{', '.join(keys)}: {note}" for note, keys in pools.items())


def _if_harmless(value: T, complaints: list[Complaint]) -> T | None:
    return value if all(complaint.unknown for complaint in complaints) else None
