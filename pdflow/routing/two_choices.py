"""The power of two choices: of two engines picked by chance, the one with fewer open legs.

One look at a second engine takes the longest queue from O(log n / log log n) to O(log log n) (Azar, Broder, Karlin,
Upfal, SIAM J. Comput. 29(1), 1999; Mitzenmacher, IEEE TPDS 12(10), 2001), and unlike the least loaded of all it does
not send everybody to the same engine when counts are stale, as those of several routers are. The router draws no random
numbers: the two are a hash of the request's number and a seed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from pdflow.routing.events import RequestArrived
from pdflow.routing.policy import Choice

_MASK: Final = (1 << 64) - 1


class TwoChoices(Choice):
    __slots__ = ("seed",)

    def __init__(self, engines: int, seed: int) -> None:
        super().__init__("two-choices", engines)
        self.seed = seed

    def fork(self) -> Choice:
        return self.copied_to(TwoChoices(0, self.seed))

    def fingerprint(self) -> Hashable:
        return tuple(self.loads), tuple(self.up)

    def choose(self, asked: RequestArrived, avoid: int | None) -> int | None:
        chosen = self.pick(asked, avoid)
        return None if chosen is None else self.opened(asked, chosen)

    def pick(self, asked: RequestArrived, avoid: int | None) -> int | None:
        among = self.candidates(avoid)
        if not among:
            return None
        if len(among) == 1:
            return among[0]
        bits = mixed(mixed(asked.request) ^ self.seed)
        one, other = (bits >> 32) % len(among), (bits & 0xFFFFFFFF) % (len(among) - 1)
        first, second = among[one], among[other + (other >= one)]
        return second if self.loads[second] < self.loads[first] else first


def mixed(number: int) -> int:
    """Return 64 bits, each of which depends on all bits of the number: the last step of splitmix64 (Steele, Lea, Flood,
    2014)."""
    bits = (number + 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
