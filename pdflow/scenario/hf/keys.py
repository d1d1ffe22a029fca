"""Keys of a config.json that go by several names, read as numbers above 0."""

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
