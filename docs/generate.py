"""Writes what can be generated in the documentation: python docs/generate.py

    README.md              what the first command prints; the errors that docs/validation.md states
    docs/scenario.md       every key of a scenario file, from the schema that the loader uses
    docs/costs.md          the cost tables that come with pdflow, and their errors
    docs/cli.md            every command and option, from the command itself
    docs/architecture.md   the lifecycle of one request, from the events of a run
    docs/spec.md           messages, state tables, timers and guards, from the protocol's own tables (pdflow/protocol);
                           the outcome of every race in each dialect, from searching them all: half a minute
    docs/check.md          which pairs of faults are covered by which searches, from the scopes' budgets
    docs/requests.md       the fields of requests, from the table that requests are checked by
    docs/mutants.md        what became of every mutant, from hunting them all: some seconds

A generated part stands between `<!-- NAME -->` and `<!-- /NAME -->`. tests/docs/test_generated.py compares, so that
none of this can be wrong for long.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from pdflow.cli import cli
from pdflow.cost.layers import LinearAttentionSpec, SparseAttentionSpec, WindowSpec
from pdflow.cost.specs import GpuSpec, MlaSpec, ModelSpec, MoeDims
from pdflow.methods.catalogue import METHODS
from pdflow.methods.posting import CONNECTORS
from pdflow.methods.show import facts
from pdflow.protocol import diagrams, dialect, messages, phases, timers
from pdflow.protocol.diagrams import docstrings
from pdflow.protocol.wire import formats
from pdflow.results.files.events import read_events
from pdflow.scenario.costs.error_bars import error_bars, interval
from pdflow.scenario.costs.step_costs import Shelf, cost_tables
from pdflow.scenario.schema.jsonschema import schema_json
from pdflow_runtime.http.openai.parameters import no_effect_rows, refused_rows, used_rows
from pdflow_sim.check.mutants.page import page as mutants_page
from pdflow_sim.check.races.page import races_part
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.pair_coverage import covered, pair_lines
from pdflow_sim.observe.text_trace import one_request

ROOT = Path(__file__).resolve().parents[1]
MAIN_JOB = ("simulate", "examples/conversation.toml")

Schema = Mapping[str, Any]


def pages() -> dict[str, str]:
    """Every document with a generated part, as it should be now."""
    generated = {
        "README.md": {
            "output": fenced(printed(*MAIN_JOB)),
            "methods": "\n".join(method_rows()) + "\n",
            "accuracy": "\n".join(accuracy_rows((ROOT / "docs/validation.md").read_text(encoding="utf-8"))) + "\n",
        },
        "docs/methods.md": {"methods": "\n".join(method_pages())},
        "docs/simulator.md": {"connectors": "\n".join(connector_rows()) + "\n"},
        "docs/scenario.md": {"keys": "\n".join(scenario_keys())},
        "docs/costs.md": {"tables": "\n".join(cost_rows()), "error bars": "\n".join(error_bar_rows())},
        "docs/cli.md": {"commands": "\n".join(commands())},
        "docs/explain.md": explained(),
        "docs/architecture.md": {"lifecycle": fenced("\n".join(request_lifecycle()) + "\n")},
        "docs/spec.md": {**protocol_parts(), "races": races_part()},
        "docs/requests.md": {
            "used": "\n".join(used_rows()) + "\n",
            "refused": "\n".join(refused_rows()) + "\n",
            "no effect": "\n".join(no_effect_rows()) + "\n",
        },
        "docs/check.md": {"pairs": fenced("\n".join(pair_lines(covered(SCOPES, {}))) + "\n")},
    }
    return {
        **{name: written((ROOT / name).read_text(encoding="utf-8"), inside) for name, inside in generated.items()},
        "docs/mutants.md": mutants_page(),
    }


def protocol_parts() -> dict[str, str]:
    """The parts of docs/spec.md that are written from the protocol's own tables."""
    return {
        "strict": formats.strict_table(),
        "parts": formats.nested_table(),
        "values": diagrams.values_part(inspect.getsource(messages)),
        "vllm": formats.vllm_table(),
        "limits": formats.limits_table(),
        "producer": diagrams.producer_part(inspect.getsource(phases)),
        "consumer": diagrams.consumer_part(inspect.getsource(phases)),
        "durations": diagrams.durations_part(inspect.getsource(timers)),
        "timers": diagrams.timers_part(inspect.getsource(timers)),
        "guards": diagrams.guards_part(inspect.getsource(dialect)),
    }


