"""The differences between the dialects, as named guards: one state machine, one table.

Each guard is read where its rule stands; nothing else in the protocol asks for a dialect's name. The table in
docs/dialects.md is generated from this file.

`strict` is pdflow's own (PROTOCOL 7.3 to 7.5); `vllm-compat` speaks vLLM 0.32's wire format and timers with the
fixes C1 to C13 that need no wire change (PROTOCOL 7.2). `vllm-stock` is vLLM 0.32.0 without them, faults included: for
simulating and checking, and nothing live accepts it. What it lacks, and which races that opens: docs/compat.md.
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class Dialect(Value, frozen=True, gc=False):
    """The guards of one dialect. A docstring per guard says what both values mean; the generated table prints it."""

    name: str

    control_frames: bool
    """REG_ACK, FAIL, CANCEL, CANCEL_ACK, RELEASE and SYNC exist. Without them P cannot say that it failed and D cannot
    call a write off: D's blocks then leave quarantine by completions, proof of death, or the reclaim time."""

    matches_by_xid: bool
    """A registration names its prefill product. Otherwise: transfer id, exact id, and the base id only if exactly one
    candidate stands on each side (C5)."""

    floor: bool
    """Tombstones live until D's floor passes them. Otherwise the newest few thousand ended registrations are
    remembered, so that a late copy of one never writes again; one that finds no product ends by its TTL (C4)."""

    waits_for_all_ranks: bool
    """P writes when every target D rank has registered. Otherwise it waits at most `join_ns` and then writes to the
    ranks that registered and to no other (C4)."""

    checks_content: bool
    """REG and DONE carry a digest of the token prefix and the weight version, and both sides compare."""

    lease_words: bool
    """Pull: D reads P's lease word after the data and commits only if it is unchanged. Otherwise D trusts its own
    silence: more than 0.75 of a lease extension since its last heartbeat is stale."""

    unequal_blocks: bool
    """Push between engines of different block size. vLLM 0.32 breaks on it (R37), so compat refuses (C12)."""

    polls_at_steps: bool
    """Notifications and handles are polled once per engine step (and by push's writer thread every millisecond), as in
    vLLM. Otherwise the endpoint runs beside the engine's loop."""

    writes_pin: bool
    """P: the end of a lease waits for the WRITEs in flight (C3). Otherwise it frees their source under them (R01)."""

    lease_rechecked: bool
    """P: the lease is judged again at a match and when a deferred WRITE's handshake has ended (C3). Otherwise neither
    the end of the lease nor its time stops a WRITE that has been matched, and it reads freed blocks (R02)."""

    fences_errors: bool
    """P closes its endpoint to a D rank whose WRITE ended with an error before it lets go of the source. Otherwise an
    error counts as the WRITE's end, though it proves nothing (R17, R19), and nobody is told (R21)."""

    registrations_end: bool
    """P: a registration ends by its TTL, with its prefill or its D's life, and leaves a tombstone (C3, C4). Otherwise
    one that has found no prompt stands for ever, and any later prompt of its name takes it (R12, R13, R24)."""

    prompts_match_again: bool
    """P: a prompt whose registration has ended without its data may be registered for again, and two attempts may
    share one. Otherwise the first match takes it: if that fails, it lingers on its lease unseen (R21, R22)."""

    writes_registered_only: bool
    """P writes a D rank only after that rank's own registration (C4). Otherwise the first one speaks for all ranks; the
    others' registrations stay behind as zombies (R13), and completions reach ranks that know of nothing yet (R26)."""

    one_candidate_only: bool
    """P reads the transfer id, and goes by the base id only if one candidate stands on each side (C5). Otherwise there
    is no transfer id, and of several with one base id the first to come is taken (R12, R39)."""

    counts_senders: bool
    """Completions are told apart by who sent them (C1). Otherwise they are counted, so that one sender twice passes for
    two (R14)."""

    keeps_early: bool
    """D: a completion that comes before its rank has heard of its request counts (C2). Otherwise it is dropped
    (R26)."""

    watchdog_resolves: bool
    """D's watchdog resolves a request that nobody writes, and its heartbeats stop (C6). Otherwise the watchdog logs a
    line: the request waits, and renews P's lease, until its client gives up (R21, R22, R23, R25)."""

    fails_at_once: bool
    """D resolves a request at the first shard that is lost; its blocks follow by way of quarantine. Otherwise when all
    its ranks have reported, and its blocks go with it."""

    quarantine_ends: bool
    """D: blocks that nobody may have anymore are freed by completions, by proof of their writers' death, or at the time
    when a correct P can no longer begin. Otherwise by completions alone: where none comes, never (R15)."""

    releases_unregistered: bool
    """A D that will not take a prompt lets P go of it: push, where it will not register (C7); pull, where a READ has
    failed. Otherwise it says nothing, and P's lease must end (R11); but a pull that never began is called off."""

    knows_prefill_id: bool
    """D's heartbeats name P's own id of the prompt, which our router mints (C10). Otherwise a decode leg that did not
    wait for P's answer can only name the router's id, and its heartbeats renew nothing (R05)."""

    remembers_failures: bool
    """A peer that could not be reached is left alone for 1 s, doubling up to 60 s (C9). Otherwise whoever needs it next
    tries again at once."""

    refusals_resolve: bool
    """A reconnect that the peer's address refuses resolves what D had registered over the lost connection; its blocks
    stay in quarantine. Otherwise only the peer's silence, or D's watchdog, does: vLLM's side channel does not connect
    before it asks, and knows no refusal, only a timeout."""

    checks_incarnation: bool
    """A frame of another life of an engine makes nothing happen but a handshake, and that retires the life before
    (C13). Otherwise an engine is its id: what one life began meets the next (R46)."""

    doubts_reads: bool
    """Pull without lease words: a READ counts only if D was never silent for so long that P's lease could have run out.
    Otherwise a READ that ended well counts, whatever P has put into those blocks since (R04, R09)."""

    limits_peers: bool
    """D admits no more of one P than its share of the pool, and little of a suspect one (L6). Otherwise whatever comes
    is enqueued (R38)."""


