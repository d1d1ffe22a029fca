"""The description of a method, for `pdflow methods` and the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pdflow.methods.method import MemoryKind, Method


def facts(method: Method) -> dict[str, str]:
    """Return the facts about a method, by their headings."""
    wire_profile = "; ".join(method.published.wire_profile.summary_lines())
    return {
        "initiator": method.initiator,
        "pieces": method.grain.value + (", sent while P computes the next" if method.strict.early else ""),
        "memories": " -> ".join(memories(method)),
        "messages": messages(method),
        **({"as published": wire_profile} if wire_profile else {}),
        "back-pressure": method.back_pressure,
        "on loss": method.on_loss,
        "limits": method.limits,
        "dialects": ", ".join(method.dialects),
        "source": method.source,
    }


def memories(method: Method) -> Iterator[str]:
    """Yield the memories that a prompt's KV is in, from P's blocks to D's, and the copies between them."""
    yield f"P: {MemoryKind.BLOCKS.value}"
    if method.staged_at_p:
        yield f"{method.p_memory.value}"
    yield ", ".join(hop.value for hop in method.hops)
    if method.stores:
        yield "the store"
        yield ", ".join(hop.value for hop in method.hops)
    if method.staged_at_d:
        yield f"D: {method.d_memory.value}"
    yield f"{'' if method.staged_at_d else 'D: '}{MemoryKind.BLOCKS.value}"


def frames(method: Method) -> tuple[str, ...]:
    """Return the frames of one pair of ranks, in `strict`, without faults."""
    push, pull = ("REG", "REG_ACK", "DONE"), ("TAKEN",)
    return push + pull if method.stores else pull if method.pulls else push


def messages(method: Method) -> str:
    """Describe how many messages a request takes."""
    summary = f"{len(frames(method))} for each pair of ranks: {', '.join(frames(method))}"
    return f"{summary}; 2 for each piece" if method.strict.asks else summary


def methods_view(methods: dict[str, Method], names: tuple[str, ...]) -> Group:
    """Return the facts of the methods of these names, for a terminal; of all methods if there are no names."""
    shown: list[Text | Table] = []
    for method in methods.values():
        if names and method.name not in names:
            continue
        if shown:
            shown.append(Text())
        shown.append(Text.assemble((method.name, "bold"), f": {method.summary}"))
        table = Table.grid(padding=(0, 2))
        table.add_column(width=2)
        table.add_column(no_wrap=True)
        table.add_column()
        for head, fact in facts(method).items():
            table.add_row("", head, fact)
        shown.append(table)
    return Group(*shown)