def written(document: str, generated: Mapping[str, str]) -> str:
    """The document with its generated parts replaced."""
    for name, text in generated.items():
        head, begin, rest = document.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise ValueError(f"no part is marked {name}")
        document = "".join((head, begin, text, end, tail))
    return document


def explained() -> dict[str, str]:
    """The outputs of `pdflow explain` for the run that the page names."""
    job = ("simulate", str(ROOT / MAIN_JOB[1]), "--set", "workload.requests=500", "--out", "run", "--quiet")
    with tempfile.TemporaryDirectory() as folder:
        printed(*job, folder=Path(folder))
        return {
            "run": fenced(printed("explain", "run", folder=Path(folder))),
            "request": fenced(printed("explain", "run", "441", folder=Path(folder))),
        }


def printed(*arguments: str, folder: Path = ROOT) -> str:
    """What `pdflow ...` prints into a pipe of 80 columns, from the repository's root or another folder."""
    paths = [str(ROOT / root) for root in (".", "sim", "runtime")]
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pdflow", *arguments]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=True)
    return "".join(line.rstrip() + "\n" for line in ran.stdout.splitlines())


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}```\n"


# Transfer methods.


def method_rows() -> Iterator[str]:
    yield "| method | what it does | from |"
    yield "| --- | --- | --- |"
    for method in METHODS.values():
        yield f"| `{method.name}` | {method.summary} | {method.source} |"


def connector_rows() -> Iterator[str]:
    yield "| connector | | a descriptor is | merged | READs posted by | from |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for connector in CONNECTORS.values():
        merged = "yes" if connector.merges else "no"
        cells = (f"`{connector.name}`", connector.summary, connector.extent.value, merged, f"`{connector.reads_on}`")
        yield f"| {' | '.join(cells)} | {connector.source} |"


def method_pages() -> Iterator[str]:
    """Of each method its facts, and one request."""
    for method in METHODS.values():
        yield f"## `{method.name}`\n"
        yield f"{method.summary[0].upper()}{method.summary[1:]}.\n"
        yield "| | |"
        yield "| --- | --- |"
        yield from (f"| {head} | {fact} |" for head, fact in facts(method).items())
        yield ""
        yield fenced("\n".join(one_request(method.name)) + "\n")


# The errors on the validation page.


EVERY_ROW = "Not fitted: all"


def accuracy_rows(page: str) -> Iterator[str]:
    """The page's summary, a row for each engine: its errors without calibration, and with it."""
    summary = page.split("\n## In short\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in summary.splitlines() if line.startswith("| ")]
    engines: dict[str, dict[str, str]] = {}
    for what, metric, error, *_ in lines[2:]:
        engine, calibrated, _ = what.partition(", calibrated")
        engine = engine.partition(", presets alone")[0]
        if engine.startswith("Not fitted: "):
            if not engine.startswith(EVERY_ROW):
                continue
            engine = EVERY_ROW
        engines.setdefault(engine, {})[metric + calibrated] = error
    yield "| what was measured | TTFT | TPOT | TTFT, calibrated | TPOT, calibrated |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for engine, errors in engines.items():
        columns = (errors.get(name, "") for name in ("TTFT", "TPOT", "TTFT, calibrated", "TPOT, calibrated"))
        yield f"| {engine} | {' | '.join(columns)} |"
    yield ""
    holding = next(line for line in summary.splitlines() if line.endswith(" hold."))
    yield holding.replace(" hold.", " aims of that page hold.")


# The keys of a scenario file.

SPECS: dict[str, type] = {
    "model": ModelSpec,
    "gpu": GpuSpec,
    "mla": MlaSpec,
    "moe": MoeDims,
    "window": WindowSpec,
    "linear_attention": LinearAttentionSpec,
    "sparse_attention": SparseAttentionSpec,
}
KEY_DESCRIPTIONS = {
    "preset": "preset that supplies the values that the file does not set; `pdflow presets` lists them",
    "name": "name in reports",
    "num_layers": "number of layers; this and the following sizes are in the model's config.json",
    "num_kv_heads": "KV heads of grouped-query attention; must divide num_heads",
    "tie_embeddings": "whether the LM head shares the weights of the embedding",
    "kv_bytes_per_value": "2 for bf16, 1 for fp8",
    "weight_dtype": "alternative to weight_bytes_per_param",
    "mla": "sizes of multi-head latent attention (DeepSeek), instead of KV heads",
    "moe": "sizes of a mixture of experts, instead of an MLP",
    "window": "layers that attend to the latest tokens only",
    "linear_attention": "layers with linear attention, instead of attention with KV",
    "sparse_attention": "sparse attention (DSA) on the latent of `mla`",
    "hf_config": "instead of a preset: path of a Hugging Face config.json, relative to the scenario file; default of "
    "`name`: `_name_or_path`, or the architecture and size, such as llama-8.0B",
    "source": "source of the values",
    "bf16_flops": "dense FLOP/s",
    "fp8_flops": "dense FLOP/s",
    "fp4_flops": "dense FLOP/s; absent: 4-bit weights are read as such and computed in 16 bits",
    "hbm_bytes_per_s": "memory bandwidth",
    "device_bytes": "GPU memory",
    "nvlink_bytes_per_s": "each direction",
    "nic_bytes_per_s": "each direction",
    "allreduce_latency_s": "latency of each all-reduce",
}
"""For keys whose class does not say what they are."""

INSIDE = {
    "trace": "a recorded workload.",
    "mla": "the sizes of latent attention, as in the model's config.json.",
    "moe": "the sizes of a mixture of experts, from the model's config.json.",
    "window": "layers that attend to the latest tokens only: a sliding window, or the chunk that a token is in.",
    "linear_attention": "layers with a gated delta rule (Qwen3-Next, Qwen3.5), which keep a state of fixed size.",
    "sparse_attention": "DeepSeek sparse attention: an indexer scores all positions, attention reads the best.",
    "gpu": "a preset with some values replaced, or a complete data sheet.",
}


def scenario_keys() -> Iterator[str]:
    for name, schema in schema_json()["properties"].items():
        many = schema.get("type") == "array"
        yield f"### {'[[' if many else '['}{name}{']]' if many else ']'}\n"
        if many and "oneOf" in schema["items"]:
            yield from kinds_table(schema["items"]["oneOf"])
        else:
            yield from key_table(schema["items"] if many else schema, name, [])


def kinds_table(kinds: list[Schema]) -> Iterator[str]:
    """Tables that are told apart by their first key: what each kind is, then every key with the kinds that take it."""
    names = [next(iter(kind["properties"].values()))["const"] for kind in kinds]
    tag = next(iter(kinds[0]["properties"]))
    yield f"| `{tag}` | what happens |\n| --- | --- |"
    for name, kind in zip(names, kinds, strict=True):
        yield f"| `{name}` | {kind['description']} |"
    rows: list[tuple[str, Schema, str, list[str]]] = []
    for name, kind in zip(names, kinds, strict=True):
        for key, prop in kind["properties"].items():
            default = default_text(key, prop, kind.get("required", ()), kind)
            same = next((row for row in rows if row[:3] == (key, prop, default)), None)
            if same is not None:
                same[3].append(name)
            elif key != tag:
                rows.append((key, prop, default, [name]))
    yield "\n| key | value | default | kinds | meaning |\n| --- | --- | --- | --- | --- |"
    for key, prop, default, completed_readers in rows:
        who = "all" if completed_readers == names else ", ".join(completed_readers)
        yield f"| `{key}` | {value_text(prop)} | {default} | {who} | {prop.get('description', '')} |"
    yield ""


def key_table(schema: Schema, name: str, listed: list[Schema]) -> Iterator[str]:
    """The keys of one table, and below it those of the tables inside but for those already `listed`."""
    docs = dict(KEY_DESCRIPTIONS)
    if name in SPECS:
        documented = docstrings(inspect.getsource(SPECS[name]), SPECS[name].__name__)
        docs |= {key: text for key, text in documented.items() if text}
    required = schema.get("required", ())
    inside: list[tuple[str, Schema]] = []
    yield "| key | value | default | meaning |\n| --- | --- | --- | --- |"
    for key, prop in schema["properties"].items():
        inside += [(key, table) for table in tables_in(prop) if table not in listed]
        meaning = prop.get("description", "") or docs.get(key, "")
        yield f"| `{key}` | {value_text(prop)} | {default_text(key, prop, required, schema)} | {meaning} |"
    yield ""
    merged: list[tuple[list[str], Schema]] = []
    for key, table in inside:
        same = next((keys for keys, known in merged if known == table), None)
        if same is None:
            merged.append(([key], table))
        else:
            same.append(key)
    listed += [table for _, table in merged]
    for names, table in merged:
        tags = [f'{tag} = "{prop["const"]}"' for tag, prop in table["properties"].items() if "const" in prop]
        written_as = f"{{ {', '.join([*tags, '...'])} }}"
        if schema["properties"][names[0]].get("additionalProperties"):
            written_as = f"{{ NAME = {written_as}, ... }}"
        if schema["properties"][names[0]].get("type") == "array":
            written_as = f"[{written_as}]"
        yield f"`{', '.join(names)} = {written_as}`: {table.get('description') or INSIDE[names[0]]}\n"
        keys = {key: prop for key, prop in table["properties"].items() if "const" not in prop}
        if keys:
            yield from key_table({**table, "properties": keys}, names[0], listed)


def tables_in(prop: Schema) -> list[Schema]:
    """The tables that a value may be."""
    if prop.get("type") == "array":
        return tables_in(prop["items"])
    if isinstance(prop.get("additionalProperties"), dict):
        return tables_in(prop["additionalProperties"])
    options = prop.get("oneOf", [prop])
    return [option for option in options if option.get("type") == "object"]


def value_text(prop: Schema) -> str:
    """What a value may be, in words."""
    if "enum" in prop:
        return ", ".join(f"`{option}`" for option in prop["enum"])
    if "oneOf" in prop:
        return " or ".join(dict.fromkeys(value_text(option) for option in prop["oneOf"]))
    kind = str(prop.get("type", "string"))
    if kind == "object":
        return "a table"
    if kind == "array":
        inner = value_text(prop["items"])
        if "enum" in prop["items"]:
            return f"array of {inner}"
        return f"array of {'tables' if inner == 'a table' else inner + 's'}"
    if {"exclusiveMinimum", "maximum"} <= prop.keys():
        return f"{kind} in ({prop['exclusiveMinimum']:g}, {prop['maximum']:g}]"
    if "exclusiveMinimum" in prop:
        return f"{kind} > {prop['exclusiveMinimum']:g}"
    return f"{kind} ≥ {prop['minimum']:g}" if "minimum" in prop else kind


def default_text(key: str, prop: Schema, required: tuple[str, ...], schema: Schema) -> str:
    if "default" in prop:
        return shown(prop["default"])
    if key in required:
        return "*required*"
    from_preset = "preset" in schema["properties"] and key != "preset"
    return "from the preset" if from_preset and "dtype" not in key and key not in ("coalesce", "links", "paths") else ""


def shown(default: object) -> str:
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{default}`" if default != "" else ""


