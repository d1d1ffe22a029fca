"""The differences between the dialects, as named guards: one state machine, one table.

Each guard is read where its rule stands; nothing else in the protocol asks for a dialect's name. The table in spec 6.1
is generated from this file.

`strict` is pdflow's own dialect. `vllm-compat` uses vLLM 0.32's wire format and timers with the fixes C1 to C13, which
need no change of the wire format (spec 7.1). `vllm-stock` is vLLM 0.32.0 without these fixes, faults included: it is
for simulation and checking, and no live engine accepts it. docs/compat.md lists its missing guards and the races that
they open.
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class Dialect(Value, frozen=True, gc=False):
    """The guards of one dialect. The docstring under each guard says what yes and no mean; spec 6.1 prints it."""

    name: str

    control_frames: bool
    """The frames REG_ACK, FAIL, CANCEL, CANCEL_ACK, RELEASE and SYNC exist. No: P cannot report a failure and D cannot
    cancel a WRITE. D's blocks leave quarantine by completions, by proof of death, or at the reclaim time."""

    matches_by_xid: bool
    """A registration names its prompt by xid. No: P matches by transfer id, then by exact request id, then by base id
    if exactly one candidate exists on each side (C5)."""

    floor: bool
    """P keeps a tombstone until D's floor passes it. No: P remembers the newest few thousand ended registrations, so
    that a late copy never writes again; a copy that finds no prompt ends by its TTL (C4)."""

    waits_for_all_ranks: bool
    """P writes when every target D rank has registered. No: P waits at most `join_ns`, then writes only to the ranks
    that have registered (C4)."""

    checks_content: bool
    """REG and DONE carry a digest of the token prefix and the weight version, and both sides compare them."""

    lease_words: bool
    """Pull: D reads P's lease word after the data, and commits only if the word is unchanged. No: D rejects a READ if D
    sent no heartbeat for more than 0.75 of a lease extension."""

    unequal_blocks: bool
    """P may push to a D with another block size. No: P refuses, because vLLM 0.32 fails on it (R37, C12)."""

    polls_at_steps: bool
    """The engine polls notifications and handles once per step, and push's writer thread polls every millisecond, as in
    vLLM. No: the endpoint runs in parallel to the engine's loop."""

    writes_pin: bool
    """P: blocks whose lease has ended stay pinned until the WRITEs in flight have ended (C3). No: P frees them during
    the WRITE (R01)."""

    lease_rechecked: bool
    """P checks the lease again at a match and when the handshake of a deferred WRITE has ended (C3). No: a matched
    WRITE is posted even if its lease has ended, and reads freed blocks (R02)."""

    fences_errors: bool
    """P closes its endpoint to a D rank whose WRITE ended with an error, and releases the source after that. No: an
    error counts as the end of the WRITE, which it does not prove (R17, R19), and D is not notified (R21)."""

    registrations_end: bool
    """P: a registration ends by its TTL, with its prefill, or with its D's incarnation, and leaves a tombstone (C3,
    C4). No: a registration without a prompt stays forever, and a later prompt with the same base id matches it (R12,
    R13, R24)."""

    prompts_match_again: bool
    """P: a prompt whose registration ended without its data may be registered for again, and two attempts may share one
    prompt. No: the first match consumes the prompt; if it fails, the prompt stays unused until its lease ends (R21,
    R22)."""

    writes_registered_only: bool
    """P writes to a D rank only after that rank has registered (C4). No: the first registration makes P write to all
    ranks. The registrations of the other ranks remain and match later prompts (R13), and completions reach ranks that
    do not know the request yet (R26)."""

    one_candidate_only: bool
    """P matches by transfer id, and by base id only if exactly one candidate exists on each side (C5). No: there is no
    transfer id, and the first of several candidates with one base id is taken (R12, R39)."""

    counts_senders: bool
    """Completions are identified by their sender (C1). No: they are counted, so that two from one sender count for two
    ranks (R14)."""

    keeps_early: bool
    """D: a completion counts even if it arrives before its rank knows the request (C2). No: D drops it (R26)."""

    watchdog_resolves: bool
    """D's watchdog resolves a request that no P writes, and the heartbeats of the request stop (C6). No: the watchdog
    writes a log line. The request waits and renews P's lease until the client gives up (R21, R22, R23, R25)."""

    fails_at_once: bool
    """D resolves a request at its first lost shard, and its blocks go to quarantine. No: D resolves it when all its
    ranks have reported, and frees the blocks at the same time."""

    quarantine_ends: bool
    """D frees blocks in quarantine by completions, by proof of death of their writers, or at the time at which a
    correctly running P can no longer begin a WRITE. No: D frees them by completions only, and never if none comes
    (R15)."""

    releases_unregistered: bool
    """D releases a prompt that it will not use: in push one that it will not register for (C7), in pull one whose READ
    has failed. No: D sends nothing and P's lease must end (R11); only a pull that never began is cancelled."""

    knows_prefill_id: bool
    """D's heartbeats name P's own id of the prompt, which our router mints (C10). No: a decode leg that did not wait
    for P's answer has only the router's id, and its heartbeats renew nothing (R05)."""

    remembers_failures: bool
    """After a failed handshake the peer is not tried again for 1 s, doubling up to 60 s (C9). No: the next request for
    this peer tries again at once."""

    refusals_resolve: bool
    """If the peer's address refuses a reconnect, D resolves the requests that it had registered over the lost
    connection; their blocks stay in quarantine. No: only the peer's silence or D's watchdog resolves them, because
    vLLM's side channel reports a timeout and no refusal."""

    checks_incarnation: bool
    """A frame of another incarnation causes only a handshake, which retires the former incarnation (C13). No: an engine
    is identified by its id alone, so state of the former incarnation meets frames of the new one (R46)."""

    doubts_reads: bool
    """Pull without lease words: a READ counts only if D was never silent for so long that P's lease could have ended.
    No: a READ that ended well counts, whatever P has put into those blocks since (R04, R09)."""

    limits_peers: bool
    """D admits from one P at most its share of the pool, and little from a suspect P (L6). No: D enqueues every request
    (R38)."""


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
