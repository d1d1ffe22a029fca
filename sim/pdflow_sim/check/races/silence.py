"""Races about missing signals (R21 to R31, R38) and about malformed messages (R32 to R37)."""

from __future__ import annotations

from pdflow_sim.check.races import points as at
from pdflow_sim.check.races.race import Breaks, Passes, Race, Unmodelled, covered_by
from pdflow_sim.check.scopes.scope import Scope

DRIVER = "the driver decides the order of inputs (C11); an endpoint handles one at a time, and all orders are explored"
TURNS = (
    "tests/serving/test_races.py::test_r28_simulated_what_had_arrived_is_handled_before_a_deadline",
    "tests/serving/test_races.py::test_r28_live_what_had_arrived_is_handled_before_a_deadline",
)
POLLS = "the driver polls an idle engine; in the checker, an operation that has ended is reported at some time"
ONE_EVENT = "a handshake ends in one event, so it never fails halfway"
PARAMETERS = "the checker's endpoints get parameters as values; pdflow.methods.params parses a client's request"

MISSING = (
    Race(
        number="R21",
        name="write_fail_silent",
        line="P's WRITE fails, and no peer is notified. D waits, and its heartbeats renew P's lease.",
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
        line="P cannot reach D. The match has used up registration and prompt, and no peer is notified.",
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
        line="D's watchdog writes a log line, and its request keeps waiting.",
        source="probe",
        stock=covered_by(
            "test_stock_silence.py::test_r23_watchdog",
            note="the outcome depends on which of two times comes first; the request keeps waiting",
        ),
        compat=covered_by("test_stock_silence.py::test_r23_watchdog"),
        strict=covered_by("test_stock_silence.py::test_r23_watchdog"),
    ),
    Race(
        number="R24",
        name="late_reg_no_nack",
        line="A registration arrives after the lease has ended. P keeps it and does not answer.",
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
        line="D's registration reaches one of P's two ranks, and D waits for the other.",
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
        line="D's second rank lags. P writes to it when the first rank has registered, and the second drops the "
        "completion.",
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
        line="A completion is lost. P does not repeat it, and D does not ask for it.",
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
        line="A deadline is handled before an input that has already arrived.",
        source="sglang #32267",
        stock=Unmodelled(DRIVER),
        compat=Unmodelled(DRIVER),
        strict=covered_by(*TURNS),
    ),
    Race(
        number="R29",
        name="idle_engine_no_poll",
        line="The last request ends and the engine becomes idle, so no thread polls a WRITE in flight.",
        source="#45880",
        stock=Unmodelled(POLLS),
        compat=Unmodelled(POLLS),
        strict=covered_by("tests/serving/test_races.py::test_r29_a_write_of_an_idle_engine_is_ended"),
    ),
    Race(
        number="R30",
        name="executor_head_of_line",
        line="One thread does all handshakes: one dead peer delays all other handshakes by 5 s.",
        source="#48633 (S2)",
        stock=Unmodelled(
            "the driver decides how many handshakes run at once; each is a separate effect of an endpoint"
        ),
        compat=Unmodelled("as in vllm-stock; C9 requires at least four at once from a driver"),
        strict=covered_by("test_races.py::test_r30_one_dead_peer_delays_nobody"),
    ),
    Race(
        number="R31",
        name="half_handshake_poison",
        line="A handshake fails halfway, and the state that it leaves makes all later handshakes fail.",
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
        line="Requests that wait for KV take every slot, and D admits nothing else.",
        source="#53130",
        stock=covered_by("test_admission.py::test_r38_one_peer_takes_every_block"),
        compat=covered_by("test_admission.py::test_r38_one_peer_takes_every_block"),
        strict=covered_by("test_admission.py::test_r38_one_peer_takes_every_block"),
    ),
)

RAISES = "the test includes the input that raises in vLLM; an endpoint raises no exception in any dialect"
INPUT = (
    Race(
        number="R32",
        name="malformed_completion_kills_engine",
        line="A malformed completion raises an exception on the engine's thread.",
        source="probe",
        stock=covered_by("wire/test_wire_vllm.py::test_r32_malformed_completion_is_a_value", note=RAISES),
        compat=covered_by("wire/test_wire_vllm.py::test_r32_malformed_completion_is_a_value"),
        strict=covered_by("wire/test_wire_strict.py::test_r32_strict_decoders_survive_any_bytes"),
    ),
    Race(
        number="R33",
        name="handshake_listener_killed",
        line="Malformed bytes end the thread that listens for handshakes.",
        source="#54757",
        stock=covered_by("wire/test_wire_handshake.py::test_r33_handshake_listener_gets_a_value", note=RAISES),
        compat=covered_by("wire/test_wire_handshake.py::test_r33_handshake_listener_gets_a_value"),
        strict=covered_by("wire/test_wire_handshake.py::test_r33_handshake_listener_gets_a_value"),
    ),
    Race(
        number="R34",
        name="poison_push_reg",
        line="A registration without its fields raises an exception in the writer's thread, and the rest of its "
        "batch is lost.",
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
        line="Invalid parameters from a client end a push engine.",
        source="probe",
        stock=Unmodelled(PARAMETERS),
        compat=Unmodelled(PARAMETERS),
        strict=Unmodelled(PARAMETERS),
    ),
    Race(
        number="R36",
        name="bad_params_pull_park",
        line="Invalid parameters from a client make a pull request wait forever.",
        source="probe",
        stock=Unmodelled(PARAMETERS),
        compat=Unmodelled(PARAMETERS),
        strict=Unmodelled(PARAMETERS),
    ),
    Race(
        number="R37",
        name="push_hetero_block_size_crash",
        line="The engines have unequal block sizes, and the completion raises an exception.",
        source="probe",
        stock=Unmodelled(
            "an exception in an engine's loop; an endpoint raises none, and vllm-stock refuses unequal blocks"
        ),
        compat=covered_by("test_races.py::test_r37_compat_refuses_unequal_blocks_and_strict_takes_them"),
        strict=covered_by("test_races.py::test_r37_compat_refuses_unequal_blocks_and_strict_takes_them"),
    ),
)
