"""The matching of registrations with prefill products.

`strict`: the xid, nothing else. `vllm-compat` (C5): the transfer id where the registration carries one, else the exact
request id, else the base id, and that only if exactly one candidate stands on each side: two prefills in flight with
one base id would otherwise deliver one tenant's KV to another (R12, R39), as in `vllm-stock`, which takes the first to
come, and that for good. Tables only; the cells are in the store.
"""

from __future__ import annotations

from typing import TypeVar

from pdflow.protocol.ids import Reg, base_id
from pdflow.protocol.messages import Register
from pdflow.protocol.values import RequestId, Xid

K = TypeVar("K")
V = TypeVar("V")


class Matching:
    """Products and open registrations of one P rank, indexed by every id that may name them."""

    __slots__ = ("one_only", "product_bases", "products", "registration_bases", "registrations", "spent")

    def __init__(self, one_only: bool) -> None:
        self.one_only = one_only
        """A base id counts only if one candidate stands on each side; else the first to come is taken."""
        self.products: dict[RequestId, Xid] = {}
        self.product_bases: dict[str, tuple[Xid, ...]] = {}
        self.registrations: dict[RequestId, tuple[Reg, ...]] = {}
        """Open registrations without an xid."""
        self.registration_bases: dict[str, tuple[Reg, ...]] = {}
        self.spent: set[Xid] = set()
        """vllm-stock: products that a match has taken. Heartbeats can still name them."""

    def add_product(self, xid: Xid, request_id: RequestId) -> None:
        self.products[request_id] = xid
        _add(self.product_bases, base_id(request_id), xid)

    def drop_product(self, xid: Xid, request_id: RequestId) -> None:
        if xid in self.spent:
            self.spent.remove(xid)
            del self.products[request_id]
        elif self.products.pop(request_id, None) is not None:
            _drop(self.product_bases, base_id(request_id), xid)

    def spend(self, xid: Xid, request_id: RequestId) -> None:
        """Mark a product as taken by a match: no other registration will find it."""
        self.spent.add(xid)
        _drop(self.product_bases, base_id(request_id), xid)

    def add_registration(self, reg: Reg) -> None:
        _add(self.registrations, reg.request_id, reg)
        _add(self.registration_bases, base_id(reg.request_id), reg)

    def drop_registration(self, reg: Reg) -> None:
        if reg.request_id in self.registrations:
            _drop(self.registrations, reg.request_id, reg)
            _drop(self.registration_bases, base_id(reg.request_id), reg)

    def product_of(self, message: Register) -> Xid | None:
        """The finished prompt that a registration without xid asks for; None while there is none, or no single one."""
        request_id = message.reg.request_id
        exact = self.products.get(request_id)
        if exact is not None and exact not in self.spent:
            return exact
        base = base_id(request_id)
        candidates = self.product_bases.get(base, ())
        if not self.one_only:
            return candidates[0] if candidates else None
        rivals = self.registration_bases.get(base, ())
        return candidates[0] if len(candidates) == 1 and not any(r != message.reg for r in rivals) else None

    def registration_of(self, request_id: RequestId) -> Reg | None:
        """The open registration without xid that a newly finished prompt belongs to."""
        exact = self.registrations.get(request_id, ())
        if exact and (len(exact) == 1 or not self.one_only):
            return exact[0]
        base = base_id(request_id)
        candidates = self.registration_bases.get(base, ())
        if not self.one_only:
            return candidates[0] if candidates else None
        alone = not self.product_bases.get(base, ())
        return candidates[0] if len(candidates) == 1 and alone else None

    def fingerprint(self) -> tuple[object, ...]:
        """The hashable state that does not follow from the cells: the order of arrival, where that decides."""
        if self.one_only:
            return ()
        return (
            tuple(sorted(self.spent)),
            tuple(sorted(self.product_bases.items())),
            tuple(sorted(self.registration_bases.items())),
        )

    def fork(self) -> Matching:
        other = Matching(self.one_only)
        other.spent = self.spent.copy()
        other.products = self.products.copy()
        other.product_bases = self.product_bases.copy()
        other.registrations = self.registrations.copy()
        other.registration_bases = self.registration_bases.copy()
        return other


def _add(table: dict[K, tuple[V, ...]], key: K, value: V) -> None:
    have = table.get(key, ())
    if value not in have:
        table[key] = (*have, value)


def _drop(table: dict[K, tuple[V, ...]], key: K, value: V) -> None:
    rest = tuple(v for v in table[key] if v != value)
    if rest:
        table[key] = rest
    else:
        del table[key]
