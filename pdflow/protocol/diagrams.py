"""Generator of parts of docs/spec.md (3.1, 4, 5 and 6.1) from the tables that the state machine itself runs on.

Pure: sources come in as text, because the meaning of a phase, guard or timer stands in the docstring under it, which
Python does not keep. docs/generate.py writes the parts between their marks, and a test compares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from pdflow.protocol.consumer.rules import RULES as CONSUMER_RULES
from pdflow.protocol.dialect import DIALECTS
from pdflow.protocol.messages import Code, Disposition, Progress
from pdflow.protocol.phases import CONSUMER_PHASES, PRODUCER_PHASES, ConsumerPhase, ProducerPhase
from pdflow.protocol.producer.rules import RULES as PRODUCER_RULES
from pdflow.protocol.timers import TimerKind, Timers
from pdflow.protocol.values import MS, S


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
    rule's docstring it has the first paragraph; the reasons for the rule stand in the other paragraphs."""
    rows = []
    for phase in phases:
        for (at, event), rule in rules.items():
            if at is phase:
                docstring = " ".join((rule.__doc__ or "").partition("\n\n")[0].split())
                rows.append((phase.name, f"`{event.__name__}`", f"`{rule.__name__}`", docstring))
    return table(("phase", "event", "rule", "what it does"), rows)


def producer_part(phases_source: str) -> str:
    """The phases and rules of P. `phases_source` is the text of phases.py."""
    drawn = state_diagram(PRODUCER_PHASES, (ProducerPhase.OPEN, ProducerPhase.LEASED), ProducerPhase.GONE)
    meanings = table(("phase", "meaning"), docstrings(phases_source, "ProducerPhase").items())
    return _joined(f"```mermaid\n{drawn}\n```", meanings, rules_table(PRODUCER_RULES, ProducerPhase))


def consumer_part(phases_source: str) -> str:
    """The phases and rules of D. `phases_source` is the text of phases.py."""
    drawn = state_diagram(CONSUMER_PHASES, (ConsumerPhase.HELD,), ConsumerPhase.GONE)
    meanings = table(("phase", "meaning"), docstrings(phases_source, "ConsumerPhase").items())
    return _joined(f"```mermaid\n{drawn}\n```", meanings, rules_table(CONSUMER_RULES, ConsumerPhase))


def guards_part(dialect_source: str) -> str:
    """The table of guards in every dialect. `dialect_source` is the text of dialect.py."""
    names = tuple(DIALECTS)
    rows = [
        (f"`{guard}`", *("yes" if getattr(DIALECTS[name], guard) else "no" for name in names), meaning)
        for guard, meaning in docstrings(dialect_source, "Dialect").items()
        if guard != "name"
    ]
    return _joined(table(("guard", *names, "what it means"), rows))


def durations_part(timers_source: str) -> str:
    """The table of durations. `timers_source` is the text of timers.py."""
    defaults = Timers()
    rows = [
        (f"`{name}`", _duration(getattr(defaults, name)), meaning)
        for name, meaning in docstrings(timers_source, "Timers").items()
    ]
    return _joined(table(("duration", "default", "meaning"), rows))


def timers_part(timers_source: str) -> str:
    """The table of timers. `timers_source` is the text of timers.py."""
    meanings = docstrings(timers_source, "TimerKind")
    return _joined(table(("timer", "when it fires"), ((kind.name, meanings[kind.name]) for kind in TimerKind)))


def values_part(messages_source: str) -> str:
    """The tables of the numbers that frames carry. `messages_source` is the text of messages.py."""
    tables = []
    for kind, field in ((Progress, "progress"), (Disposition, "disposition"), (Code, "code")):
        meanings = docstrings(messages_source, kind.__name__)
        rows = ((str(member.value), member.name, meanings[member.name]) for member in kind)
        tables.append(table((f"`{field}`", "name", "meaning"), rows))
    return _joined(*tables)


def _duration(ns: int) -> str:
    return f"{ns // S} s" if ns % S == 0 else f"{ns // MS} ms"


def _joined(*sections: str) -> str:
    return "\n\n".join(sections) + "\n"
