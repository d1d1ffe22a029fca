"""Explored staging memory, with the contents of every cell: which request's token, of which layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeAlias

from pdflow.methods.staging import BufferStaging, RingStaging, Staging
from pdflow.protocol.values import Allocation
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.search.forward import Violation

TOKEN_BYTES = 4096
"""Bytes of a token of one layer: a ring's step, so that no part is larger than its contents."""

Content: TypeAlias = "tuple[int, int, int] | None"
"""Request, layer, token; None for bytes that have not been written since they were given out."""


class ExploredRoom:
    """A real `Staging`, which decides who has room, and the contents of its cells."""

    __slots__ = ("cells", "known", "staging")

    def __init__(self, staging: Staging, cells: dict[Hashable, Content]) -> None:
        self.staging = staging
        self.cells = cells
        """Contents of all parts that are held, by address."""
        self.known: Hashable = None
        """Cached fingerprint: the memory is not changed once it has been asked for."""

    def address(self, allocation: Allocation, layer: int, token: int) -> Hashable:
        """Return the address of a token, counted from the beginning of a part; it may lie beyond the part's end."""
        staging = self.staging
        if isinstance(staging, RingStaging):
            return staging.ring.offset(allocation.blocks[layer] + token * TOKEN_BYTES)
        if isinstance(staging, BufferStaging):
            in_pool = staging.buffer.address(allocation.blocks[layer])
            if in_pool is not None:
                return ("pool", in_pool + token * TOKEN_BYTES)
        return (allocation.generation, layer, token)

    def read(self, allocation: Allocation, layer: int, token: int) -> Content:
        return self.cells.get(self.address(allocation, layer, token))

    def admit_waiting(self, tokens_of: Callable[[str], int]) -> Iterator[tuple[str, Allocation]]:
        """Yield the names that get room now, and their allocations. Raises Violation if a cell is held by another."""
        while (admission := self.staging.admit_next()) is not None:
            name, allocation = admission
            for at in self._of(allocation, tokens_of(name)):
                if at in self.cells:
                    raise Violation(Finding.TWICE, f"{name} receives {at}, which another request holds")
                self.cells[at] = None
            yield name, allocation

    def release(self, allocation: Allocation, tokens: int) -> None:
        for at in self._of(allocation, tokens):
            del self.cells[at]
        self.staging.release(allocation)

    def _of(self, allocation: Allocation, tokens: int) -> list[Hashable]:
        layers = self.staging.size.layers
        return [self.address(allocation, layer, token) for layer in range(layers) for token in range(tokens)]

    def fork(self) -> ExploredRoom:
        return ExploredRoom(self.staging.fork(), self.cells.copy())

    def fingerprint(self) -> Hashable:
        if self.known is None:
            where = getattr(self.staging, "ring", None) or getattr(self.staging, "buffer", None)
            inner = None if where is None else where.fingerprint()
            self.known = self.staging.fingerprint(), inner, frozenset(self.cells.items())
        return self.known
