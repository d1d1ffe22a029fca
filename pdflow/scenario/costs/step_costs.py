"""The step cost of a pool, by whichever cost model the scenario names: the entry point to all of them.

It reads cost files, the user's and those that come with pdflow in `presets/costs`, and holds them against the pool that
wants to use them: times of another model, GPU or tensor-parallel size are refused, not scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import attrs

from pdflow.cost.roofline import roofline
from pdflow.cost.scale import slower
from pdflow.cost.specs import ModelSpec
from pdflow.cost.step import PS_PER_NS, StepCost, constant, to_ps
from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.costs.cost_file import MOST_BYTES, CostFile, read_cost
from pdflow.scenario.costs.error_bars import error_bar
from pdflow.scenario.reading.convert import Complaint, did_you_mean
from pdflow.scenario.reading.document import ScenarioTables
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.scenario import (
    COST_KINDS,
    AiconfiguratorCost,
    ConstantCost,
    FittedCost,
    MeasuredCost,
    Pool,
    RooflineCost,
)

Shelf: TypeAlias = Literal["fitted", "aiconfigurator"]


class CostError(ValueError):
    """A pool cannot have the cost that it asks for: its key `at` is wrong, or lines of a file, in `problems`."""

    def __init__(self, message: str, *at: str, problems: Iterable[Problem] = ()) -> None:
        super().__init__(message)
        self.at = at
        self.problems = list(problems)


def step_cost(model: ModelSpec, pool: Pool, base_dir: Path) -> StepCost:
    """Return the step cost of one engine of the pool; `base_dir` is the scenario's folder. Raises ScenarioError."""
    return slower(_unscaled_step_cost(model, pool, base_dir), pool.step_time_factor)


def _unscaled_step_cost(model: ModelSpec, pool: Pool, base_dir: Path) -> StepCost:
    try:
        file = _file(model, pool, base_dir)
    except CostError as error:
        raise ScenarioError(error.problems or [Problem("", f"pool.{pool.name}.cost", str(error))]) from None
    match pool.cost:
        case ConstantCost(prefill_s=prefill_s, decode_step_s=decode_step_s):
            return constant(prefill_s, decode_step_s)
        case RooflineCost():
            cost = roofline(
                model,
                pool.gpu,
                pool.tp,
                pool.pp,
                dp=pool.attention_replicas,
                ep=pool.ep,
                expert_balancedness=pool.expert_balancedness,
            )
            return attrs.evolve(cost, rel_error={"all": error_bar(model, pool)})
        case AiconfiguratorCost() as cost_config:
            assert file is not None
            return _with_host_time(file.step_cost(), cost_config, pool)
        case FittedCost() | MeasuredCost():
            assert file is not None
            return file.step_cost()


API_SERVER_S = 0.03
"""Time from a request's arrival at vLLM's API server to its engine's queue. Judged from published rows:
30 ms, sweep 10 to 150 ms; docs/validation.md says how well it does."""


class ApiServerTime(NamedTuple):
    """The time that a request spends at an API server, a constant and a share that grows with its prompt."""

    fixed_ns: int
    per_token_ps: int

    def ns(self, tokens: int) -> int:
        """Return the time of a request whose prompt has so many tokens."""
        return self.fixed_ns + self.per_token_ps * tokens // PS_PER_NS


def api_server_time(pool: Pool) -> ApiServerTime:
    """Return the time at the API server of one of the pool's engines: 0 by default with constant costs, since queueing
    theory has no such delay."""
    absent = 0.0 if isinstance(pool.cost, ConstantCost) else API_SERVER_S
    fixed_s = absent if pool.api_server_s is None else pool.api_server_s
    return ApiServerTime(seconds_to_ns(fixed_s), to_ps(pool.api_server_s_per_token))


def kind_of(pool: Pool) -> str:
    """Return the name that scenarios use for the pool's kind of cost."""
    return next(name for name, kind in COST_KINDS.items() if isinstance(pool.cost, kind))


@functools.cache
def cost_tables(shelf: Shelf) -> Mapping[str, CostFile]:
    """Return the tables that come with pdflow, by name."""
    folder = resources.files("pdflow.scenario").joinpath("presets", "costs", shelf)
    found = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            file, problems = read_cost(entry.name, entry.read_bytes())
            if file is None:
                raise ScenarioError(problems)
            found[entry.name.removesuffix(".json")] = file
    return found


def check_costs(file: str, tables: ScenarioTables) -> tuple[list[Complaint], list[Problem]]:
    """Return everything wrong with the costs that pools ask for, located in the scenario or in the cost file.

    Pools without a `kv_tokens` of their own get that of their cost's file.
    """
    complaints: list[Complaint] = []
    problems: list[Problem] = []
    if tables.model is None:
        return complaints, problems
    for index, pool in enumerate(tables.pools):
        if pool is None:
            continue
        try:
            tables.model.check_parallel(pool.tp, pool.pp)
        except ValueError:
            continue  # Which `validate.py` says.
        try:
            used = _file(tables.model, pool, Path(file).parent)
        except CostError as error:
            complaints += [] if error.problems else [Complaint(("pool", index, *error.at), str(error))]
            problems += error.problems
        else:
            if used is not None and used.engine.kv_tokens is not None and pool.kv_tokens is None:
                tables.pools[index] = attrs.evolve(pool, kv_tokens=used.engine.kv_tokens)
    return complaints, problems


def _has_8_bit_products(model: ModelSpec) -> bool:
    return not {model.activation_dtype, model.expert_products}.isdisjoint(("fp8", "int8"))


