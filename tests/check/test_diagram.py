"""Diagrams show what happened: every step once, every frame where it was sent and where it went, what broke last."""

from __future__ import annotations

import re
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.protocol import effects
from pdflow.protocol.consumer.cell import QUARANTINED, CancelDue
from pdflow.protocol.consumer.rules import RULES as CONSUMER_RULES
from pdflow.protocol.consumer.rules import cancel_due
from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.effects import NOTHING
from pdflow.protocol.events import PairMissing, PairReported
from pdflow.protocol.producer import rules as producer_rules
from pdflow.protocol.producer.cell import IN_FLIGHT, LeaseEnded
from pdflow.protocol.producer.lease import expired_unclaimed
from pdflow.routing.effects import RouterEffect
from pdflow_sim.check.counterexamples import diagram_lines, names
from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile, Information, ReplayStep
from pdflow_sim.check.counterexamples.diagram import Diagram, collect
from pdflow_sim.check.counterexamples.diagram_lines import Line, Style
from pdflow_sim.check.counterexamples.diagram_mermaid import mermaid
from pdflow_sim.check.counterexamples.diagram_text import text
from pdflow_sim.check.counterexamples.replay import named, record
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.races.owners import VARIANTS
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import shortest

REQUEST = "u0-d0000000"

GOLDEN = """\
strict push, TP 1 to 1; mutant lease frees under a write
client router P P.r0 wire D.r0  D
   │─────>│   │   │    │    │   │    request u0-d0000000
   │      │──>│   │    │    │   │    prefill x0
   │      │   *   │    │    │   │  1 finish x0
   │      │   #   │    │    │   │    x0: generation 10 in blocks 100, 101
   │      │   │──>│    │    │   │    SourceReady u0-e0000000
   │      │<──│   │    │    │   │    prefill x0 answered
   │      │   │   o    │    │   │    x0: LEASED
   │      │───┼───┼────┼────┼──>│  2 decode u0-d0000000
   │      │   │   │    │    │   o    u0-d0000000: QUEUED
   │      │   │   │    │    │   *    u0-d0000000 enters the engine's queue
   │      │   │   │    │    │   *  3 admit u0-d0000000
   │      │   │   │    │    │   #    u0-d0000000: generation 20 in blocks 200,
   │      │   │   │    │    │   │      201
   │      │   │   │    │    │   o    u0-d0000000: QUEUED -> WAITING
   │      │   │   │    │    │<──│    FrameOrdered Register u0-d0000000
   │      │   │   │    │<───│   │    handshake with P.r0
   │      │   │   │    │───>│   │  4 handshake D.r0 -> P.r0
   │      │   │   │    │<───│   │    Register u0-d0000000 to P.r0
   │      │   │   │<───│    │   │  5 deliver Register u0-d0000000 D.r0 -> P.r0
   │      │   │   o    │    │   │    x0 for u0-d0000000: LEASED -> READY
   │      │   │   │───>│    │   │    RegisterAck u0-d0000000 READY to D.r0
   │      │   │   │───>│    │   │    handshake with D.r0
   │      │   │   │<───│    │   │  6 handshake P.r0 -> D.r0
   │      │   │   o    │    │   │    x0 for u0-d0000000: READY -> IN_FLIGHT
   │      │   │   │═══>│    │   │    WRITE u0-d0000000 r0->r0, generation 10 ->
   │      │   │   │    │    │   │      generation 20
   │      │   │   *    │    │   │  7 timer LEASE x0 at P.r0
   │      │   │   o    │    │   │    x0 for u0-d0000000: IN_FLIGHT -> GONE
   │      │   │<──│    │    │   │    ShardReleased x0 EXPIRED
   │      │   #   │    │    │   │    generation 10 of x0 released, EXPIRED
   │      │   !   │    │    │   │    S2: x0 is released under a WRITE
client router P P.r0 wire D.r0  D
!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!
!! S2: x0 is released under a WRITE                                           !!
!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!
"""


def planted() -> Diagram:
    world = relation(Scope())
    found = shortest(world)
    assert found is not None
    return collect(record(world, named(world, found.moves), mutant="lease frees under a write"))


