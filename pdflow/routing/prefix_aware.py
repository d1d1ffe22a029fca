"""Prefix-aware routing: the engine with the longest known prefix of a prompt, unless another would be done sooner.

The router asks no engine what it has. It remembers, for each engine, the names of the prefix blocks of the prompts that
it sent there, least recently used forgotten first, as many as the engine's own KV cache can hold: a match is
probable, not certain. A name stands for its block and all before it, so the length of a match is where the names stop
being known.

    score = weight x tokens that the engine has - tokens that wait there

With weight 1 both count as what they cost, a token's prefill, so the best score is the shortest time to the first
token; more keeps prompts together, less spreads them. Mooncake's scheduler (arXiv 2407.00079, section 6) and SGLang's
cache-aware router weigh the same two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from pdflow.routing.events import RequestArrived
from pdflow.routing.policy import Choice


class PrefixAware(Choice):
    """The prefix-aware policy.

    Args:
    capacities: of each engine, how many names the router remembers.
    block_tokens: what one name stands for.
    stays: a leg's whole prompt weighs on its engine until the leg's end, as at D, whose steps read it; if not, only
        what is to be computed of it does, as at P.
    """

    __slots__ = ("block_tokens", "capacities", "holders", "known", "loads_tokens", "stays", "weighs", "weight")

    def __init__(
        self, capacities: tuple[int, ...], block_tokens: int, weight: float = 1.0, stays: bool = False
    ) -> None:
        super().__init__("prefix-aware", len(capacities))
        self.capacities = capacities
        self.block_tokens = block_tokens
        self.weight = weight
        self.stays = stays
        self.known: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
        """The names that each engine has, the least recently used first."""
        self.holders: dict[int, int] = {}
        """The engines that have each name, a bit for each engine."""
        self.loads_tokens = [0] * len(capacities)
        """The tokens that wait at each engine."""
        self.weighs: dict[tuple[int, int], tuple[int, ...]] = {}
        """The tokens that each open leg adds to `loads_tokens`, by request and engine. A hedged request may have
        two."""

    def fork(self) -> Choice:
        other = PrefixAware((), self.block_tokens, self.weight, self.stays)
        other.capacities = self.capacities
        other.known = [names.copy() for names in self.known]
        other.holders = self.holders.copy()
        other.loads_tokens = self.loads_tokens.copy()
        other.weighs = self.weighs.copy()
        return self.copied_to(other)

    def fingerprint(self) -> Hashable:
        known = tuple(tuple(names) for names in self.known)
        return tuple(self.loads), tuple(self.up), known, tuple(sorted(self.weighs.items()))

    def choose(self, asked: RequestArrived, avoid: int | None) -> int | None:
        among = self.candidates(avoid)
        if not among:
            return None
        matched = self.matched(asked)
        chosen = self._best(among, matched)
        weighs = asked.prompt_tokens - (0 if self.stays else matched[chosen])
        self.weighs[asked.request, chosen] = (weighs, *self.weighs.get((asked.request, chosen), ()))
        self.loads_tokens[chosen] += weighs
        self._remember(chosen, asked.prefix)
        return self.opened(asked, chosen)

    def ended(self, asked: RequestArrived, engine: int) -> None:
        weighs, *others = self.weighs.pop((asked.request, engine))
        if others:
            self.weighs[asked.request, engine] = tuple(others)
        self.loads_tokens[engine] -= weighs
        super().ended(asked, engine)

    def pick(self, asked: RequestArrived, avoid: int | None) -> int | None:
        among = self.candidates(avoid)
        return self._best(among, self.matched(asked)) if among else None

    def found(self, asked: RequestArrived, engine: int) -> int:
        return self.matched(asked)[engine]

    def forget(self, engine: int) -> None:
        for name in self.known[engine]:
            self._remove_holder(engine, name)
        self.known[engine].clear()

    def matched(self, asked: RequestArrived) -> list[int]:
        """Return how many tokens of the prompt's prefix each engine probably has. The last token is computed in any
        case."""
        blocks = [0] * len(self.up)
        holding = (1 << len(blocks)) - 1
        for depth, name in enumerate(asked.prefix):
            still = holding & self.holders.get(name, 0)
            left = holding & ~still
            while left:
                engine = left.bit_length() - 1
                blocks[engine] = depth
                left -= 1 << engine
            holding = still
            if not holding:
                break
        while holding:
            engine = holding.bit_length() - 1
            blocks[engine] = len(asked.prefix)
            holding -= 1 << engine
        most = max(0, asked.prompt_tokens - 1)
        return [min(count * self.block_tokens, most) for count in blocks]

    def _best(self, among: list[int], matched: list[int]) -> int:
        """Return the engine with the best score; among equals the one with the fewest open legs, and then the first."""
        best, best_score, best_load = among[0], 0.0, -1
        for engine in among:
            score = self.weight * matched[engine] - self.loads_tokens[engine]
            load = self.loads[engine]
            if best_load < 0 or score > best_score or (score == best_score and load < best_load):
                best, best_score, best_load = engine, score, load
        return best

    def _remember(self, engine: int, prefix: tuple[int, ...]) -> None:
        """Remember the names of a prompt at an engine, its end first, so that it is forgotten before the blocks it
        extends."""
        names, holders, bit = self.known[engine], self.holders, 1 << engine
        for name in reversed(prefix):
            names[name] = None
            names.move_to_end(name)
            holders[name] = holders.get(name, 0) | bit
        while len(names) > self.capacities[engine]:
            self._remove_holder(engine, names.popitem(last=False)[0])

    def _remove_holder(self, engine: int, name: int) -> None:
        left = self.holders[name] & ~(1 << engine)
        if left:
            self.holders[name] = left
        else:
            del self.holders[name]
