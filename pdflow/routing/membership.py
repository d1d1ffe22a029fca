"""Engines that are leaving, and when no attempt needs them any more.

An engine that leaves gets no new legs and ends those that it has. A decode engine may go when it has none. A prefill
engine may go when no attempt is open whose prompt it has computed: it must run until D has the KV.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.values import EngineId


class Membership:
    """The engines that are leaving or have left.

    Args: `prefill`: how many prefill engines there are.
    """

    __slots__ = ("leaving", "left", "users")

    def __init__(self, prefill: int) -> None:
        self.leaving: dict[EngineId, None] = {}
        self.left: dict[EngineId, None] = {}
        self.users = [0] * prefill
        """The number of open attempts that were sent to each prefill engine."""

    def fork(self) -> Membership:
        other = Membership(0)
        other.leaving, other.left, other.users = self.leaving.copy(), self.left.copy(), self.users.copy()
        return other

    def fingerprint(self) -> Hashable:
        return tuple(self.leaving), frozenset(self.left)

    def leaves(self, engine: EngineId) -> None:
        if engine not in self.left:
            self.leaving[engine] = None

    def joins(self, engine: EngineId) -> None:
        self.leaving.pop(engine, None)
        self.left.pop(engine, None)

    def is_out(self, engine: EngineId) -> bool:
        return engine in self.leaving or engine in self.left

    def renamed(self, engine: EngineId, became: EngineId) -> None:
        for group in (self.leaving, self.left):
            if engine in group:
                del group[engine]
                group[became] = None

    def gone(self, prefill: Sequence[EngineInfo], decode: Sequence[EngineInfo], legs: list[int]) -> Iterator[EngineId]:
        """Yield the engines that have left since the last call; `legs`: how many are open at each decode engine."""
        for engine in list(self.leaving):
            used = any(info.engine == engine and self.users[index] for index, info in enumerate(prefill))
            if not used and not any(info.engine == engine and legs[index] for index, info in enumerate(decode)):
                del self.leaving[engine]
                self.left[engine] = None
                yield engine
