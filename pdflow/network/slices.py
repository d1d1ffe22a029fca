"""Slicing of a transfer over several NICs, and the rate at which a NIC moves slices.

A transfer engine cuts a transfer that is larger than a slice and posts each slice on the queue of a NIC. The queue
takes a while for every slice, beside the wire and not before it, so that a NIC moves a slice in the longer of the two
times. That is what Mooncake's table over EFA shows (design/transfer-engine/efa_transport.md): twice the slice gives
twice the rate until the wire is full. Fitted on the same rows, the two times added miss the others by 33 % at worst
instead of 13 %.

No slice has a flow of its own: a NIC's slices are one flow of all their bytes, bound by the queue's rate.

Source: Mooncake's Transfer Engine at 3b5a5941 (slices of 64 KB, preferred and secondary NICs by memory location,
another NIC on failure).
"""

from __future__ import annotations


def shares(nbytes: int, slice_bytes: int, nics: int) -> list[int]:
    """Return the bytes of each NIC with slices dealt in turn, for as many NICs as get any. `slice_bytes` 0: uncut."""
    slices = -(-nbytes // slice_bytes) if slice_bytes else 1
    if slices <= 1:
        return [nbytes]
    each, more = divmod(slices, nics)
    dealt = [(each + 1 if nic < more else each) * slice_bytes for nic in range(min(nics, slices))]
    dealt[(slices - 1) % nics] -= slices * slice_bytes - nbytes
    return dealt


def queue_bytes_per_s(slice_bytes: int, per_slice_s: float) -> int | None:
    """Return the most bytes per second that one NIC's queue lets through; None if it takes no time."""
    return int(slice_bytes / per_slice_s) if slice_bytes and per_slice_s else None
