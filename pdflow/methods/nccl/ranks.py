"""The choice of rank 0 and rank 1 in an NCCL group of two, although both ends may ask for the group at once.

Rank 0 makes the id of a group and sends it in NEW. Both ranks then wait until the other has joined. In PR #18242 the
sender is rank 0, which fails if both send: each waits in its own group, and reads nothing.
Here the addresses decide, and rank 1 asks the other end for a NEW instead.
"""

from __future__ import annotations

from pdflow.methods.guards import Guards
from pdflow.protocol.values import Address


def rank_in_group(own: Address, peer: Address, initiates: bool, guards: Guards) -> int:
    """Return the rank of `own` in its group with `peer`, 0 or 1. `initiates`: `own` has something to send, and was not
    asked to join."""
    if guards.ranks_by_address:
        return int(own > peer)
    return int(not initiates)
