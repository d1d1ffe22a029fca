"""Values of a config.json, of the types that they must have; some go by several names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class HfConfigError(ValueError):
    """The file is not the configuration of a model that pdflow can describe."""


def positive(config: Mapping[str, Any], keys: Sequence[str], default: int | None = None) -> int:
    """Return the first of these keys that is a whole number above 0, or the default. HfConfigError if there is
    neither."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is None:
        raise HfConfigError(f"has no {keys[0]}: is it the config.json of a language model?")
    return default


def optional(config: Mapping[str, Any], key: str) -> int:
    """Return a whole number, 0 if the key is absent or null. Raises HfConfigError for anything else."""
    value = config.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise HfConfigError(f"has {key} = {str(value)[:40]}, expected a whole number")
    return value


def listed(config: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list, empty if the key is absent or no list."""
    value = config.get(key)
    return value if isinstance(value, list) else []
