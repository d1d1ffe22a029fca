"""The kinds of values that parameters of requests are made of: what JSON must hold, exactly.

A bool is not an integer, and a string is never read as a number. (Configuration files are read leniently:
`settings.py`.) Limits are those of the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pdflow.methods.params.address import AddressError, split_address
from pdflow.methods.params.errors import shown
from pdflow.methods.params.fields import Kind
from pdflow.protocol.values import NO_BLOCK
from pdflow.protocol.wire.checks import Problem, text_problem
from pdflow.protocol.wire.limits import (
    MAX_BLOCK_ID,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_POSITIONS,
    MAX_RANKS,
    MAX_TOKENS,
    MAX_U64,
)

MAX_PROMPT_TOKENS: Final = 1 << 20
"""Token ids in one request, all its prompts together: as many as the blocks of the longest registration hold."""

MAX_PROMPTS: Final = 4_096
"""Prompts in one batched request."""

MAX_TOKEN_ID: Final = 2**32 - 1

MAX_NODES: Final = 1_000
"""The most nodes of one store."""


def bounded_text(value: Any, most_bytes: int) -> Problem:
    """Return why `value` is no text of 1 to `most_bytes` bytes; empty if it is."""
    if not isinstance(value, str):
        return f"is {shown(value)}"
    return text_problem("", value, most_bytes).strip()


def within(value: Any, low: int, high: int) -> Problem:
    """Return why `value` is no integer of `low` to `high`; empty if it is."""
    return "" if type(value) is int and low <= value <= high else f"is {shown(value)}"


def text(expected: str, most_bytes: int) -> Kind:
    return Kind(
        expected=f"{expected} of at most {most_bytes} bytes", problem=lambda value: bounded_text(value, most_bytes)
    )


def integer(low: int, high: int) -> Kind:
    return Kind(expected=f"an integer of {low:,} to {high:,}", problem=lambda value: within(value, low, high))


def only(value: Any, why: str = "") -> Kind:
    """Return the kind that takes this value and no other."""
    expected = shown(value) + (f" ({why})" if why else "")
    return Kind(
        expected=expected,
        problem=lambda found: "" if found == value and type(found) is type(value) else f"is {shown(found)}",
    )


def _host(value: Any) -> Problem:
    problem = bounded_text(value, MAX_NAME_BYTES)
    if not problem and not all(c.isprintable() and not c.isspace() for c in value):
        return f"is {shown(value)}, with characters that no host has"
    return problem


def _seconds(value: Any) -> Problem:
    real = type(value) is float or type(value) is int
    return "" if real and 0 <= value <= 2**53 else f"is {shown(value)}"


def _bootstrap(value: Any) -> Problem:
    problem = bounded_text(value, 2 * MAX_NAME_BYTES)
    if problem:
        return problem
    try:
        split_address(value.removeprefix("http://"))
    except AddressError as error:
        return f"is {shown(value)}: {error}"
    # D asks for it + "/query", so that without a scheme, or with a path, nothing answers.
    return "" if value.startswith("http://") else f"is {shown(value)}, without a scheme"


def _one_group(value: Any) -> Any:
    """Return the block ids of the only KV-cache group: vLLM writes a list for each group, and takes a bare list for the
    only one."""
    if not isinstance(value, (list, tuple)):
        return value
    grouped = len(value) == 1 and isinstance(value[0], (list, tuple))
    return tuple(value[0] if grouped else value)


def _blocks(value: Any) -> Problem:
    if not isinstance(value, tuple):
        return f"is {shown(value)}"
    if len(value) > MAX_BLOCKS:
        return f"has {len(value):,} block ids"
    if len(value) > 1 and all(isinstance(item, (list, tuple)) for item in value):
        return f"has {len(value)} KV-cache groups"
    return next((f"holds {shown(b)}" for b in value if type(b) is not int or not 0 <= b <= MAX_BLOCK_ID), "")


def _frozen_lists(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(tuple(item) if isinstance(item, (list, tuple)) else item for item in value)


def _thawed_lists(value: Any) -> Any:
    return [list(item) if isinstance(item, tuple) else item for item in value]


def _groups(value: Any) -> Problem:
    if not isinstance(value, tuple):
        return f"is {shown(value)}"
    if not 0 < len(value) <= MAX_GROUPS:
        return f"has {len(value):,} KV cache groups"
    if wrong := next((table for table in value if not isinstance(table, tuple)), None):
        return f"holds {shown(wrong)}"
    if sum(map(len, value)) > MAX_POSITIONS:
        return f"has {sum(map(len, value)):,} entries"
    entries = (entry for table in value for entry in table)
    return next((f"holds an entry that {wrong}" for b in entries if (wrong := within(b, NO_BLOCK, MAX_BLOCK_ID))), "")


def lists(expected: str, most: int, problem_of: Callable[[Any], Problem]) -> Kind:
    """Return the kind of a list of entries for one prompt; or of one item for each of several prompts, null or a list
    of entries."""

    def problem(value: Any) -> Problem:
        if not isinstance(value, tuple):
            return f"is {shown(value)}"
        if all(item is None or isinstance(item, tuple) for item in value):
            if len(value) > MAX_PROMPTS:
                return f"has {len(value):,} prompts"
            entries = [entry for item in value if item for entry in item]
        else:
            entries = list(value)
        if len(entries) > most:
            return f"has {len(entries):,} entries"
        return next((f"holds an entry that {wrong}" for entry in entries if (wrong := problem_of(entry))), "")

    return Kind(
        expected=f"a list of {expected}, or for several prompts a list of such lists and nulls, {most:,} at most",
        problem=problem,
        freeze=_frozen_lists,
        thaw=_thawed_lists,
    )


def _lease_words(value: Any) -> Problem:
    if not isinstance(value, tuple):
        return f"is {shown(value)}"
    if len(value) > MAX_RANKS:
        return f"has {len(value):,} entries"
    for pair in value:
        if not (isinstance(pair, tuple) and len(pair) == 2 and not any(within(n, 0, MAX_U64) for n in pair)):
            return "holds an entry that is no pair of integers"
    return ""


def _addresses(value: Any) -> Problem:
    if not isinstance(value, tuple):
        return f"is {shown(value)}"
    if len(value) > MAX_NODES:
        return f"has {len(value):,} entries"
    for pair in value:
        if not (isinstance(pair, tuple) and len(pair) == 2 and not _host(pair[0]) and not within(pair[1], 0, 65_535)):
            return "holds an entry that is no pair of a host and a port"
    return ""


ID = text("a string", MAX_ID_BYTES)
NAME = text("a string", MAX_NAME_BYTES)
HOST = Kind(expected=f"a host name or address of at most {MAX_NAME_BYTES} bytes", problem=_host)
PORT = integer(1, 65_535)
RANKS = integer(1, MAX_RANKS)
TOKENS = integer(0, MAX_TOKENS)
U64 = integer(0, MAX_U64)
YES = only(True)
NO = only(False)
SECONDS = Kind(expected="a number of seconds, at least 0", problem=_seconds)
BOOTSTRAP = Kind(expected="http://HOST:PORT", problem=_bootstrap)
BLOCKS = Kind(
    expected=f"a list of one list, [[1, 2]], of at most {MAX_BLOCKS:,} block ids of 0 to {MAX_BLOCK_ID:,}",
    problem=_blocks,
    freeze=_one_group,
    thaw=lambda blocks: [list(blocks)],
)
GROUPS = Kind(
    expected=f"a list of at most {MAX_GROUPS} lists with {MAX_POSITIONS:,} entries in all: block ids of 0 to "
    f"{MAX_BLOCK_ID:,}, and {NO_BLOCK} where a group keeps no block",
    problem=_groups,
    freeze=_frozen_lists,
    thaw=_thawed_lists,
)
TOKEN_LISTS = lists("token ids", MAX_PROMPT_TOKENS, lambda entry: within(entry, 0, MAX_TOKEN_ID))
KEY_LISTS = lists("keys", MAX_BLOCKS, lambda entry: bounded_text(entry, MAX_ID_BYTES))
LEASE_WORDS = Kind(
    expected=f"a list of pairs [index, word], one for each P rank, {MAX_RANKS:,} at most",
    problem=_lease_words,
    freeze=_frozen_lists,
    thaw=_thawed_lists,
)
ADDRESSES = Kind(
    expected=f"a list of pairs [host, port], {MAX_NODES:,} at most",
    problem=_addresses,
    freeze=_frozen_lists,
    thaw=_thawed_lists,
)
