"""Races about identity: ids that are mistaken, incarnations, and requests that end twice (R39 to R52)."""

from __future__ import annotations

from pdflow_sim.check.races import points as at
from pdflow_sim.check.races.blocks import UNIQUE
from pdflow_sim.check.races.race import Breaks, InvariantHolds, Passes, Race, Residual, Unmodelled, covered_by
from pdflow_sim.check.scopes.scope import Scope

MINTED = "an engine and a proxy choose the ids of a prompt's legs, not the connector; in pdflow a router does"
ADDRESSES = "the deployment configures an engine's address; in the checker, a name is an address"
ONE_METHOD = "fixed in 0.32.0; in pdflow all engines of a cluster push, or all pull"
AGENTS = "the transport decides what it keeps of a dead peer's memory"
ONE_TURN = "cannot happen: one endpoint checks and posts in one turn, and evicts no peer for its age"
ONE_GROUP = "fixed in 0.32.0; in pdflow all groups of a request are one transfer"

IDENTITY = (
    Race(
        number="R39",
        name="base_id_cross_match",
        line="Two prompts share a base id, and a request gets the other prompt's KV.",
        source="probe",
        scope=Scope(requests=2, same_base=True, clocks=False, abort=0, deadline=0, stall=0),
        points=(at.two_candidates,),
        stock=Breaks("S4", 9),
        compat=Residual("S4", 8, UNIQUE),
        strict=Passes(Scope(requests=2, same_base=True, abort=0, deadline=0, stall=0)),
    ),
    Race(
        number="R40",
        name="n_gt_1_prefix",
        line="With n > 1, a child request's id has another base, and its legs never match.",
        source="by reading; #43509",
        stock=Unmodelled(MINTED),
        compat=Unmodelled(MINTED),
        strict=Unmodelled(MINTED),
    ),
    Race(
        number="R41",
        name="suffix_randomisation",
        line="Engines add their own suffixes to an id, and its legs never match.",
        source="#34747, #42839",
        stock=Unmodelled(MINTED),
        compat=covered_by("test_races.py::test_compat_base_id_matches_when_it_is_alone"),
        strict=covered_by("tests/routing/test_router.py::test_concurrent_dispatch_sends_both_legs_with_ps_coordinates"),
    ),
    Race(
        number="R42",
        name="engine_id_mismatch",
        line="An engine's address leads to itself or to another engine.",
        source="#27083",
        stock=Unmodelled(ADDRESSES),
        compat=Unmodelled(ADDRESSES),
        strict=covered_by("test_fixed.py::test_two_engines_with_one_id_are_both_refused"),
    ),
    Race(
        number="R43",
        name="mode_mismatch",
        line="A P that pushes is paired with a D that pulls.",
        source="#50620, merged",
        stock=Unmodelled(ONE_METHOD),
        compat=Unmodelled(ONE_METHOD),
        strict=Unmodelled(ONE_METHOD),
    ),
)

RESTART = (
    Race(
        number="R44",
        name="p_restart_same_addr",
        line="P restarts at the same address, and D continues with the state of P's former incarnation.",
        source="#50047, #55471, #58063",
        scope=Scope(p_restart=1, abort=0, deadline=0, stall=0),
        points=(at.p_dies,),
        stock=Unmodelled(AGENTS),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R45",
        name="d_restart_poisons_p",
        line="D is killed, and every transfer through P's stale agents fails.",
        source="smg #2382",
        scope=Scope(d_restart=1, abort=0, deadline=0, stall=0),
        points=(at.d_is_another,),
        stock=Unmodelled(AGENTS),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R46",
        name="static_engine_id_restart",
        line="D restarts with the same engine id, and P writes to the blocks of D's former incarnation.",
        source="analysis",
        scope=Scope(d_restart=1, abort=0, deadline=0, stall=0),
        points=(at.d_is_another,),
        stock=covered_by(
            "test_stock_names.py::test_r46_d_starts_again_with_the_same_id",
            "test_stock_names.py::test_r46_registrations_of_the_former_incarnation",
            note="breaks S8; in the checker, a dead process's addresses lead nowhere",
        ),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R47",
        name="evict_vs_push",
        line="One thread evicts a peer between another thread's check of that peer and its WRITE.",
        source="probe; analysis",
        scope=Scope(requests=2, concurrent=False, abort=0, deadline=0, stall=0),
        own_world="Evicting",
        points=(at.evicted_between_check_and_write,),
        stock=Breaks("L", 14),
        compat=Unmodelled(ONE_TURN),
        strict=Unmodelled(ONE_TURN),
    ),
    Race(
        number="R48",
        name="remote_disconnect",
        line="P dies with a prompt that D waits for.",
        source="#28120, #26171, #41853, #40364",
        scope=Scope(p_restart=1, abort=0, deadline=0, stall=0),
        points=(at.p_dies,),
        stock=Breaks("L", 4),
        compat=Passes(),
        strict=Passes(),
    ),
)

OUTCOMES = (
    Race(
        number="R49",
        name="double_finish_crash",
        line="An aborted request is reported as finished, or fails twice, and an assertion of the engine fails.",
        source="#46240, #53049, #54518",
        scope=Scope(deadline=0, stall=0),
        points=(at.completion_after_abort,),
        stock=InvariantHolds("S6"),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R50",
        name="success_never_reported",
        line="A push that has succeeded is not reported, and P holds every prompt for its whole lease.",
        source="#58188, merged",
        scope=Scope(clocks=False, abort=0),
        points=(at.write_ends_well,),
        stock=covered_by("test_stock.py::test_undisturbed_it_moves_what_compat_moves", note="fixed in 0.32.0"),
        compat=covered_by("test_stock.py::test_undisturbed_it_moves_what_compat_moves"),
        strict=Passes(),
    ),
    Race(
        number="R51",
        name="hma_fail_open",
        line="A receive that fails in one of several KV groups is reported as complete.",
        source="#52234, #52276, merged",
        stock=Unmodelled(ONE_GROUP),
        compat=Unmodelled(ONE_GROUP),
        strict=Unmodelled(ONE_GROUP),
    ),
    Race(
        number="R52",
        name="silent_layout",
        line="A region, offset or trim is wrong, and bytes land in the wrong place.",
        source="#57661, #48758, #53903",
        stock=covered_by(
            "tests/layout/test_pairing.py::test_one_block_too_many_on_d_shifts_nothing", note="fixed in 0.32.0"
        ),
        compat=covered_by("tests/layout/test_pairing.py::test_one_block_too_many_on_d_shifts_nothing"),
        strict=covered_by(
            "tests/layout/test_pairing.py::test_one_block_too_many_on_d_shifts_nothing",
            "test_races.py::test_r52_another_prompt_or_other_weights_are_refused",
        ),
    ),
)
