"""Generator of the tables of messages in docs/spec.md (3.5 to 3.7), from the structs and constants themselves."""

from __future__ import annotations

import typing

import msgspec

from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import SyncItem
from pdflow.protocol.values import Allocation
from pdflow.protocol.wire import limits
from pdflow.protocol.wire.handshake import AgentMetadata, Capabilities, Payload
from pdflow.protocol.wire.strict import Frame
from pdflow.protocol.wire.vllm import Pdf, PushReg


def strict_table() -> str:
    """Return the table of strict frames, one row per frame: its tag and its keys in order."""
    rows = [(f"`{kind.__struct_config__.tag}`", _keys(kind)) for kind in typing.get_args(Frame)]
    return _table(("`type`", "other keys, in order"), rows)


def nested_table() -> str:
    """Return the table of the maps that are nested in others."""
    kinds: tuple[type[msgspec.Struct], ...] = (Reg, Shards, Allocation, SyncItem)
    return _table(("part", "keys, in order"), [(f"`{kind.__name__}`", _keys(kind)) for kind in kinds])


def vllm_table() -> str:
    """Return the table of the maps of vLLM's formats, with those that we add inside them."""
    kinds: dict[str, type[msgspec.Struct]] = {
        "PUSH_REG": PushReg,
        "its `pdf`": Pdf,
        "handshake payload": Payload,
        "agent metadata": AgentMetadata,
        "its `pdflow`": Capabilities,
    }
    return _table(("map", "keys, in order"), [(name, _keys(kind)) for name, kind in kinds.items()])


def limits_table() -> str:
    rows = [(f"`{name}`", f"{value:,}") for name, value in vars(limits).items() if name.startswith("MAX_")]
    return _table(("limit", "value"), rows)


def _keys(kind: type[msgspec.Struct]) -> str:
    """Return the names of a map's keys; those that are left out where they are empty say so."""
    omits = kind.__struct_config__.omit_defaults
    return ", ".join(
        f"`{field.name}`" + (" (if not empty)" if omits and not field.required else "")
        for field in msgspec.structs.fields(kind)
    )


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "".join(f"| {left} | {right} |\n" for left, right in lines)
