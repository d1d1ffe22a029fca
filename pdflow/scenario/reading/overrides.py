"""`--set key=value`: one value of a scenario replaced from the command line.

A key is a dotted TOML key; `pool.NAME.key` reaches into the pool of that name. A value is read as TOML, and as a text
where it is not TOML, so that neither `--set router.policy=least-loaded` nor `--set pool.decode.tp=2` needs quotes.
"""

from __future__ import annotations

import tomllib
from typing import Any

import attrs

from pdflow.scenario.reading.convert import MisfitError, did_you_mean, shown
from pdflow.scenario.reading.locate import KeyPath


@attrs.frozen
class Override:
    """One replaced value. `location` is how the author wrote it ("--set pool.decode.tp=2"), for messages. A value None,
    which TOML cannot say but Python can, takes the key away."""

    location: str
    key: KeyPath
    value: Any


def parse_override(text: str) -> Override:
    """Read KEY=VALUE. Raises MisfitError if it has no key that TOML would accept."""
    key, sign, value = text.partition("=")
    if not sign:
        raise MisfitError("expected key=value, as in --set pool.decode.tp=2")
    # A URL with somebody in it may hold a password, which no message repeats.
    location = f"--set {key}=..." if "://" in value and "@" in value else f"--set {text}"
    return Override(location, parse_key(key), _value(value))


def values_of(text: str) -> list[Any]:
    """Return the values of a list with commas, each read as `--set` reads one: "3,4", "nixl-push,nixl-pull".

    A comma within brackets, braces or quotes separates nothing, so that an array is one value.
    """
    values, begin, depth, quote = [], 0, 0, ""
    for position, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            values.append(_value(text[begin:position].strip()))
            begin = position + 1
    return [*values, _value(text[begin:].strip())]


def apply_override(document: dict[str, Any], override: Override) -> KeyPath:
    """Put the value into the document and return its path there. Raises MisfitError where the key leads nowhere."""
    path: KeyPath = ()
    inside: Any = document
    for segment in override.key[:-1]:
        inside, path = _enter(inside, path, str(segment))
    last = str(override.key[-1])
    if _names_a_pool(path, inside):
        raise MisfitError(f"pool.{last} is a pool; name one of its keys, as in pool.{last}.tp")
    if not isinstance(inside, dict):
        raise MisfitError(f"{'.'.join(map(str, path))} is {shown(inside)}, so it has no key {last}")
    if override.value is None:
        inside.pop(last, None)
    else:
        inside[last] = override.value
    return (*path, last)


def _enter(inside: Any, path: KeyPath, segment: str) -> tuple[Any, KeyPath]:
    """Go one step down: into a table, into a pool by its name, or into a table that does not exist yet."""
    if _names_a_pool(path, inside):
        names = [pool.get("name") for pool in inside if isinstance(pool, dict)]
        if segment not in names:
            known = [name for name in names if isinstance(name, str)]
            raise MisfitError(
                f"no pool named {segment}, expected one of {', '.join(known)}{did_you_mean(segment, known)}"
            )
        index = next(i for i, pool in enumerate(inside) if isinstance(pool, dict) and pool.get("name") == segment)
        return inside[index], (*path, index)
    if not isinstance(inside, dict):
        raise MisfitError(f"{'.'.join(map(str, path))} is {shown(inside)}, so it has no key {segment}")
    if segment == "gpu" and isinstance(inside.get(segment), str):
        inside[segment] = {"preset": inside[segment]}
    return inside.setdefault(segment, {}), (*path, segment)


def _names_a_pool(path: KeyPath, inside: Any) -> bool:
    return path == ("pool",) and isinstance(inside, list)


def parse_key(text: str) -> KeyPath:
    """Return the parts of a dotted TOML key. Raises MisfitError."""
    try:
        table: Any = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        table = {}
    path: list[str] = []
    while isinstance(table, dict) and len(table) == 1:
        [(segment, table)] = table.items()
        path.append(segment)
    if table != 0 or not path:
        raise MisfitError(f"{shown(text)} is not a key, expected a dotted one, as in pool.decode.tp")
    return tuple(path)


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text
