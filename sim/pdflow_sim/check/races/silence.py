"""Races about missing signals (R21 to R31, R38) and about messages that make no sense (R32 to R37)."""

from __future__ import annotations

from pdflow_sim.check.races import points as at
from pdflow_sim.check.races.race import Breaks, Passes, Race, Unmodelled, covered_by
from pdflow_sim.check.scopes.scope import Scope

DRIVER = (
    "which input comes first is its driver's to say (C11); the machine takes one at a time, and any order is explored"
)
TURNS = (
    "tests/serving/test_races.py::test_r28_simulated_what_had_arrived_is_handled_before_a_deadline",
    "tests/serving/test_races.py::test_r28_live_what_had_arrived_is_handled_before_a_deadline",
)
POLLS = "who polls an idle engine is its driver's; here whatever has ended is told at some time"
ONE_EVENT = "a handshake ends in one event, so that it is never half there"
PARAMETERS = "parameters come as values; no room reads them from a client's request yet"

MISSING = (
    Race(
        number="R21",
        name="write_fail_silent",
        line="P's WRITE fails and nobody is told; D waits, and its heartbeats keep P's lease.",
        source="#50754",
        scope=Scope(err=1, horizon=3, abort=0),
        points=(at.write_fails,),
        stock=Breaks("L", 13),
        compat=Passes(),
        strict=Passes(Scope(err=1, abort=0, deadline=0, stall=0)),
    ),
    Race(
        number="R22",
        name="p_handshake_fail",
        line="P cannot reach D; registration and prompt are used up, and nobody is told.",
        source="by reading",
        scope=Scope(unreachable=1, abort=0, deadline=0, stall=0),
        points=(at.p_cannot_reach_d,),
        stock=Breaks("L", 6),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R23",
        name="watchdog_toothless",
        line="D's watchdog writes a line to the log, and its request waits on.",
        source="probe",
        stock=covered_by(
            "test_stock_silence.py::test_r23_watchdog", note="which of two times comes first; it waits on"
        ),
        compat=covered_by("test_stock_silence.py::test_r23_watchdog"),
        strict=covered_by("test_stock_silence.py::test_r23_watchdog"),
    ),
    Race(
        number="R24",
        name="late_reg_no_nack",
        line="A registration comes after the lease: it is kept, and not answered.",
        source="probe",
        scope=Scope(abort=0, deadline=0, stall=0),
        points=(at.registration_after_lease,),
        stock=Breaks("L", 6),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R25",
        name="reg_send_partial_failure",
        line="The registration reaches one of P's two ranks; D waits for the other.",
        source="by reading",
        scope=Scope(p_tp=2, drop=1, abort=0, deadline=0, stall=0),
        points=(at.registration_lost,),
        stock=Breaks("L", 4),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R26",
        name="early_notif_dropped",
        line="D's second rank lags; it is written on the first one's word, and drops the completion.",
        source="probe; #43509",
        scope=Scope(lagging=True, d_tp=2, abort=0, deadline=0, stall=0),
        points=(at.one_rank_lags, at.completion_too_early),
        stock=Breaks("L", 11),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R27",
        name="notif_dropped",
        line="A completion is lost; it is neither repeated nor asked for.",
        source="TRT-LLM #17665; nixl #182",
        scope=Scope(drop=1, abort=0, deadline=0, stall=0),
        points=(at.completion_lost,),
        stock=Breaks("L", 8),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R28",
        name="notif_not_drained_before_timeout",
        line="A deadline is judged before what has arrived is heard.",
        source="sglang #32267",
        stock=Unmodelled(DRIVER),
        compat=Unmodelled(DRIVER),
        strict=covered_by(*TURNS),
    ),
    Race(
        number="R29",
        name="idle_engine_no_poll",
        line="The last request ends, the engine parks, and nobody polls a WRITE under way.",
        source="#45880",
        stock=Unmodelled(POLLS),
        compat=Unmodelled(POLLS),
        strict=covered_by("tests/serving/test_races.py::test_r29_a_write_of_an_idle_engine_is_ended"),
    ),
    Race(
        number="R30",
        name="executor_head_of_line",
        line="One thread for all handshakes: a dead peer costs everybody behind it 5 s.",
        source="#48633 (S2)",
        stock=Unmodelled(
            "how many handshakes run at once is the driver's; to the machine each is an effect of its own"
        ),
        compat=Unmodelled("the same; PROTOCOL C9 asks at least four of a driver"),
        strict=covered_by("test_races.py::test_r30_one_dead_peer_delays_nobody"),
    ),
    Race(
        number="R31",
        name="half_handshake_poison",
        line="A handshake fails halfway, and what it has left behind fails all that follow.",
        source="by reading",
        stock=Unmodelled(ONE_EVENT),
        compat=Unmodelled(ONE_EVENT),
        strict=covered_by(
            "tests/runtime/nodes/test_links.py::test_a_stream_that_ends_during_connect_fails_the_handshake"
        ),
    ),
    Race(
        number="R38",
        name="admission_wedge",
        line="Requests that wait for KV take every seat, and nothing else is admitted.",
        source="#53130",
        stock=covered_by("test_admission.py::test_r38_one_peer_takes_every_block"),
        compat=covered_by("test_admission.py::test_r38_one_peer_takes_every_block"),
        strict=covered_by("test_admission.py::test_r38_one_peer_takes_every_block"),
    ),
)

