"""Who is which rank of an NCCL group of two, though both may want it at once.

A group has one id, made by its rank 0 and sent to the other in NEW; both then wait until the other has joined. In PR
#18242 whoever sends is rank 0, which is wrong where both send: each waits in a group of its own, and reads nothing
(SEED_SYSTEMS section 1). Here the addresses decide, and who is to be rank 1 asks the other for a NEW instead.
"""

from __future__ import annotations

from pdflow.methods.guards import Guards
from pdflow.protocol.values import Address


def rank_in_group(own: Address, peer: Address, initiates: bool, guards: Guards) -> int:
    """0 or 1. `initiates`: it has something to send, and was not asked to join."""
    if guards.ranks_by_address:
        return int(own > peer)
    return int(not initiates)
