"""Races about ownership of blocks: P's, which are read, and D's, which are written (R01 to R20)."""

from __future__ import annotations

from pdflow_sim.check.races import points as at
from pdflow_sim.check.races.race import Breaks, InvariantHolds, Passes, Race, Residual, Unmodelled, covered_by
from pdflow_sim.check.scopes.scope import TOKENS, Scope

ONE_OWNER = "cannot happen: one endpoint owns lease and match, and handles one event at a time"
SHARDS = Scope(p_tp=2, dup=1, clocks=False, abort=0, deadline=0, stall=0)
ZOMBIE = Scope(d_tp=2, dup=1, concurrent=False, clocks=False, abort=0, deadline=0, stall=0)
UNIQUE = "nothing distinguishes prompts that have only a base id (7.2 relies on unique ids)"

SOURCE = (
    Race(
        number="R01",
        name="lease_expires_write_inflight",
        line="The lease ends while a WRITE is in flight. P frees the blocks, and another prompt reuses them "
        "while the NIC reads.",
        source="#58188",
        scope=Scope(abort=0, deadline=0, stall=0),
        points=(at.lease_ends_under_write,),
        stock=Breaks("S2", 7),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R02",
        name="deferred_write_after_expiry",
        line="A matched WRITE waits for its connection. The lease ends, and P posts the WRITE from blocks that "
        "are in reuse.",
        source="#55470",
        scope=Scope(abort=0, deadline=0, stall=0),
        points=(at.connected_too_late,),
        stock=Breaks("S2", 7),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R03",
        name="reap_vs_match_toctou",
        line="The engine's thread ends a lease and frees the blocks. The writer's thread is not notified yet "
        "and matches them.",
        source="probe",
        scope=Scope(abort=0, deadline=0, stall=0),
        own_world="TwoOwners",
        points=(at.registration_between_owners,),
        stock=Breaks("S2", 7),
        compat=Unmodelled(ONE_OWNER),
        strict=Unmodelled(ONE_OWNER),
    ),
    Race(
        number="R04",
        name="pull_read_vs_lease",
        line="D pauses for longer than the lease while its READ is in flight. P frees the blocks, and D decodes "
        "new content.",
        source="#21570; aibrix #1772",
        scope=Scope(pulls=True, horizon=5, skew=5, abort=0),
        points=(at.read_too_late,),
        stock=Breaks("S2", 11),
        compat=covered_by(
            "test_stock_source.py::test_r04_read_longer_than_the_lease", note="the check uses D's own clock"
        ),
        strict=Passes(Scope(pulls=True, abort=0)),
    ),
    Race(
        number="R05",
        name="hb_id_mismatch",
        line="Both legs start at once. D's heartbeats name the router's id, which P does not know, and P's lease ends.",
        source="#53095",
        scope=Scope(horizon=4, abort=0),
        points=(at.interest, at.lease_ends_in_queue),
        stock=Breaks("L", 14),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R06",
        name="lease_clock_epoch",
        line="Scheduler and worker compare clocks of different machines.",
        source="#50326, merged",
        stock=covered_by("test_cells.py::test_only_differences_of_time_count", note="fixed in 0.32.0"),
        compat=covered_by("test_cells.py::test_only_differences_of_time_count"),
        strict=covered_by("test_cells.py::test_only_differences_of_time_count"),
    ),
    Race(
        number="R07",
        name="reaper_head_of_line",
        line="A renewed lease is first in the queue and hides leases behind it that have ended.",
        source="#58222, #50789, merged",
        scope=Scope(requests=2, abort=0, deadline=0, stall=0),
        points=(at.second_lease_ends_first,),
        stock=Unmodelled("fixed in 0.32.0, which checks all of them; in pdflow each prompt has its own timer"),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R08",
        name="turn2_read_expired",
        line="For a second turn, P reads blocks that D no longer holds.",
        source="#47021, merged",
        stock=Unmodelled("pdflow never reads KV back from D"),
        compat=Unmodelled("pdflow never reads KV back from D"),
        strict=Unmodelled("pdflow never reads KV back from D"),
    ),
    Race(
        number="R09",
        name="head_step_stall",
        line="A step of D is longer than the lease, so D sends no heartbeat. P frees the blocks before D's READ "
        "has begun.",
        source="analysis",
        scope=Scope(pulls=True, horizon=5, skew=5, abort=0),
        points=(at.admitted_too_late,),
        stock=Breaks("S2", 11),
        compat=covered_by(
            "test_stock_source.py::test_r09_a_step_of_d_longer_than_the_lease", note="the check uses D's own clock"
        ),
        strict=Passes(Scope(pulls=True, abort=0)),
    ),
)

