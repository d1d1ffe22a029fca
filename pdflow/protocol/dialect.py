"""What differs between the dialects, as named guards: one machine, one table.

Each guard is read where its rule stands; nothing else in the protocol asks for a dialect's name. The table in
docs/dialects.md is generated from this file.

`strict` is pdflow's own (PROTOCOL 7.3 to 7.5); `vllm-compat` speaks vLLM 0.32's wire format and timers with the
fixes C1 to C13 that need no wire change (PROTOCOL 7.2).
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class Dialect(Value, frozen=True, gc=False):
    """Guards. A docstring per guard says what both values mean; the generated table prints it."""

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
)

DIALECTS = {d.name: d for d in (STRICT, VLLM_COMPAT)}
