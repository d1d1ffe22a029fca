"""The models, GPUs and links that come with pdflow: TOML data in `presets/`, each figure with its source.

A preset is a set of values for one table of a scenario; it decides nothing else. `[values]` has the table's keys,
`[sources]` a sentence per key, `source` the sentence for keys that have none of their own.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final, Literal, TypeAlias

import attrs

Kind: TypeAlias = Literal["models", "gpus", "links"]

ALIASES: Final[Mapping[Kind, Mapping[str, str]]] = {
    "models": {},
    "gpus": {
        "4090": "rtx-4090",
        "a100": "a100-80g",
        "a100-80gb": "a100-80g",
        "a100-sxm": "a100-80g",
        "b200-sxm": "b200",
        "h100": "h100-sxm",
        "h100-80g": "h100-sxm",
        "h100-80gb": "h100-sxm",
        "h200-sxm": "h200",
        "mi300": "mi300x",
        "rtx4090": "rtx-4090",
    },
    "links": {},
}
"""Names that people write for a preset. Some stand for several products (an H100 may have PCIe, an A100 40 GB), so
commands that resolve an alias print which preset they took."""


@attrs.frozen
class Preset:
    """One file of `presets/`: a summary in a line, its values, and the source of each."""

    name: str
    summary: str
    values: Mapping[str, Any]
    sources: Mapping[str, str]


@functools.cache
def presets(kind: Kind) -> Mapping[str, Preset]:
    """Return all presets of a kind by name, in the order of their names."""
    folder = resources.files("pdflow.scenario").joinpath("presets", kind)
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {preset.name: preset for preset in map(_read, files)}


def find_preset(kind: Kind, name: str) -> Preset | None:
    """Return the preset of that name or alias; None if there is none."""
    return presets(kind).get(ALIASES[kind].get(name, name))


def alias_note(kind: Kind, name: str) -> str:
    """Return a sentence that says which preset an alias stands for; "" for a preset's own name."""
    preset = find_preset(kind, name)
    return "" if preset is None or preset.name == name else f'"{name}" is the preset {preset.name}: {preset.summary}'


def _read(file: Any) -> Preset:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    whole_file = data.get("source")
    sources = {key: data.get("sources", {}).get(key, whole_file) for key in data["values"]}
    return Preset(file.name.removesuffix(".toml"), data["summary"], data["values"], sources)