@pytest.fixture
def lease_frees_under_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(producer_rules.RULES, (IN_FLIGHT, LeaseEnded), expired_unclaimed)


@pytest.mark.usefixtures("lease_frees_under_a_write")
def test_a_planted_bug_as_text() -> None:
    assert text(planted()) == GOLDEN


@pytest.mark.usefixtures("lease_frees_under_a_write")
def test_a_planted_bug_as_mermaid() -> None:
    lines = [line.strip() for line in mermaid(planted()).splitlines()]
    assert lines[:4] == [
        "sequenceDiagram",
        "title strict push, TP 1 to 1#59; mutant lease frees under a write",
        "actor client",
        "participant router",
    ]
    assert "router->>D: 2. decode u0-d0000000" in lines
    assert "P_r0-->>wire: WRITE u0-d0000000 r0-#gt;r0, generation 10 -#gt; generation 20" in lines
    assert "Note over P_r0: 7. timer LEASE x0 at P.r0<br/>x0 for u0-d0000000: IN_FLIGHT -#gt; GONE" in lines
    assert lines[-3:] == ["rect rgb(255, 205, 205)", "Note over P: S2: x0 is released under a WRITE", "end"]


def diagram_of(scope: Scope, *moves: str) -> Diagram:
    counterexample = record(relation(scope), moves)
    assert counterexample.moves == list(moves)
    return collect(counterexample)


def lines(drawn: Diagram, *styles: Style) -> list[tuple[str, str | None, str]]:
    return [(line.at, line.to, line.text) for line in drawn.lines if line.style in styles]


TO_FLIGHT = (
    "finish x0",
    f"decode {REQUEST}",
    f"admit {REQUEST}",
    "handshake D.r0 -> P.r0",
    f"deliver Register {REQUEST} D.r0 -> P.r0",
    "handshake P.r0 -> D.r0",
)


def test_a_dropped_frame_stops_in_the_wire_and_a_copy_comes_out_of_it() -> None:
    frame = f"Register {REQUEST} D.r0 -> P.r0"
    drawn = diagram_of(Scope(dup=1, drop=1), *TO_FLIGHT[:4], f"duplicate {frame}", f"drop {frame}", f"late {frame}")
    assert ("wire", None, f"duplicate {frame}") in lines(drawn, Style.NOTE)
    assert lines(drawn, Style.LOST) == [("wire", "P.r0", f"drop {frame}")]
    assert ("wire", "P.r0", f"late {frame}") in lines(drawn, Style.SENT)
    rows = text(drawn).splitlines()
    assert "   │      │   │   │  x─│    │   │  6 drop Register u0-d0000000 D.r0 -> P.r0" in rows
    assert f"wire-xP_r0: 6. drop {frame}".replace(">", "#gt;") in mermaid(drawn)


def test_a_write_reads_its_source_and_lands_piece_by_piece() -> None:
    write = f"PostWrite {REQUEST} r0->r0 by P.r0"
    steps = [f"{verb} {write} piece {piece}" for piece in (1, 2) for verb in ("read", "land")]
    drawn = diagram_of(Scope(chunks=2), *TO_FLIGHT, *steps, f"notice {write}", f"ended {write}")
    assert lines(drawn, Style.BYTES)[1:] == [
        ("P.r0", "wire", steps[0]),
        ("wire", "D.r0", steps[1]),
        ("P.r0", "wire", steps[2]),
        ("wire", "D.r0", steps[3]),
    ]
    assert ("wire", "D.r0", f"notice {write}") in lines(drawn, Style.SENT)
    assert ("wire", "P.r0", f"ended {write}") in lines(drawn, Style.SENT)
    assert lines(drawn, Style.BLOCKS)[-2:] == [
        ("D", None, f"{REQUEST} committed: its KV is visible"),
        ("P", None, "generation 10 of x0 released"),
    ]