# Cost tables.


def cost_rows() -> Iterator[str]:
    yield "| table | of | prefill: median | p95 | max | decode: median | p95 | max |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    shelves: tuple[Shelf, ...] = ("aiconfigurator", "fitted")
    for shelf in shelves:
        for name, file in cost_tables(shelf).items():
            rows = {row.of: row for row in file.errors}
            errors = [error for of in ("prefill", "decode") for error in (rows[of].median, rows[of].p95, rows[of].max)]
            shares = " | ".join(f"{error:.1%}".replace("%", " %") for error in errors)
            yield f"| `{name}` | {file.engine.software} | {shares} |"
    yield ""


def error_bar_rows() -> Iterator[str]:
    yield "| GPU | model | engine | TPOT | TTFT | TPOT above 85 % | TTFT above 85 % |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    for key, row in error_bars().items():
        figures = (row[name] for name in ("tpot_below", "ttft_below", "tpot_above", "ttft_above"))
        shares = " | ".join("–" if bar is None else f"{interval(bar)} ({bar[0]})" for bar in figures)
        mark = " fitted" if row["seen"] else ""
        yield f"| `{key.gpu}`{mark} | {key.model} | {key.parallel} | {shares} |"
    yield ""


# The command.


def commands() -> Iterator[str]:
    yield f"## pdflow\n\n{prose(cli.help)}\n"
    yield from options(cli)
    yield from commands_of("pdflow", cli)


