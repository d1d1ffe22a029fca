"""The bound on how long a request may still take once all faults are over, computed from the timers.

In a healed core an attempt ends at the latest by its own deadline at D, in vllm-compat push by D's watchdog; and it may
have to wait for blocks, which others give back when a lease ends, when a dead peer has been fenced, or, in vllm-compat,
when their quarantine is over. Each further attempt takes as much again. Then there are operations that were under way,
which their transport may try once more, and all bytes that decode engines can hold, over the narrowest link. What
engines compute meanwhile is not counted: that is work, not waiting.
"""

from __future__ import annotations

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.protocol.values import S
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.scale import most_engines
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.validation.fit import kv_tokens_of


@attrs.frozen(kw_only=True)
class Resolution:
    """The bound and what it is made of, in seconds."""

    attempts: int
    blocks_s: float
    deadline_s: float
    transport_s: float
    write_s: float

    @property
    def seconds(self) -> float:
        return self.attempts * (self.blocks_s + self.deadline_s) + self.transport_s + self.write_s

    @property
    def bound_ns(self) -> int:
        return seconds_to_ns(self.seconds)

    def __str__(self) -> str:
        terms = f"{self.blocks_s:g} s for blocks + {self.deadline_s:g} s deadline"
        attempts = f"({terms})" if self.attempts == 1 else f"{self.attempts} attempts x ({terms})"
        return f"{self.seconds:.4g} s: {attempts} + {self.transport_s:g} s transport + {self.write_s:.3g} s of writes"


def resolution_of(scenario: ResolvedScenario) -> Resolution:
    """Compute the bound for a request that is open when the faults are over, or that comes later."""
    transfer = scenario.transfer
    deadline_s = transfer.deadline_s
    timers = transfer.timers()
    if METHODS[transfer.method].dialect(transfer.dialect).control_frames:
        blocks_s = max(transfer.kv_lease_duration_s, transfer.dead_s + transfer.sync_s + transfer.cancel_last_s)
    else:
        blocks_s = transfer.kv_lease_duration_s + (timers.handshake_queue_ns + timers.transport_ns) / S
        if not METHODS[transfer.method].pulls:
            deadline_s = min(deadline_s, transfer.push_registration_timeout_s)
    return Resolution(
        attempts=scenario.router.attempts + (scenario.router.hedge_after_s is not None),
        blocks_s=blocks_s,
        deadline_s=deadline_s,
        transport_s=scenario.fault_table.transport_timeout_s,
        write_s=_write_s(scenario),
    )


def _write_s(scenario: ResolvedScenario) -> float:
    held = [
        (pool, kv_tokens_of(scenario.model, pool) * scenario.model.kv_bytes_per_token)
        for pool in scenario.pools
        if pool.role == "decode"
    ]
    network = scenario.network
    slowest = 0.0
    if network.bandwidth_bytes_per_s is not None:
        # At worst one prefill rank sends to all.
        slowest = (
            sum(nbytes * most_engines(pool.name, pool.replicas, scenario.scales) for pool, nbytes in held)
            / network.bandwidth_bytes_per_s
        )
    for link in network.links:
        if link.bandwidth_bytes_per_s is not None:
            slowest = max(
                slowest,
                sum(nbytes * most_engines(pool.name, pool.replicas, scenario.scales) for pool, nbytes in held)
                / link.bandwidth_bytes_per_s,
            )
    return slowest