def test_at_once_a_read_goes_from_p_through_the_wire_to_d() -> None:
    read = f"PostRead {REQUEST} r0->r0 by D.r0"
    drawn = diagram_of(
        Scope(pulls=True),
        *("finish x0", f"decode {REQUEST}", f"admit {REQUEST}", "handshake D.r0 -> P.r0"),
        *(f"land {read}", f"ended {read}"),
    )
    assert lines(drawn, Style.BYTES)[:2] == [
        ("D.r0", "wire", f"READ {REQUEST} r0->r0, P.r0 -> generation 20"),
        ("P.r0", "D.r0", f"land {read}"),
    ]
    assert "   │      │   │   │════╪═══>│   │  5 land PostRead" in text(drawn)


def test_an_abort_comes_from_the_client_and_its_blocks_are_followed() -> None:
    write, cancel = f"PostWrite {REQUEST} r0->r0 by P.r0", f"deliver Cancel {REQUEST} D.r0 -> P.r0"
    drawn = diagram_of(Scope(), *TO_FLIGHT, f"abort {REQUEST}", cancel, f"land {write}", f"notice {write}")
    assert ("client", "D", f"abort {REQUEST}") in lines(drawn, Style.CALL)
    assert ("D", "router", f"{REQUEST} resolved: CANCELLED, CANCELLED") in lines(drawn, Style.CALL)
    assert [what for at, _, what in lines(drawn, Style.BLOCKS, Style.PHASE) if at == "D"] == [
        f"{REQUEST}: QUEUED",
        f"{REQUEST}: generation 20 in blocks 200, 201",
        f"{REQUEST}: QUEUED -> WAITING",
        f"{REQUEST}: WAITING -> QUARANTINED",
        "generation 20 in quarantine",
        f"{REQUEST}: QUARANTINED -> GONE",
        "generation 20 freed",
    ]


def test_a_death_is_over_its_engine_and_takes_what_was_under_way() -> None:
    drawn = diagram_of(Scope(p_restart=1, p_tp=2), "finish x0", f"decode {REQUEST}", f"admit {REQUEST}", "restart P")
    assert lines(drawn, Style.NOTE)[-1] == ("P", "P.r1", "restart P")
    assert "*───*────*" in text(drawn)
    assert "Note over P,P_r1: 4. restart P" in mermaid(drawn)
    lost = diagram_of(Scope(p_restart=1), *TO_FLIGHT[:4], "restart P")
    assert lines(lost, Style.LOST) == [("wire", "P.r0", f"Register {REQUEST}")]


def test_the_router_reports_the_end_of_the_prefill_leg_if_the_dialect_needs_it() -> None:
    drawn = diagram_of(Scope(dialect=VLLM_COMPAT), f"decode {REQUEST}", "finish x0")
    assert ("router", "D", f"prefill leg of {REQUEST} completed") in lines(drawn, Style.CALL)


def test_what_lags_within_an_engine_is_on_no_wire() -> None:
    drawn = diagram_of(Scope(lagging=True), "finish x0", "deliver SourceReady u0-e0000000 P -> P.r0")
    assert ("P", "P.r0", "SourceReady u0-e0000000") in lines(drawn, Style.CALL)
    assert ("P.r0", None, "deliver SourceReady u0-e0000000 P -> P.r0") in lines(drawn, Style.NOTE)


def test_a_request_that_never_ends_is_the_last_line_of_a_diagram(monkeypatch: pytest.MonkeyPatch) -> None:
    for event in (CancelDue, PairMissing, PairReported):
        monkeypatch.setitem(CONSUMER_RULES, (QUARANTINED, event), lambda cell, event, now, ctx: (cell, NOTHING))
    unsent = lambda cell, event, now, ctx: (cancel_due(cell, event, now, ctx)[0], NOTHING)  # noqa: E731
    monkeypatch.setitem(CONSUMER_RULES, (QUARANTINED, CancelDue), unsent)
    world = relation(Scope(drop=2, deadline=0, stall=0))
    found = shortest(world)
    assert found is not None
    assert found.broken.name == "L"
    last = collect(record(world, named(world, found.moves))).lines[-1]
    assert (last.style, last.at, last.to) == (Style.BROKEN, "client", "D")
    assert last.text.startswith("L: without further faults it never ends: ")


