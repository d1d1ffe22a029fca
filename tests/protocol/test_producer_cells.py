"""P's store: it alone changes its cells, `becoming_*` alone changes a phase, and the tables cover their unions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import pdflow.protocol
from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
from pdflow.protocol.events import ProducerRankEvent, Received, Source
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import Code, Message, Progress, Register, SyncItem
from pdflow.protocol.phases import ProducerPhase
from pdflow.protocol.producer import cell as producer
from pdflow.protocol.producer import frames as producer_frames
from pdflow.protocol.producer import rank as producer_rank
from pdflow.protocol.producer.cell import LEASED, OPEN, CellEvent, ProducerCell, ProducerContext
from pdflow.protocol.producer.cells import EARLY_LIMIT, ProducerCells
from pdflow.protocol.producer.lease import released, renewed
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.rules import RULES
from pdflow.protocol.producer.writes import requested_range
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import NEVER, Allocation
from tests.support.endpoints import Agreed, engine_info

FOLDER = Path(pdflow.protocol.__file__).parent
STORE = "producer/cells.py"
CHANGING = {"pop", "popitem", "clear", "update", "setdefault", "__setitem__", "__delitem__"}
OTHERS = sorted(
    {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py") if path.parent.name != "consumer"} - {STORE}
)


def is_cells(node: ast.AST) -> bool:
    """`cells`, whoever's."""
    return (isinstance(node, ast.Attribute) and node.attr == "cells") or (
        isinstance(node, ast.Name) and node.id == "cells"
    )


def changes(tree: ast.AST) -> Iterator[int]:
    """Lines that bind `cells` again, put an element into it or take one out."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            targets = [node.func.value]
        else:
            continue
        flat = [item for target in targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if any(is_cells(item) or (isinstance(item, ast.Subscript) and is_cells(item.value)) for item in flat):
            yield node.lineno


@pytest.mark.parametrize("name", OTHERS)
def test_no_file_but_the_stores_changes_cells(name: str) -> None:
    assert list(changes(ast.parse((FOLDER / name).read_text("utf-8")))) == []


@pytest.mark.parametrize(
    "line",
    [
        "self.store.cells[key] = cell",
        "store.cells[key], other = cell, 1",
        "cells[key] = cell",
        "del self.cells[key]",
        "store.cells.pop(key)",
        "store.cells.update(more)",
        "self.cells |= more",
        "self.store.cells = {}",
    ],
)
def test_every_way_of_changing_cells_is_seen(line: str) -> None:
    assert list(changes(ast.parse(line))) == [1]


def test_the_store_itself_is_seen_to_change_them() -> None:
    assert list(changes(ast.parse((FOLDER / STORE).read_text("utf-8"))))


def methods_of_the_cell() -> list[ast.FunctionDef]:
    tree = ast.parse((FOLDER / "producer/cell.py").read_text("utf-8"))
    [cell] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ProducerCell"]
    return [node for node in cell.body if isinstance(node, ast.FunctionDef)]


def sets_a_phase(tree: ast.AST) -> bool:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(keyword.arg == "phase" for call in calls for keyword in call.keywords)


def test_what_is_called_becoming_sets_the_phase_and_nothing_else_does() -> None:
    named = {method.name for method in methods_of_the_cell() if method.name.startswith("becoming_")}
    assert {method.name for method in methods_of_the_cell() if sets_a_phase(method)} == named
    assert len(named) == 8
    for name in OTHERS:
        if name.startswith("producer/") and name != "producer/cell.py":
            assert not sets_a_phase(ast.parse((FOLDER / name).read_text("utf-8"))), name


def test_tables_of_handlers_cover_their_unions() -> None:
    assert {Received, *producer_rank.ON} == set(get_args(ProducerRankEvent))
    assert set(producer_frames.ON_FRAME) == set(get_args(producer_frames.ProducerFrame)) < set(get_args(Message))


def test_every_event_of_a_cell_has_a_rule_in_some_phase() -> None:
    assert {event for _, event in RULES} == set(get_args(CellEvent))
    assert {phase for phase, _ in RULES} == set(ProducerPhase) - {producer.GONE}


def store() -> ProducerCells:

    return ProducerCells("P", ProducerContext(0, Shards(1, 1, 16), STRICT, Timers(), Agreed().geometry, True))


def test_a_store_keeps_the_keys_of_a_prompt_in_the_order_of_its_cells() -> None:
    kept = store()
    source = Source(Allocation(1, (1, 2)), 32, 7, 1, None)
    regs = [Reg("D", 201, seq, f"r{seq}") for seq in (2, 1)]
    for reg in regs:
        kept.add(reg, ProducerCell(OPEN, "x", reg=reg))
    assert kept.keys == {"x": (regs[0], regs[1])}
    before = kept.cells[regs[0]]
    after = before.becoming_leased(source, "p", 5)
    kept.put(regs[0], before, msgspec.structs.replace(after, reg=None), 0)
    assert kept.keys == {"x": (regs[1], "x")}
    assert kept.cells["x"].phase is LEASED
    kept.update("x", kept.cells["x"].with_lease(9))
    assert kept.cells["x"].lease_until == 9


def test_a_prompt_that_is_still_computed_has_no_lease_once_it_is_wanted_again() -> None:
    """One D has released it, and another one names it in a SYNC."""
    source = Source(Allocation(1, (1, 2)), 32, 7, 1, None, complete=False)
    cell = ProducerCell(OPEN, "x").becoming_leased(source, "p", NEVER)
    shorter = released(cell, 5)
    assert shorter.lease_until == 5
    assert renewed(shorter, 9).lease_until == NEVER
    finished = msgspec.structs.replace(shorter, source=msgspec.structs.replace(source, complete=True))
    assert renewed(finished, 9).lease_until == 9


@pytest.mark.parametrize(("tokens", "asked"), [(32, (0, 32)), (1, (31, 1)), (0, Code.LAYOUT), (-1, Code.LAYOUT)])
def test_a_registration_asks_for_at_least_one_token(tokens: int, asked: tuple[int, int] | Code) -> None:
    context = ProducerContext(0, Shards(1, 1, 1), STRICT, Timers(), Agreed().geometry, True)
    source, target = Source(Allocation(1, tuple(range(32))), 32, 7, 1, None), Allocation(2, tuple(range(32)))
    registration = Register(Reg("D", 201, 1, "r"), "x", 0, Shards(1, 1, 1), target, 32 - tokens, tokens, 7, 1, 0)
    assert requested_range(registration, source, context) == asked


def test_components_of_a_fork_refer_to_its_own_store() -> None:
    rank = Agreed().prefill(engine_info("P"), 101)["P.r0"]
    assert isinstance(rank, ProducerRank)
    other = rank.fork()
    assert other.frames.store is other.store is not rank.store
    other.store.add("x", ProducerCell(OPEN, "x"))
    assert not rank.cells
    assert rank.fingerprint() != other.fingerprint()


def test_ended_registrations_are_remembered_up_to_a_limit() -> None:
    kept = ProducerCells("P", ProducerContext(0, Shards(1, 1, 16), VLLM_COMPAT, Timers(), Agreed().geometry, True))
    regs = [Reg("D", 0, 0, f"r{number}") for number in range(EARLY_LIMIT + 2)]
    for reg in regs:
        kept.add_tombstone(SyncItem(reg, Progress.UNKNOWN, Code.EXPIRED, True))
    assert list(kept.ended) == regs[2:]