def commands_of(group_name: str, group: click.Group) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield f"## {group_name} {name}\n\n{prose(command.help)}\n"
            yield from commands_of(f"{group_name} {name}", command)
            continue
        arguments = " ".join(p.make_metavar(click.Context(command)) for p in command.params if is_argument(p))
        takes = "[OPTIONS]" if any(not is_argument(p) for p in command.params) else ""
        yield f"## {group_name} {name}\n\n    {' '.join(filter(None, (group_name, name, takes, arguments)))}\n"
        yield f"{prose(command.help)}\n"
        yield from options(command)


def is_argument(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Argument)


def options(command: click.Command) -> Iterator[str]:
    rows = [option for option in command.params if isinstance(option, click.Option)]
    if not rows:
        return
    yield "| option | |\n| --- | --- |"
    for option in rows:
        value = "" if option.is_flag or option.metavar is None else f" {option.metavar}"
        yield f"| `{', '.join(option.opts)}{value}` | {prose(option.help)} |"
    yield ""


def prose(text: str | None) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n"))


# The lifecycle of one request.

ONE_REQUEST = (
    *("simulate", "examples/reference.toml", "--quiet", "--events"),
    *("--set", "workload.requests=1", "--set", "pool.prefill.replicas=1", "--set", "pool.decode.replicas=1"),
    *("--set", "network.handshake_s=0.001"),
    *("--set", "network.warm=false"),
    *("--set", "noise.steps=0", "--set", "noise.api_server=0", "--set", "noise.links=0"),
)


