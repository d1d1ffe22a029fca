"""What a shell completes: keys and values of --set, presets and methods. docs/sweep.md says how to switch it on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

Schema = Mapping[str, Any]

USUAL_POOLS = ("prefill", "decode")
"""The names of pools to complete where no scenario is named yet."""


def complete_preset(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the presets and their aliases that begin as written."""
    from pdflow.scenario.presets import ALIASES, Kind, presets

    kinds: tuple[Kind, ...] = ("models", "gpus", "links")
    names = (name for kind in kinds for name in (*presets(kind), *ALIASES[kind]))
    return [name for name in names if name.startswith(incomplete)]


def complete_method(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the transfer methods that begin as written."""
    from pdflow.methods.catalogue import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def complete_override(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the keys of a scenario that begin as written, each with "="; behind it, the values that a key can have.

    The pools are those of the scenario that the command line names.
    """
    keys: dict[str, dict[str, None]] = {}
    # click leaves the arguments unread that stand before an option without its value, as --set is here.
    scenario = ctx.params.get("scenario") or next((text for text in ctx.args if text.endswith(".toml")), None)
    for name, values in _keys(_pools(scenario)):
        keys.setdefault(name, {}).update(dict.fromkeys(values))  # tables of several kinds have some keys in common
    key, sign, value = incomplete.partition("=")
    if not sign:
        return [f"{name}=" for name in keys if name.startswith(key)]
    before, comma, last = value.rpartition(",")  # as `sweep` takes several
    return [f"{key}={before}{comma}{name}" for name in keys.get(key, ()) if name.startswith(last)]


def _pools(scenario: object) -> tuple[str, ...]:
    from pdflow.errors import PdflowError
    from pdflow.scenario.reading.load import read

    if not isinstance(scenario, str):
        return USUAL_POOLS
    try:
        pools = read(scenario).document.get("pool")
    except PdflowError:
        return USUAL_POOLS
    tables = pools if isinstance(pools, list) else []
    return tuple(str(table["name"]) for table in tables if isinstance(table, dict) and "name" in table)


def _keys(pools: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield the dotted keys that --set can reach, each with its possible values, where these are names."""
    from pdflow.scenario.schema.jsonschema import schema_json

    for table, schema in schema_json()["properties"].items():
        if table == "pool":
            for name in pools:
                yield from _within(f"pool.{name}", schema["items"])
        elif schema.get("type") != "array":
            yield from _within(table, schema)


def _within(path: str, schema: Schema) -> Iterator[tuple[str, list[str]]]:
    for key, inner in schema.get("properties", {}).items():
        yield f"{path}.{key}", _names(inner)
        for table in (inner, *inner.get("oneOf", ())):
            yield from _within(f"{path}.{key}", table)


def _names(schema: Schema) -> list[str]:
    """Return the names that a value can be: those of an enumeration, or true and false."""
    if schema.get("type") == "boolean":
        return ["true", "false"]
    if "const" in schema:
        return [str(schema["const"])]
    alternatives = (*schema.get("oneOf", ()), *schema.get("anyOf", ()))
    return [*map(str, schema.get("enum", ())), *(name for option in alternatives for name in option.get("enum", ()))]