STRICT = Dialect(
    name="strict",
    control_frames=True,
    matches_by_xid=True,
    floor=True,
    waits_for_all_ranks=True,
    checks_content=True,
    lease_words=True,
    unequal_blocks=True,
    polls_at_steps=False,
    writes_pin=True,
    lease_rechecked=True,
    fences_errors=True,
    registrations_end=True,
    prompts_match_again=True,
    writes_registered_only=True,
    one_candidate_only=True,
    counts_senders=True,
    keeps_early=True,
    watchdog_resolves=True,
    fails_at_once=True,
    quarantine_ends=True,
    releases_unregistered=True,
    knows_prefill_id=True,
    remembers_failures=True,
    refusals_resolve=True,
    checks_incarnation=True,
    doubts_reads=True,
    limits_peers=True,
)

VLLM_COMPAT = Dialect(
    name="vllm-compat",
    control_frames=False,
    matches_by_xid=False,
    floor=False,
    waits_for_all_ranks=False,
    checks_content=False,
    lease_words=False,
    unequal_blocks=False,
    polls_at_steps=True,
    writes_pin=True,
    lease_rechecked=True,
    fences_errors=True,
    registrations_end=True,
    prompts_match_again=True,
    writes_registered_only=True,
    one_candidate_only=True,
    counts_senders=True,
    keeps_early=True,
    watchdog_resolves=True,
    fails_at_once=True,
    quarantine_ends=True,
    releases_unregistered=True,
    knows_prefill_id=True,
    remembers_failures=True,
    refusals_resolve=False,
    checks_incarnation=True,
    doubts_reads=True,
    limits_peers=True,
)

VLLM_STOCK = Dialect(
    name="vllm-stock",
    control_frames=False,
    matches_by_xid=False,
    floor=False,
    waits_for_all_ranks=False,
    checks_content=False,
    lease_words=False,
    unequal_blocks=False,
    polls_at_steps=True,
    writes_pin=False,
    lease_rechecked=False,
    fences_errors=False,
    registrations_end=False,
    prompts_match_again=False,
    writes_registered_only=False,
    one_candidate_only=False,
    counts_senders=False,
    keeps_early=False,
    watchdog_resolves=False,
    fails_at_once=False,
    quarantine_ends=False,
    releases_unregistered=False,
    knows_prefill_id=False,
    remembers_failures=False,
    refusals_resolve=False,
    checks_incarnation=False,
    doubts_reads=False,
    limits_peers=False,
)

DIALECTS = {d.name: d for d in (STRICT, VLLM_COMPAT, VLLM_STOCK)}
"""The dialects that may be simulated and checked."""

LIVE_DIALECTS = {d.name: d for d in (STRICT, VLLM_COMPAT)}
"""The dialects that a live engine may use."""