def test_what_is_not_possible_is_shown_as_skipped_under_its_own_number() -> None:
    counterexample = CounterexampleFile(
        scope=Scope(),
        steps=(ReplayStep(move="restart P"), ReplayStep(move="finish x0")),
        information=Information(note="one; two #3"),
    )
    drawn = collect(counterexample)
    assert [(line.number, line.text) for line in drawn.lines if line.number] == [
        (1, "skipped, not possible: restart P"),
        (2, "finish x0"),
    ]
    assert "title strict push, TP 1 to 1#59; one#59; two #35;3" in mermaid(drawn)


def test_every_move_and_every_effect_has_a_shape() -> None:
    relations = [relation(Scope(attempts=1)), relation(Scope(method="cpu-staged"))]
    relations += [*(world(Scope()) for world in (relation, *VARIANTS.values()))]
    assert set(diagram_lines.MOVES) == {verb for world in relations for verb in world.components.acts}
    shaped = {*typing.get_args(effects.Effect), *typing.get_args(RouterEffect)}
    assert set(diagram_lines.EFFECTS) == shaped


SCOPES = [
    Scope(drop=2, dup=2, delay=1, sync=1, cancel=1, lose=1),
    Scope(chunks=3, done_is_remote=False, err=1, p_restart=1, d_restart=1),
    Scope(pulls=True, err=1, sync=1, unreachable=1, d_restart=1),
    Scope(requests=2, same_product=True, dup=1, prefill_abort=1),
    Scope(dialect=VLLM_COMPAT, drop=1, sync=1),
    Scope(p_tp=2, d_tp=2, lagging=True, lose=1),
    Scope(p_restart=1, down=True, lose=1, refused=1, sync=2),
    Scope(dialect=VLLM_COMPAT, attempts=2, p_restart=1, prefill_abort=1),
    Scope(method="cpu-staged", requests=2, pool=1, p_pool=1, prefill_abort=1, err=1),
]
IDS = r"(client|router|wire|P|D|[PD]_r\d)"
GRAMMAR = re.compile(
    rf"sequenceDiagram|title [^;#]*(#\w+;[^;#]*)*|actor client|participant {IDS}( as [PD](\.r\d)?)?|box [a-z ]+|end"
    rf"|rect rgb\(255, 205, 205\)|(Note over {IDS}(,{IDS})?|{IDS}(->>|-\)|-x|-->>){IDS}): [^;#]+(#\w+;[^;#]*)*"
)


@given(st.sampled_from(SCOPES), st.lists(st.integers(0, 10_000), max_size=40))
def test_any_counterexample_can_be_drawn(scope: Scope, choices: list[int]) -> None:
    world = relation(scope)
    state = world.turns.start()
    moves = []
    for choice in choices:
        possible = world.moves(state)
        if possible:
            move = possible[choice % len(possible)]
            moves.append(names.name(world, state, move))
            state = world.apply(state, move)
    counterexample = record(relation(scope), moves)
    drawn = collect(counterexample)
    assert [(line.number, line.text) for line in drawn.lines if line.number] == list(enumerate(moves, 1))
    one = scope.p_tp == scope.d_tp == 1
    rows = text(drawn, 80 if one else 100).splitlines()
    assert max(map(len, rows)) <= (80 if one else 100)
    for row in mermaid(drawn).splitlines():
        assert GRAMMAR.fullmatch(row.strip()), row
    assert collect(counterexample) == drawn


def test_the_text_wraps_and_none_of_it_is_lost() -> None:
    sentence = "it is " + "very " * 40 + "long"
    drawn = Diagram("a title", ("P", "P.r0"), ("D.r0", "D"), (Line(Style.NOTE, "D", sentence),))
    rows = text(drawn, 80).splitlines()
    assert " ".join(" ".join(row[33:].split()) for row in rows[2:-1]).split() == sentence.split()
    assert {row[:33].replace("*", "│") for row in rows[2:-1]} == {rows[3][:33]}
