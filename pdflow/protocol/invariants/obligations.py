"""A check that a driver has carried out the effects that change memory (S12), for when a turn of its core is over.

The oracle sees effects, not what a driver makes of them. What is judged here is the memory itself: which blocks are in
quarantine, and which lease words readers find. That a driver wakes its engine, its node judges, since no endpoint knows
of an engine.

| effect | what must be so afterwards |
| --- | --- |
| Quarantine, FreeBlocks | the blocks of a request that waits are held, those of one in quarantine are in quarantine, |
|  | and no others are. Staging memory has no quarantine: what is not freed is held |
| AnswerPrefill, BumpWord | readers find the lease word of each finished prompt that P has not released, and none of |
|  | a prompt that it has released |

Off the hot path: drivers call this only where a run is checked.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

from pdflow.protocol.consumer.cell import QUARANTINED, WAITING
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.values import Allocation


class QuarantiningPool(Protocol):
    """The blocks that a driver grants to peers."""

    @property
    def quarantined(self) -> int:
        """The number of blocks in quarantine."""

    def holds(self, allocation: Allocation) -> bool:
        """Whether these blocks are held or in quarantine."""

    def is_quarantined(self, allocation: Allocation) -> bool: ...


def wrong_quarantine(scheduler: ConsumerScheduler, pool: QuarantiningPool, staged: Container[int] | None = None) -> str:
    """Return, in words, which blocks that D has granted are not kept as the protocol ordered; "" if all are.

    Args:
        staged: the generations that staging memory holds, if D grants that; None if it grants blocks of the pool.
    """
    quarantined = 0
    for cell in scheduler.cells.values():
        if cell.phase is not WAITING and cell.phase is not QUARANTINED:
            continue
        allocation, name = cell.allocation, cell.request_id
        if staged is not None:
            if allocation.generation not in staged:
                return f"generation {allocation.generation} of staging memory, granted for {name}, is not held"
            continue
        kept = pool.is_quarantined(allocation)
        if cell.phase is QUARANTINED:
            quarantined += len(allocation.blocks)
            if not kept:
                return f"the blocks of {name} must be in quarantine, but are not"
        elif kept or not pool.holds(allocation):
            return f"{name} waits for KV, but its blocks are {'in quarantine' if kept else 'not held'}"
    if pool.quarantined != quarantined:
        return f"{pool.quarantined} blocks are in quarantine, but {quarantined} must be"
    return ""


def unexposed(rank: ProducerRank, exposed: Mapping[int, int], slots: int = 0) -> str:
    """Return, in words, which finished prompt's lease word readers do not find although P has not released the prompt;
    "" if none.

    Args:
        exposed: the value that readers find in each slot.
        slots: how many there are; 0 if every word has its own. In one that two words share, the newer one stands.
    """
    newest: dict[int, tuple[int, int, str]] = {}
    for cell in rank.cells.values():
        source = cell.source
        if source is None or source.lease_word is None or cell.freed or not source.complete:
            continue
        lease_word = source.lease_word
        slot = lease_word.index % slots if slots else lease_word.index
        if slot not in newest or newest[slot][0] < lease_word.index:
            newest[slot] = (lease_word.index, lease_word.value, cell.xid)
    for slot, (_, value, xid) in newest.items():
        if exposed.get(slot) != value:
            return f"the lease of {xid} lasts, but readers do not find its lease word"
    return ""


def outlived(rank: ProducerRank, exposed: Mapping[int, int]) -> str:
    """Return, in words, which lease word readers find although P has released its prompt; "" if none. `exposed`: as
    `unexposed` has it. The word of a prompt that is still being computed may be there already."""
    if not exposed:
        return ""
    sources = [cell.source for cell in rank.cells.values() if not cell.freed]
    lasting = {source.lease_word.value for source in sources if source is not None and source.lease_word is not None}
    for slot, value in exposed.items():
        if value not in lasting:
            return f"no prompt has lease word {slot} any more, but readers still find it"
    return ""
