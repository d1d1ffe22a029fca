"""The structure of D's endpoints: one funnel for cells, phases changed by `becoming_*` alone, tables that are complete.

The first three are read off the syntax tree, so that they hold for code that no test runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import pdflow.protocol
from pdflow.protocol import events
from pdflow.protocol.consumer import frames as consumer_frames
from pdflow.protocol.consumer import rank as consumer_rank
from pdflow.protocol.consumer import scheduler as consumer_scheduler
from pdflow.protocol.consumer.cell import CellEvent, bit_of
from pdflow.protocol.consumer.rules import RULES
from pdflow.protocol.ids import Op
from pdflow.protocol.phases import ConsumerPhase
from tests.support.cluster import Cluster
from tests.support.endpoints import engine_info

PROTOCOL = Path(pdflow.protocol.__file__).parent
STORE = PROTOCOL / "consumer/cells.py"
FUNNEL = {"add", "put", "_remove"}
"""The store's methods that may change an element of its table."""
OWNERS = {"__init__", "fork"}
"""And those that may bind the table itself."""
CHANGING = {"clear", "pop", "popitem", "setdefault", "update", "__setitem__", "__delitem__"}

D_FILES = sorted((PROTOCOL / "consumer").glob("*.py"))
OTHERS = sorted(set(PROTOCOL.rglob("*.py")) - set(D_FILES) - set((PROTOCOL / "producer").glob("*.py")))
"""What is P's has a store of its own, and a test of its own."""


def by_function(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node below this one, with the name of the innermost function that it stands in; "" outside of any."""
    for node in ast.iter_child_nodes(tree):
        yield name, node
        yield from by_function(node, node.name if isinstance(node, ast.FunctionDef) else name)


def changes_of_cells(source: str) -> set[tuple[str, str]]:
    """(function, what it changes) of every table called `cells`, and of every local name for one."""
    nodes = list(by_function(ast.parse(source)))
    local = {
        (name, target.id)
        for name, node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "cells"
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def table(name: str, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return (name, node.id) in local
        return isinstance(node, ast.Attribute) and node.attr == "cells"

    found = set()
    for name, node in nodes:
        match node:
            case ast.Subscript(value=held, ctx=ast.Store() | ast.Del()) if table(name, held):
                found.add((name, "element"))
            case ast.Attribute(value=held, attr=method) if method in CHANGING and table(name, held):
                found.add((name, "element"))
            case ast.Attribute(attr="cells", ctx=ast.Store() | ast.Del()):
                found.add((name, "table"))
    return found


@pytest.mark.parametrize("file", D_FILES + OTHERS, ids=lambda file: file.name)
def test_only_the_store_changes_its_cells(file: Path) -> None:
    expected = {(name, "element") for name in FUNNEL} | {(name, "table") for name in OWNERS}
    assert changes_of_cells(file.read_text()) == (expected if file == STORE else set())


@pytest.mark.parametrize(
    "line",
    [
        "self.store.cells[key] = cell",
        "del store.cells[key]",
        "self.cells.pop(key)",
        "cells = self.store.cells; cells[key] = cell",
        "self.cells[key] |= cell",
    ],
)
def test_a_change_that_bypasses_the_store_would_be_seen(line: str) -> None:
    assert changes_of_cells(f"def f(self, store, key, cell): {line}") == {("f", "element")}


def test_becoming_changes_the_phase_and_nothing_else_does() -> None:
    changing, becoming = set(), set()
    for name, node in (found for file in D_FILES for found in by_function(ast.parse(file.read_text()))):
        if name.startswith("becoming_"):
            becoming.add(name)
        if isinstance(node, ast.Call):
            made = isinstance(node.func, ast.Name) and node.func.id == "ConsumerCell"
            if made or any(keyword.arg in ("phase", None) for keyword in node.keywords):
                changing.add(name)
    assert changing == becoming | {"add"}, "a cell is made by the store's `add`"


@pytest.mark.parametrize("file", D_FILES, ids=lambda file: file.name)
def test_no_object_uses_what_is_private_to_another(file: Path) -> None:
    tree = ast.parse(file.read_text())
    own = {"self", "cls", *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert isinstance(node.value, ast.Name), ast.unparse(node)
            assert node.value.id in own, ast.unparse(node)


@pytest.mark.parametrize(
    ("table", "union"),
    [
        (consumer_scheduler.ON, events.ConsumerSchedulerEvent),
        (consumer_rank.ON, events.ConsumerRankEvent),
        (consumer_frames.ON_FRAME, consumer_frames.ConsumerFrame),
    ],
    ids=["scheduler", "rank", "frames"],
)
def test_a_table_has_a_row_for_each_kind_of_its_union(table: dict[type, Any], union: Any) -> None:
    assert set(table) == set(get_args(union))


def test_every_event_of_a_cell_has_a_rule_and_only_the_last_phase_has_none() -> None:
    assert {kind for _, kind in RULES} == set(get_args(CellEvent))
    assert {phase for phase, _ in RULES} == set(ConsumerPhase) - {ConsumerPhase.GONE}


def test_only_a_pair_of_the_registration_has_a_bit() -> None:
    """Whatever a peer claims: another pair, another rank's, another registration's (S9)."""
    cluster = Cluster(p=(engine_info("P", tp=2),))
    cluster.holding = {"WRITE"}
    cluster.prefill_and_admit("r", "x")
    cluster.run()
    cell = cluster.endpoints["D"].cells["r"]
    reg = cell.registration.reg
    assert cell.pairs == ((0, 0), (1, 0))
    assert [bit_of(cell, Op(reg, p, 0), f"P.r{p}") for p in (0, 1)] == [1, 2]
    one = msgspec.structs.replace(cell, pairs=((1, 0),))
    assert bit_of(one, Op(reg, 1, 0), "P.r1") == 1
    other = msgspec.structs.replace(cell, pairs=((1, 1),))
    assert bit_of(other, Op(reg, 1, 1), "P.r1") == 1
    foreign = msgspec.structs.replace(reg, seq=reg.seq + 1)
    for held in (cell, one, other):
        for op, sender in (
            (Op(reg, 2, 0), "P.r2"),
            (Op(reg, 0, 1), "P.r0"),
            (Op(reg, 1, 0), "P.r0"),
            (Op(reg, 1, 0), "Q.r1"),
            (Op(foreign, 1, 0), "P.r1"),
            (Op(foreign, 1, 1), "P.r1"),
        ):
            assert bit_of(held, op, sender) == 0
