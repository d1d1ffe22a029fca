"""Mutants of vllm-compat, each without one of its rules C1 to C13. Those that strict shares are among its own mutants.

The residual risks of vllm-compat (PROTOCOL 7.2) are excluded: clocks agree, and dispatches have ids of their own.
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
        drops="Completions are told apart by their sender.",
        source="C1; R14",
        guards=("counts_senders",),
        scope=Scope(dialect=VLLM_COMPAT, p_tp=2, abort=0, deadline=0, stall=0),
        survives="While C4 holds nobody writes, and so completes, twice; a notice comes once or never.",
    ),
    Mutant(
        name="compat-drops-early-completions",
        drops="A completion that comes early counts. Nothing is early unless C4's other half fails too, as here.",
        source="C2; C4; R26",
        guards=("keeps_early", "writes_registered_only"),
        scope=Scope(dialect=VLLM_COMPAT, d_tp=2, lagging=True, abort=0, clocks=False),
        breaks="L1",
    ),
    Mutant(
        name="compat-frees-under-a-write",
        drops="A lease's end waits for the WRITEs in flight. The NIC would read blocks that are somebody else's.",
        source="C3; R01",
        guards=("writes_pin",),
        scope=Scope(dialect=VLLM_COMPAT),
        breaks="S2",
    ),
    Mutant(
        name="compat-deferred-write-after-expiry",
        drops="A lease's end calls off a WRITE that waits for its connection. It would be posted from freed blocks.",
        source="C3; R02",
        guards=("lease_rechecked",),
        scope=Scope(dialect=VLLM_COMPAT),
        breaks="S2",
    ),
    Mutant(
        name="compat-error-is-the-end",
        drops="After an error P closes its endpoint before it lets go. A NIC may still be reading what it frees.",
        source="C3; R17; R21",
        guards=("fences_errors",),
        scope=Scope(dialect=VLLM_COMPAT, err=1),
        breaks="S2",
    ),
    Mutant(
        name="compat-registrations-stay",
        drops="A registration that nobody serves ends by its TTL. P would keep it for ever.",
        source="1.3(f) 7; C4; R24",
        guards=("registrations_end",),
        scope=Scope(dialect=VLLM_COMPAT),
        breaks="L",
    ),
    Mutant(
        name="compat-zombie-registrations",
        drops="All ranks' registrations are consumed together. A second rank's would stay, and be written once more.",
        source="C4; R12; R13",
        guards=("writes_registered_only", "registrations_end"),
        scope=Scope(dialect=VLLM_COMPAT, d_tp=2, requests=2, same_product=True, deadline=0, stall=0),
        breaks="S3",
    ),
    Mutant(
        name="compat-first-rank-speaks-for-all",
        drops="P writes a D rank after that rank's own registration.",
        source="C4; R13; R26",
        guards=("writes_registered_only",),
        scope=Scope(dialect=VLLM_COMPAT, d_tp=2, dup=1),
        survives="C2 counts the completions that come early for it, and tombstones stop the registrations left over.",
    ),
    Mutant(
        name="compat-first-candidate",
        drops="A base id counts only if one candidate stands on each side. Another tenant's KV would be delivered.",
        source="1.3(f) 6; C5; R12; R39",
        guards=("one_candidate_only",),
        scope=Scope(dialect=VLLM_COMPAT, requests=2, same_base=True, concurrent=False, abort=0, clocks=False),
        breaks="S4",
    ),
    Mutant(
        name="compat-watchdog-logs",
        drops="D's watchdog resolves the request. It would wait, and renew P's lease, for ever.",
        source="C6; R21; R23; L4",
        patches=(TableRow(RULES, (WAITING, RequestFailed)),),
        scope=Scope(dialect=VLLM_COMPAT, drop=1),
        breaks="L",
    ),
    Mutant(
        name="compat-quarantine-for-ever",
        drops="Quarantine ends when a correct P can no longer begin. D's blocks would wait for ever.",
        source="C6; R15; L3",
        guards=("quarantine_ends",),
        scope=Scope(dialect=VLLM_COMPAT, drop=1),
        breaks="L",
    ),
    Mutant(
        name="compat-releases-nothing",
        drops="A D that will not register lets P go. P would hold the prompt for 30 s.",
        source="C7; R11; L2",
        guards=("releases_unregistered",),
        scope=Scope(dialect=VLLM_COMPAT, hit_tokens=TOKENS, clocks=False),
        breaks="L2",
    ),
    Mutant(
        name="compat-forgets-failures",
        drops="A peer that could not be reached is left alone for a while.",
        source="C9; R30",
        guards=("remembers_failures",),
        scope=Scope(dialect=VLLM_COMPAT, unreachable=2),
        survives="It saves others the time of its handshakes: L6, for which it takes clocks and a second peer.",
    ),
    Mutant(
        name="compat-heartbeats-to-nobody",
        drops="Heartbeats name P's own id of the prompt.",
        source="C10; R05",
        guards=("knows_prefill_id",),
        scope=Scope(dialect=VLLM_COMPAT, sync=1),
        survives="Without clocks a lease may end whether it is renewed or not; for a pull its renewal is assumed.",
    ),
    Mutant(
        name="compat-any-life",
        drops="A frame counts only from the life that the last handshake showed.",
        source="C13; R44; R46; S8",
        guards=("checks_incarnation",),
        scope=Scope(dialect=VLLM_COMPAT, p_restart=1, p_tp=2),
        survives="It takes longer: the watchdog ends the request, and the reclaim time its blocks.",
    ),
    Mutant(
        name="compat-believes-reads",
        drops="A READ counts only if D was never silent for so long that its lease could have run out.",
        source="7.2; R04; R09",
        guards=("doubts_reads",),
        scope=Scope(dialect=VLLM_COMPAT, pulls=True, sync=1),
        survives="It rests on clocks, which the untimed world assumes to agree.",
    ),
    Mutant(
        name="compat-no-limit-for-a-peer",
        drops="What one P may bind of D's pool is limited at admission.",
        source="7.4 Quarantine limits; L6; L7; R38",
        guards=("limits_peers",),
        scope=Scope(
            dialect=VLLM_COMPAT, p_engines=2, requests=3, pool_blocks=8, concurrent=False, clocks=False, abort=0
        ),
        breaks="L6",
    ),
)