DESTINATION = (
    Race(
        number="R10",
        name="abort_frees_under_write",
        line="D aborts a request, then frees and reuses its blocks while P writes to them.",
        source="#32255, merged; sglang #24527",
        scope=Scope(deadline=0, stall=0),
        points=(at.abort_under_write,),
        stock=InvariantHolds("S1"),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R11",
        name="abort_before_alloc_push",
        line="D will not register, because the client left or D has the whole prompt in its cache. P is not "
        "notified and holds the prompt for a full lease.",
        source="probe",
        scope=Scope(hit_tokens=TOKENS, deadline=0, stall=0, clocks=False),
        points=(at.abort_before_blocks,),
        stock=Breaks("L2", 3),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R12",
        name="stale_reg_matches_retry",
        line="A registration outlives its attempt. P writes the retry's prompt to the first attempt's blocks, "
        "and the retry waits.",
        source="probe",
        scope=Scope(requests=2, same_base=True, prefill_abort=1, deadline=0, stall=0),
        points=(at.stale_registration, at.foreign_lands),
        stock=Breaks("L", 9),
        compat=Residual("S1", 8, UNIQUE),
        strict=Passes(),
    ),
    Race(
        number="R13",
        name="second_rank_reg_zombie",
        line="D's first rank registers, and P writes to both ranks. The second rank's registration then matches "
        "another prompt.",
        source="probe",
        scope=Scope(
            requests=2, same_base=True, d_tp=2, dup=1, concurrent=False, clocks=False, abort=0, deadline=0, stall=0
        ),
        points=(at.registration_too_late,),
        stock=Breaks("S1", 14),
        compat=Passes(),
        strict=Passes(ZOMBIE),
    ),
    Race(
        number="R14",
        name="duplicate_notif_early_complete",
        line="One rank of P is matched twice. D counts its completions as two ranks and decodes without the "
        "other rank's half.",
        source="probe",
        scope=Scope(requests=2, same_base=True, p_tp=2, dup=1, clocks=False, abort=0, deadline=0, stall=0),
        points=(at.copy_after_half,),
        stock=Breaks("S3", 10),
        compat=Passes(SHARDS),
        strict=Passes(SHARDS),
    ),
    Race(
        number="R15",
        name="abort_held_forever",
        line="D aborts a request, and P has died: no completion ever frees D's blocks.",
        source="#46283, #46289",
        scope=Scope(p_restart=1, deadline=0, stall=0),
        points=(at.p_dies_after_abort,),
        stock=Breaks("L", 4),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R16",
        name="sibling_handle_error",
        line="One of several READs fails, and D frees the blocks while the other READs land.",
        source="#56104, merged",
        scope=Scope(pulls=True, p_tp=2, err=1, abort=0, deadline=0, stall=0),
        points=(at.sibling_ends_badly,),
        stock=InvariantHolds("S1"),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R17",
        name="release_raises",
        line="A handle ends with an error, and P frees blocks that the WRITE may still read.",
        source="#56104; push: by reading",
        scope=Scope(err=1, abort=0, deadline=0, stall=0),
        points=(at.lease_ends_after_error,),
        stock=Breaks("S2", 9),
        compat=Passes(),
        strict=Passes(),
    ),
    Race(
        number="R18",
        name="ack_target_lost",
        line="Two ranks cancel a WRITE, and one acknowledgement overwrites the other.",
        source="sglang #38961, #37077",
        scope=Scope(d_tp=2, deadline=0, stall=0),
        points=(at.second_cancel,),
        stock=Unmodelled("cannot happen: vLLM has no CANCEL"),
        compat=Unmodelled("cannot happen: vLLM has no CANCEL"),
        strict=Passes(),
    ),
    Race(
        number="R19",
        name="lost_transport_ack",
        line="The data have landed, but P's transport reports a failure, and D waits forever.",
        source="ROCm/mori #655",
        scope=Scope(err=1, chunks=2, horizon=3, abort=0),
        points=(at.error_after_landing,),
        stock=Breaks("L", 15),
        compat=Passes(),
        strict=Passes(Scope(err=1, chunks=2, abort=0, deadline=0, stall=0)),
    ),
    Race(
        number="R20",
        name="recompute_in_place_under_late_write",
        line="D recomputes a prompt in blocks that another rank's operation still writes.",
        source="analysis",
        scope=Scope(pulls=True, d_tp=2, err=1, abort=0, deadline=0, stall=0),
        points=(at.sibling_ends_badly,),
        stock=InvariantHolds("S1"),
        compat=Passes(),
        strict=Passes(),
    ),
)
