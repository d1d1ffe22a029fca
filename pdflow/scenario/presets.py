"""The models, GPUs and links that come with pdflow: TOML data in `presets/`, each figure with its source.

A preset is a set of values for one table of a scenario; it decides nothing else. `[values]` has the table's keys,
`[sources]` a sentence per key, `source` the sentence for keys that have none of their own.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal, TypeAlias

import attrs

Kind: TypeAlias = Literal["models", "gpus", "links"]


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


def _read(file: Any) -> Preset:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    whole_file = data.get("source")
    sources = {key: data.get("sources", {}).get(key, whole_file) for key in data["values"]}
    return Preset(file.name.removesuffix(".toml"), data["summary"], data["values"], sources)
