"""Scenarios and presets as tables for a terminal, readable at 80 columns. Decides words and columns, no figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdflow.cost.specs import ModelSpec
from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.costs.cost_file import CostFile
from pdflow.scenario.costs.step_costs import Shelf, cost_tables, step_cost
from pdflow.scenario.presets import ALIASES, Kind, Preset, alias_note, presets
from pdflow.scenario.reading.convert import did_you_mean
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.summary import faults_summary, noise_summary, pool_summary, posting_summary, workload_summary
from pdflow.scenario.validation.resolution import resolution_of

_KINDS: tuple[tuple[Kind, str], ...] = (("models", "model"), ("gpus", "GPU"), ("links", "network"))
_SHELVES: tuple[Shelf, ...] = ("fitted", "aiconfigurator")


def scenario_view(scenario: ResolvedScenario) -> RenderableType:
    """Return the view of a sound scenario: its engines, their KV capacity, and the bandwidth of its links."""
    model, transfer = scenario.model, scenario.transfer
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim")
    head.add_column(overflow="fold")
    head.add_row("scenario", f"{scenario.name}, seed {scenario.seed}")
    head.add_row("workload", workload_summary(scenario))
    head.add_row("model", f"{model.name}: {_si(model.weight_bytes)}B of weights, {_kv(model)}")
    head.add_row("transfer", f"{transfer.method}, {transfer.dialect}")
    if any(pool.role == "decode" for pool in scenario.pools):
        head.add_row("posting", posting_summary(scenario))
    if scenario.from_config:
        head.add_row("config", f"{transfer.config}: {', '.join(scenario.from_config)}")
    for note in scenario.notes:
        head.add_row("note", note)
    head.add_row("router", str(scenario.router))
    head.add_row("network", _nic(scenario.network))
    for link in scenario.network.links:
        head.add_row("link", f"{link.name}: {_rate(link.bandwidth_bytes_per_s)}, {_time(link.latency_s)}")
    for path in scenario.network.paths:
        head.add_row("path", f"{path.from_pool} to {path.to_pool} via {', '.join(path.via)}")
    for times, pools in _step_times(scenario).items():
        head.add_row("cost", f"{', '.join(pools)}: {times}")
    head.add_row("noise", noise_summary(scenario))
    for scale in scenario.scales:
        head.add_row("scale", str(scale))
    if scenario.faults:
        head.add_row("faults", faults_summary(scenario))
        if scenario.fault_table.heal_s is not None:
            head.add_row(
                "healed", f"at {scenario.fault_table.heal_s:g} s; then all ends within {resolution_of(scenario)}"
            )
    return Group(head, Text(), _pool_table(scenario))


def _kv(model: ModelSpec) -> str:
    """Return what a context keeps, layers with a window apart."""
    whole = f"KV {model.kv_bytes_per_token:,} B/token"
    if model.window is None or not model.dropping_layers:
        return whole
    windowed = model.dropping_layers * model.kv_bytes_per_layer
    return f"{whole}, and {windowed:,} B/token of the latest {model.window.tokens:,}"


def _step_times(scenario: ResolvedScenario) -> dict[str, list[str]]:
    """Return the pools by the source and error bars of their step times."""
    found: dict[str, list[str]] = {}
    for pool in scenario.pools:
        cost = step_cost(scenario.model, pool, scenario.base_dir)
        bar = ", ".join(f"{metric.upper()} {error}".removeprefix("ALL ") for metric, error in cost.rel_error.items())
        found.setdefault(f"{cost.provenance}; {bar}", []).append(pool.name)
    return found


def _pool_table(scenario: ResolvedScenario) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("pool", overflow="fold")
    table.add_column("role")
    table.add_column("engines", justify="right")
    table.add_column("GPUs each")
    table.add_column("weights\nper GPU", justify="right")
    table.add_column("KV tokens\nper engine", justify="right")
    table.add_column("KV bytes\nper engine", justify="right")
    for pool in scenario.pools:
        row = pool_summary(scenario, pool)
        table.add_row(
            row.name,
            row.role,
            f"{row.engines:,}",
            f"{row.gpus_per_engine} x {row.gpu}",
            _si(row.weight_bytes_per_gpu) + "B",
            f"{row.kv_tokens:,}",
            _si(row.kv_bytes) + "B",
        )
    return table


def _nic(network: Network) -> str:
    if network.bandwidth_bytes_per_s is None:
        return f"{network.preset}: unlimited, {_time(network.latency_s)}"
    costs = f"{_time(network.per_message_s)} per transfer, {_time(network.per_descriptor_s)} per descriptor"
    nic = f"{_rate(network.bandwidth_bytes_per_s)} per NIC"
    if network.nics_per_rank > 1:
        nic += f", {network.nics_per_rank} per GPU"
    if network.slice_bytes:
        nic += f" in slices of {network.slice_bytes:,} bytes"
    return f"{network.preset}: {nic}, {_time(network.latency_s)}, {costs}"


def presets_view(names: Iterable[str]) -> RenderableType:
    """Return every preset in a line, or values and sources of those named. Raises ScenarioError for a wrong name."""
    selected = list(names)
    if not selected:
        lists = [renderable for kind, title in _KINDS for renderable in _list(kind, title)]
        return Group(*lists, *(renderable for shelf in _SHELVES for renderable in _cost_list(shelf)))
    tables = {name: file for shelf in _SHELVES for name, file in cost_tables(shelf).items()}
    known = {name for kind, _ in _KINDS for name in presets(kind)} | set(tables)
    aliases = {name: target for named in ALIASES.values() for name, target in named.items()}
    notes = [note for kind, _ in _KINDS for name in selected if (note := alias_note(kind, name))]
    selected = list(dict.fromkeys(aliases.get(name, name) for name in selected))
    wrong = [name for name in selected if name not in known]
    if wrong:
        raise ScenarioError(
            Problem("", "", f"no preset is named {name}; `pdflow presets` lists all{did_you_mean(name, known)}")
            for name in wrong
        )
    shown: list[RenderableType] = [Text(f"{note}\n") for note in notes]
    for kind, title in _KINDS:
        for preset in presets(kind).values():
            if preset.name in selected:
                shown += [
                    Text.assemble(f"{title} ", (preset.name, "bold"), f": {preset.summary}"),
                    _values(preset),
                    Text(),
                ]
    for name, file in tables.items():
        if name in selected:
            shown += [Text.assemble("cost table ", (name, "bold"), f": {file.provenance}"), _cost(file), Text()]
    return Group(*shown[:-1])


def _cost_list(shelf: Shelf) -> Iterable[RenderableType]:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, file in cost_tables(shelf).items():
        medians = {row.of: f"{row.of} {row.median:.1%}" for row in file.errors if row.of in ("prefill", "decode")}
        table.add_row("  " + name, ", ".join(medians.values()))
    return Text(f'cost tables, cost.model = "{shelf}", with their median errors'), table


def _cost(file: CostFile) -> Table:
    """Return the description of a cost table, with its errors on rows that it was not fitted on."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in file.errors:
        spread = f"median {row.median:.1%}, p95 {row.p95:.1%}, at most {row.max:.1%}, on average {row.bias:+.1%}"
        table.add_row("  error", f"{row.of}, {row.rows} rows held out: {spread}")
    for metric, bar in file.step_cost().rel_error.items():
        table.add_row("  error bar", f"{metric.upper()} {bar}")
    if file.engine.kv_tokens is not None:
        table.add_row("  kv_tokens", f"{file.engine.kv_tokens:,}")
    made = file.made_from
    table.add_row("  source", made.source)
    for title, texts in (("fitted on", made.fitted_on), ("held out", made.held_out), ("note", made.notes)):
        for text in texts:
            table.add_row("  " + title, text)
    return table


def _list(kind: Kind, title: str) -> Iterable[RenderableType]:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for preset in presets(kind).values():
        aliases = [alias for alias, name in ALIASES[kind].items() if name == preset.name]
        table.add_row("  " + preset.name, preset.summary + (f"; also {', '.join(aliases)}" if aliases else ""))
    return Text(f"{title}s"), table


def _values(preset: Preset) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(style="dim", overflow="fold")
    before = ""
    for key, value in preset.values.items():
        source = preset.sources[key]
        inside = value.items() if isinstance(value, Mapping) else ()
        rows = [(f"{key}.{name}", entry) for name, entry in inside] or [(key, value)]
        for name, entry in rows:
            table.add_row("  " + name, _plain(entry), source if source != before else "the same")
            before = source
    return table


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rate(bytes_per_s: int | None) -> str:
    return "unlimited" if bytes_per_s is None else _si(bytes_per_s) + "B/s"


def _si(number: float) -> str:
    """Format a number with three figures and a decimal prefix: "671 M"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"