def _file(model: ModelSpec, pool: Pool, base_dir: Path) -> CostFile | None:
    """Return the cost file that the pool's cost is from, if it is from one, checked against the pool."""
    if not pool.tp_alone and not isinstance(pool.cost, (RooflineCost, ConstantCost)):
        expected = 'expected "roofline" or "constant" with ep or dp_attention'
        raise CostError(f"has times of engines that share all weights by tensor parallelism; {expected}", "cost")
    match pool.cost:
        case RooflineCost() if pool.gpu.fp8_flops is None and _has_8_bit_products(model):
            key = "activation_dtype" if model.activation_dtype in ("fp8", "int8") else "expert_activation_dtype"
            mismatch = f"{pool.gpu.name} has no fp8_flops, and model.{key} is {getattr(model, key)}"
            raise CostError(f'{mismatch}; choose another GPU, or set model.{key} = "bf16"', "gpu")
        case FittedCost(table=name):
            tables = cost_tables("fitted")
            if name not in tables:
                hint = did_you_mean(name, tables) or ": `pdflow presets` lists them"
                raise CostError(f'is "{name}", expected the name of a cost table{hint}', "cost", "table")
            return _held_against(tables[name], f'"{name}"', "table", model, pool)
        case MeasuredCost(path=name):
            return _held_against(_read(base_dir / name, name), f'"{name}"', "path", model, pool)
        case AiconfiguratorCost() if (model.weight_bytes_per_param == 1) is not (model.activation_dtype == "fp8"):
            wanted = 'expected model.weight_dtype = "fp8" and model.activation_dtype = "fp8", or neither'
            raise CostError(f"has times of 8-bit weights only with 8-bit products; {wanted}", "cost", "model")
        case AiconfiguratorCost() if model.bytes_per_expert_param != model.weight_bytes_per_param:
            raise CostError("has times of experts in the dtype of all weights only (expert_bytes_per_param)", "cost")
        case AiconfiguratorCost():
            file = _stored_table(model, pool)
            if file is None:
                # Brings numpy, which nothing else in loading a scenario needs.
                from pdflow.scenario.costs.aiconfigurator import tabulated

                try:
                    file = tabulated(pool.gpu.name, model.name, pool.tp, model.weight_bytes_per_param)
                except ValueError as error:
                    raise CostError(f"{error}; {_baked(model, pool)}", "cost", "model") from None
            return _held_against(file, "aiconfigurator", "model", model, pool)
    return None


def _stored_table(model: ModelSpec, pool: Pool) -> CostFile | None:
    """Return the table of kernels that comes with pdflow for this pool, if there is one."""
    own = (model.name, pool.gpu.name, pool.tp, model.weight_bytes_per_param)
    for file in cost_tables("aiconfigurator").values():
        engine = file.engine
        if (engine.model, engine.gpu, engine.tp, engine.weight_bytes_per_param) == own:
            return file
    return None


def _read(path: Path, name: str) -> CostFile:
    if path.exists() and not path.is_file():
        raise CostError(f'"{name}" is not a file; looked for {path}', "cost", "path")
    try:
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CostError(f'"{name}" cannot be read: {reason}; looked for {path}', "cost", "path") from None
    file, problems = read_cost(str(path), raw)
    if file is None:
        raise CostError("is wrong", "cost", "path", problems=problems)
    return file


def _held_against(file: CostFile, called: str, key: str, model: ModelSpec, pool: Pool) -> CostFile:
    differences = [
        f"{what} {in_file}, not {own}"
        for what, in_file, own in (
            ("model", file.engine.model, model.name),
            ("gpu", file.engine.gpu, pool.gpu.name),
            ("tp", file.engine.tp, pool.tp),
            ("weight_bytes_per_param", file.engine.weight_bytes_per_param, model.weight_bytes_per_param),
            ("kv_bytes_per_value", file.engine.kv_bytes_per_value, model.kv_bytes_per_value),
        )
        if in_file is not None and in_file != own
    ]
    if differences:
        raise CostError(
            f"{called} has times for {', '.join(differences)}; choose a table or file for this pool", "cost", key
        )
    return file


def _baked(model: ModelSpec, pool: Pool) -> str:
    """Return, as a phrase, the tables that come nearest to what the pool asks for."""
    engines = [file.engine for file in cost_tables("aiconfigurator").values()]
    of_both = [e for e in engines if e.model == model.name and e.gpu == pool.gpu.name]
    near: Iterator[str]
    if of_both:
        near = (f"tp {e.tp}{' in 8 bits' if e.weight_bytes_per_param == 1 else ''}" for e in of_both)
        return f"tables that come with pdflow for {model.name} on {pool.gpu.name}: {', '.join(near)}"
    near = (f"{e.model} on {e.gpu} tp {e.tp}" for e in engines if model.name == e.model or pool.gpu.name == e.gpu)
    listed = ", ".join(near)
    return f"tables that come with pdflow: {listed}" if listed else "`pdflow presets` lists those that come with pdflow"


def _with_host_time(cost: StepCost, cost_config: AiconfiguratorCost, pool: Pool) -> StepCost:
    """Add host time to a cost: the tables are of GPUs alone, without the time in which these wait for the engine's host
    code."""
    step_s = pool.gpu.host_step_s if cost_config.host_step_s is None else cost_config.host_step_s
    seq_s = pool.gpu.host_seq_s if cost_config.host_seq_s is None else cost_config.host_seq_s
    return attrs.evolve(
        cost,
        h0=cost.h0 + to_ps(step_s),
        h1=cost.h1 + to_ps(seq_s),
        provenance=f"{cost.provenance}, host {step_s * 1e3:g} ms + {seq_s * 1e6:g} us per sequence",
    )
