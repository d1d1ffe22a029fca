"""Generator of docs/phases.md and docs/dialects.md from the tables that the state machine itself runs on.

Pure: sources come in as text, because the meaning of a phase or guard stands in the docstring under it, which Python
does not keep. A test writes both pages again and compares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from pdflow.protocol.consumer.rules import RULES as CONSUMER_RULES
from pdflow.protocol.dialect import DIALECTS
from pdflow.protocol.phases import CONSUMER_PHASES, PRODUCER_PHASES, ConsumerPhase, ProducerPhase
from pdflow.protocol.producer.rules import RULES as PRODUCER_RULES

AGAIN = "Written by `pdflow/protocol/diagrams.py`; `UPDATE_DOCS=1 pytest tests/protocol/test_docs.py` writes it again."


def state_diagram(phases: Mapping[Any, frozenset[Any]], start: Iterable[IntEnum], end: IntEnum) -> str:
    """A Mermaid state diagram of every legal change. Staying in a phase is always legal and is not drawn."""
    lines = ["stateDiagram-v2", "    direction LR"]
    lines += [f"    [*] --> {phase.name}" for phase in start]
    for phase, targets in phases.items():
        lines += [f"    {phase.name} --> {target.name}" for target in sorted(targets) if target is not phase]
    lines.append(f"    {end.name} --> [*]")
    return "\n".join(lines)


def docstrings(source: str, class_name: str) -> dict[str, str]:
    """The string that stands under each name assigned in a class, on one line; empty where there is none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return dict(_documented(node.body))
    raise ValueError(f"no class {class_name} in this source")


def _documented(body: list[ast.stmt]) -> Iterable[tuple[str, str]]:
    for i, node in enumerate(body):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        if not isinstance(target, ast.Name):
            continue
        after = body[i + 1] if i + 1 < len(body) else None
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = " ".join(after.value.value.split())
        yield target.id, text


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def rules_table(rules: Mapping[tuple[Any, type], Any], phases: Iterable[IntEnum]) -> str:
    """A Markdown table of rules, one row for each phase and event with a rule; every other pair is a named no-op. Of a
    rule's docstring it has the first paragraph; what argues for the rule stands behind that."""
    rows = []
    for phase in phases:
        for (at, event), rule in rules.items():
            if at is phase:
                docstring = " ".join((rule.__doc__ or "").partition("\n\n")[0].split())
                rows.append((phase.name, f"`{event.__name__}`", f"`{rule.__name__}`", docstring))
    return table(("phase", "event", "rule", "what it says of itself"), rows)


def phases_page(phases_source: str) -> str:
    """The text of docs/phases.md. `phases_source` is the text of phases.py."""
    p_drawn = state_diagram(PRODUCER_PHASES, (ProducerPhase.OPEN, ProducerPhase.LEASED), ProducerPhase.GONE)
    d_drawn = state_diagram(CONSUMER_PHASES, (ConsumerPhase.HELD,), ConsumerPhase.GONE)
    return _page(
        "# Phases",
        AGAIN,
        "Two kinds of cell make up a transfer. An event that has no row for the phase a cell is in leaves that very"
        " cell as it is: late, duplicate and stale input needs no special case.",
        "## P: one prompt at one rank",
        f"```mermaid\n{p_drawn}\n```",
        table(("phase", "meaning"), docstrings(phases_source, "ProducerPhase").items()),
        "What a lease's end means in each phase and dialect stands in `pdflow/protocol/producer/lease.py`.",
        rules_table(PRODUCER_RULES, ProducerPhase),
        "## D: one request",
        f"```mermaid\n{d_drawn}\n```",
        table(("phase", "meaning"), docstrings(phases_source, "ConsumerPhase").items()),
        rules_table(CONSUMER_RULES, ConsumerPhase),
    )


def dialects_page(dialect_source: str) -> str:
    """The text of docs/dialects.md. `dialect_source` is the text of dialect.py."""
    names = tuple(DIALECTS)
    rows = [
        (f"`{guard}`", *("yes" if getattr(DIALECTS[name], guard) else "no" for name in names), meaning)
        for guard, meaning in docstrings(dialect_source, "Dialect").items()
        if guard != "name"
    ]
    return _page(
        "# Dialects",
        AGAIN,
        "One machine speaks every dialect. What differs are these guards, each read where its rule stands; nothing"
        " else in the protocol asks for a dialect's name.",
        table(("guard", *names, "what it means"), rows),
    )


def _page(*sections: str) -> str:
    return "\n\n".join(sections) + "\n"
