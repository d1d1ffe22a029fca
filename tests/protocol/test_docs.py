"""The generated parts of docs/spec.md describe everything. That they are up to date: tests/docs/test_generated.py."""

from __future__ import annotations

import inspect

import pytest

from docs.generate import ROOT, protocol_parts
from pdflow.protocol import diagrams, dialect, messages, phases, timers
from pdflow.protocol.consumer.rules import RULES as CONSUMER_RULES
from pdflow.protocol.phases import PRODUCER_PHASES
from pdflow.protocol.producer.rules import RULES as PRODUCER_RULES

SPEC = (ROOT / "docs/spec.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", protocol_parts())
def test_a_part_is_generated_from_the_tables(name: str) -> None:
    found = SPEC.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
    assert found == protocol_parts()[name], f"docs/spec.md, part {name}, is old: python docs/generate.py"


def test_every_phase_guard_timer_and_code_is_described() -> None:
    for module, *names in (
        (phases, "ProducerPhase", "ConsumerPhase"),
        (dialect, "Dialect"),
        (timers, "Timers", "TimerKind"),
        (messages, "Progress", "Disposition", "Code"),
    ):
        for name in names:
            descriptions = diagrams.docstrings(inspect.getsource(module), name)
            assert [key for key, text in descriptions.items() if not text and key != "name"] == []


def test_every_rule_says_what_it_does() -> None:
    silent = {
        rule.__name__ for rules in (PRODUCER_RULES, CONSUMER_RULES) for rule in rules.values() if not rule.__doc__
    }
    assert silent == set()


def test_every_legal_change_is_drawn_once() -> None:
    for phase, targets in PRODUCER_PHASES.items():
        for target in targets - {phase}:
            assert SPEC.count(f"    {phase.name} --> {target.name}\n") == 1