RAISES = "what raises in vLLM is among its cases; an endpoint raises nothing in any dialect"
INPUT = (
    Race(
        number="R32",
        name="malformed_completion_kills_engine",
        line="A completion that cannot be read raises on the engine's thread.",
        source="probe",
        stock=covered_by("wire/test_wire_vllm.py::test_r32_malformed_completion_is_a_value", note=RAISES),
        compat=covered_by("wire/test_wire_vllm.py::test_r32_malformed_completion_is_a_value"),
        strict=covered_by("wire/test_wire_strict.py::test_r32_strict_decoders_survive_any_bytes"),
    ),
    Race(
        number="R33",
        name="handshake_listener_killed",
        line="Garbage ends the thread that listens for handshakes.",
        source="#54757",
        stock=covered_by("wire/test_wire_handshake.py::test_r33_handshake_listener_gets_a_value", note=RAISES),
        compat=covered_by("wire/test_wire_handshake.py::test_r33_handshake_listener_gets_a_value"),
        strict=covered_by("wire/test_wire_handshake.py::test_r33_handshake_listener_gets_a_value"),
    ),
    Race(
        number="R34",
        name="poison_push_reg",
        line="A registration without its fields raises in the writer's thread, and what was read with it is lost.",
        source="probe",
        scope=Scope(requests=2, concurrent=False, deadline=0, stall=0),
        own_world="Poisoned",
        points=(at.poison_before_registration,),
        stock=Breaks("L", 8),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R35",
        name="bad_params_push_crash",
        line="Bad parameters from a client end a push engine.",
        source="probe",
        stock=Unmodelled(PARAMETERS),
        compat=Unmodelled(PARAMETERS),
        strict=Unmodelled(PARAMETERS),
    ),
    Race(
        number="R36",
        name="bad_params_pull_park",
        line="Bad parameters from a client park a pull request for ever.",
        source="probe",
        stock=Unmodelled(PARAMETERS),
        compat=Unmodelled(PARAMETERS),
        strict=Unmodelled(PARAMETERS),
    ),
    Race(
        number="R37",
        name="push_hetero_block_size_crash",
        line="Engines of unequal block size: an exception when the completion arrives.",
        source="probe",
        stock=Unmodelled(
            "an exception in an engine's loop; an endpoint raises nothing, and stock refuses as compat does"
        ),
        compat=covered_by("test_races.py::test_r37_compat_refuses_unequal_blocks_and_strict_takes_them"),
        strict=covered_by("test_races.py::test_r37_compat_refuses_unequal_blocks_and_strict_takes_them"),
    ),
)