def request_lifecycle() -> Iterator[str]:
    """One line per event of one request's run: when, at which endpoint, what it was, and what was answered."""
    with tempfile.TemporaryDirectory() as folder:
        printed(*ONE_REQUEST, "--out", folder)
        _, lines = read_events(Path(folder) / "events.jsonl")
        turns: list[tuple[int, str, str, list[str]]] = []
        for line in lines:
            if line.direction == "in":
                turns.append((line.t, line.node, short(line.body), []))
            else:
                turns[-1][3].append(short(line.body))
    began = turns[0][0]
    for t, node, event, effects in turns:
        if event == "TimeReached" and not effects:
            continue
        first = (effects or [""])[0]
        yield f"{(t - began) / 1e6:9.3f} ms  {node:<13} {event:<27} {'-> ' if first else ''}{first}".rstrip()
        for effect in effects[1:]:
            yield f"{'':55} -> {effect}"


def short(body: Mapping[str, Any]) -> str:
    """A value in a few words: its class, and whom it is for or what it carries."""
    kind = str(body["type"])
    if kind == "SendLocal":
        return f"{body['to']}: {short(body['event'])}"
    for carried in ("message", "notification"):
        if isinstance(body.get(carried), dict):
            inside = body[carried]["type"]
            return f"{kind} {inside}" + (f" to {body['to']}" if isinstance(body.get("to"), str) else "")
    return f"{kind} {body['peer']}" if "peer" in body else kind


def main() -> None:
    for name, page in pages().items():
        path = ROOT / name
        same = path.is_file() and path.read_text(encoding="utf-8") == page
        path.write_text(page, encoding="utf-8")
        click.echo(f"{name}: {'unchanged' if same else 'written'}")


if __name__ == "__main__":
    main()
