"""Mutants of vllm-compat, each without one of its rules C1 to C13. Rules that strict shares have mutants there.

The residual risks of vllm-compat (spec 6.2) are excluded: clocks agree, and dispatches have ids of their own.
"""

from __future__ import annotations

from pdflow.protocol.consumer.cell import WAITING, RequestFailed
from pdflow.protocol.consumer.rules import RULES
from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow_sim.check.mutants.mutant import Mutant, TableRow
from pdflow_sim.check.scopes.scope import TOKENS, Scope

COMPAT: tuple[Mutant, ...] = (
    Mutant(
        name="compat-counts-completions",
        drops="D distinguishes completions by their sender.",
        source="C1; R14",
        guards=("counts_senders",),
        scope=Scope(dialect=VLLM_COMPAT, p_tp=2, abort=0, deadline=0, stall=0),
        survives="While C4 holds, no rank writes twice, so none completes twice. A notification arrives once or never.",
    ),
    Mutant(
        name="compat-drops-early-completions",
        drops="A completion that arrives early counts. Without it, D waits for that completion. The mutant also "
        "drops half of C4; with it, no completion is early.",
        source="C2; C4; R26",
        guards=("keeps_early", "writes_registered_only"),
        scope=Scope(dialect=VLLM_COMPAT, d_tp=2, lagging=True, abort=0, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="compat-frees-under-a-write",
        drops="When a lease ends, P keeps the blocks until the WRITEs in flight have ended. Without it, the NIC "
        "reads blocks that belong to another prompt.",
        source="C3; R01",
        guards=("writes_pin",),
        scope=Scope(dialect=VLLM_COMPAT),
        breaks="S2",
    ),
    Mutant(
        name="compat-deferred-write-after-expiry",
        drops="When a lease ends, P drops a WRITE that waits for its connection. Without it, P posts the WRITE "
        "from freed blocks.",
        source="C3; R02",
        guards=("lease_rechecked",),
        scope=Scope(dialect=VLLM_COMPAT),
        breaks="S2",
    ),
    Mutant(
        name="compat-error-without-fence",
        drops="After an error, P closes its endpoint before it releases the blocks. Without it, P frees blocks "
        "that a NIC may still read.",
        source="C3; R17; R21",
        guards=("fences_errors",),
        scope=Scope(dialect=VLLM_COMPAT, err=1),
        breaks="S2",
    ),
    Mutant(
        name="compat-registrations-stay",
        drops="A registration that finds no prompt ends by its TTL. Without it, P keeps it forever.",
        source="M7; C4; R24",
        guards=("registrations_end",),
        scope=Scope(dialect=VLLM_COMPAT),
        breaks="L",
    ),
    Mutant(
        name="compat-zombie-registrations",
        drops="P consumes the registrations of all ranks together. Without it, a second rank's registration "
        "stays, and P writes to that request again.",
        source="C4; R12; R13",
        guards=("writes_registered_only", "registrations_end"),
        scope=Scope(dialect=VLLM_COMPAT, d_tp=2, requests=2, same_product=True, deadline=0, stall=0),
        breaks="S3",
    ),
    Mutant(
        name="compat-first-rank-counts-for-all",
        drops="P writes to a D rank only after that rank has registered.",
        source="C4; R13; R26",
        guards=("writes_registered_only",),
        scope=Scope(dialect=VLLM_COMPAT, d_tp=2, dup=1),
        survives="C2 counts the completions that arrive early because of it, and tombstones stop the registrations "
        "that remain.",
    ),
    Mutant(
        name="compat-first-candidate",
        drops="A base id counts only if there is one candidate on each side. Without it, P delivers another "
        "tenant's KV.",
        source="M6; C5; R12; R39",
        guards=("one_candidate_only",),
        scope=Scope(dialect=VLLM_COMPAT, requests=2, same_base=True, concurrent=False, abort=0, clocks=False),
        breaks="S4",
    ),
    Mutant(
        name="compat-watchdog-logs",
        drops="D's watchdog resolves the request. Without it, the request waits and renews P's lease forever.",
        source="C6; R21; R23; L4",
        patches=(TableRow(RULES, (WAITING, RequestFailed)),),
        scope=Scope(dialect=VLLM_COMPAT, drop=1),
        breaks="S10",
    ),
    Mutant(
        name="compat-quarantine-never-ends",
        drops="Quarantine ends when a correct P can no longer begin a WRITE. Without it, D's blocks stay in "
        "quarantine forever.",
        source="C6; R15; L3",
        guards=("quarantine_ends",),
        scope=Scope(dialect=VLLM_COMPAT, drop=1),
        breaks="L",
    ),
    Mutant(
        name="compat-releases-nothing",
        drops="A D that will not register notifies P, which releases the prompt. Without it, P holds the prompt "
        "for 30 s.",
        source="C7; R11; L2",
        guards=("releases_unregistered",),
        scope=Scope(dialect=VLLM_COMPAT, hit_tokens=TOKENS, clocks=False),
        breaks="L2",
    ),
    Mutant(
        name="compat-forgets-failures",
        drops="A rank waits before it connects again to a peer that it could not reach.",
        source="C9; R30",
        guards=("remembers_failures",),
        scope=Scope(dialect=VLLM_COMPAT, unreachable=2),
        survives="The rule saves other requests the time of failed handshakes (L6). To show that takes clocks and a "
        "second peer.",
    ),
    Mutant(
        name="compat-heartbeats-name-wrong-id",
        drops="D's heartbeats name P's own id of the prompt.",
        source="C10; R05",
        guards=("knows_prefill_id",),
        scope=Scope(dialect=VLLM_COMPAT, sync=1),
        survives="Without clocks, a lease may end whether it is renewed or not. For a pull, its renewal is assumed.",
    ),
    Mutant(
        name="compat-any-incarnation",
        drops="A frame counts only if it is from the incarnation that the last handshake showed.",
        source="C13; R44; R46; S8",
        guards=("checks_incarnation",),
        scope=Scope(dialect=VLLM_COMPAT, p_restart=1, p_tp=2),
        survives="The request still ends, only later: the watchdog resolves it, and the reclaim time frees its blocks.",
    ),
    Mutant(
        name="compat-accepts-late-reads",
        drops="A READ counts only if D was never silent for so long that P's lease could have ended.",
        source="spec 6.2; R04; R09",
        guards=("doubts_reads",),
        scope=Scope(dialect=VLLM_COMPAT, pulls=True, sync=1),
        survives="The rule depends on clocks, and a scope without clocks assumes that they agree.",
    ),
    Mutant(
        name="compat-no-limit-for-a-peer",
        drops="At admission, D limits how much of its pool one P may hold. Without it, a P that does not answer "
        "takes the blocks that requests of another P need.",
        source="spec 2.13; L6; L7; R38",
        guards=("limits_peers",),
        scope=Scope(
            dialect=VLLM_COMPAT, p_engines=2, requests=3, pool_blocks=8, concurrent=False, clocks=False, abort=0
        ),
        breaks="L6",
    ),
)
