"""The pool that remembers, against a model: names and holders in a dict, a list of those that nobody holds, and what
lies in every KV block.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pdflow.memory.caching import CachingPool, Prefix
from pdflow.memory.paged import PoolError
from pdflow.protocol.values import Allocation


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    """Names of prompts that part from each other here or there: each stands for all before it, too."""
    branch, fork = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    return tuple(at if at < fork else 100 * branch + 10 * fork + at for at in range(draw(st.integers(0, 5))))


class PoolAgainstModel(RuleBasedStateMachine):
    prompts = Bundle("prompts")
    others = Bundle("others")

    @initialize(num_blocks=st.integers(0, 30), span=st.integers(1, 3))
    def build(self, num_blocks: int, span: int) -> None:
        self.pool = CachingPool(num_blocks, span)
        self.span = span
        self.unknown = num_blocks
        """Free blocks that hold nothing of use."""
        self.holders: dict[int, int] = {}
        self.idle: list[int] = []
        self.content: dict[int, object] = {}
        self.chains: dict[int, list[int]] = {}
        self.found: dict[int, int] = {}
        self.own: dict[int, int] = {}
        self.prefix: dict[int, Prefix] = {}
        self.closed: set[int] = set()
        self.grown = 0

    def take(self, count: int) -> bool:
        if count > self.unknown + len(self.idle) * self.span:
            return False
        while count > self.unknown:
            del self.holders[self.idle.pop(0)]
            self.unknown += self.span
        self.unknown -= count
        return True

    @rule(target=prompts, prefix=prefixes(), most=st.integers(0, 5), rest=st.integers(0, 4))
    def share(self, prefix: Prefix, most: int, rest: int) -> object:
        known = [name in self.holders for name in prefix[:most]]
        found = known.index(False) if False in known else len(known)
        assert self.pool.find(prefix, most) == found
        held = [self.holders.get(name, 0) > 0 for name in prefix[:most]]
        assert self.pool.held(prefix, most) == (held.index(False) if False in held else len(held)) * self.span
        count = (len(prefix) - found) * self.span + rest
        resting = [name for name in prefix[:found] if not self.holders[name]]
        fits = count <= self.unknown + (len(self.idle) - len(resting)) * self.span
        got = self.pool.share(prefix, found, count)
        assert (got is not None) == fits
        if got is None:
            return multiple()
        for name in prefix[:found]:
            self.holders[name] += 1
        self.idle = [name for name in self.idle if name not in resting]
        assert self.take(count)
        generation = got.generation
        self.chains[generation], self.found[generation] = list(prefix[:found]), found
        self.own[generation], self.prefix[generation] = count, prefix
        table = self.pool.table(got)
        assert len(table) == found * self.span + count
        assert len(got.blocks) == count
        expected = [(name, at) for name in prefix for at in range(self.span)] + [(generation, "rest")] * rest
        assert [self.content[block] for block in table[: found * self.span]] == expected[: found * self.span]
        self.content.update(zip(got.blocks, expected[found * self.span :], strict=True))
        return got

    @rule(prompt=prompts, count=st.integers(0, 5))
    def remember(self, prompt: Allocation, count: int) -> None:
        generation = prompt.generation
        chain, prefix = self.chains[generation], self.prefix[generation]
        self.pool.remember(prompt, min(count, len(prefix)))
        for name in prefix[len(chain) : count]:
            if name in self.holders or generation in self.closed:
                self.closed.add(generation)
                break
            self.holders[name] = 1
            chain.append(name)

    @rule(prompt=consumes(prompts))
    def release_prompt(self, prompt: Allocation) -> None:
        self.pool.release(prompt)
        with pytest.raises(PoolError):
            self.pool.release(prompt)
        generation = prompt.generation
        chain = self.chains.pop(generation)
        self.unknown += self.own.pop(generation) - (len(chain) - self.found[generation]) * self.span
        for name in reversed(chain):
            self.holders[name] -= 1
            if not self.holders[name]:
                self.idle.append(name)

    @rule(prompt=consumes(prompts))
    def quarantine_then_release(self, prompt: Allocation) -> None:
        if len(self.chains[prompt.generation]) > self.found[prompt.generation]:
            with pytest.raises(PoolError, match="remembered for others"):
                self.pool.quarantine(prompt)
        else:
            self.pool.quarantine(prompt)
            assert self.pool.quarantined == len(prompt.blocks)
        self.release_prompt(prompt)

    @rule(target=prompts, prompt=consumes(prompts), count=st.integers(0, 5))
    def name_what_it_has_grown(self, prompt: Allocation, count: int) -> Allocation:
        count = min(count, self.grown)
        longer = self.pool.named(prompt, count)
        self.grown -= count
        self.own[prompt.generation] += count
        assert longer.generation == prompt.generation
        assert longer.blocks[: len(prompt.blocks)] == prompt.blocks
        assert len(longer.blocks) == len(prompt.blocks) + count
        self.content.update(dict.fromkeys(longer.blocks[len(prompt.blocks) :], (prompt.generation, "grown")))
        return longer

    @rule(target=prompts, prompt=consumes(prompts), count=st.integers(0, 5))
    def extend(self, prompt: Allocation, count: int) -> Allocation:
        longer = self.pool.extend(prompt, count)
        fits = self.take(count)
        assert (longer is not None) == fits
        if longer is None:
            return prompt
        self.own[prompt.generation] += count
        assert longer.generation == prompt.generation
        assert longer.blocks[: len(prompt.blocks)] == prompt.blocks
        assert len(longer.blocks) == len(prompt.blocks) + count
        self.content.update(dict.fromkeys(longer.blocks[len(prompt.blocks) :], (prompt.generation, "more")))
        return longer

    @rule(target=others, count=st.integers(0, 12))
    def allocate(self, count: int) -> object:
        got = self.pool.allocate(count)
        assert (got is not None) == self.take(count)
        if got is None:
            return multiple()
        self.content.update(dict.fromkeys(got.blocks))
        return got

    @rule(other=consumes(others))
    def release(self, other: Allocation) -> None:
        self.pool.release(other)
        self.unknown += len(other.blocks)

    @rule(count=st.integers(0, 12))
    def grow(self, count: int) -> None:
        grows = self.take(count)
        assert self.pool.grow(count) is grows
        self.grown += count if grows else 0

    @rule(count=st.integers(0, 12))
    def shrink(self, count: int) -> None:
        count = min(count, self.grown)
        self.pool.shrink(count)
        self.grown -= count
        self.unknown += count

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert pool.idle == len(self.idle) * self.span
        assert pool.free == self.unknown + pool.idle
        assert list(pool._idle) == self.idle
        assert set(pool._known) == set(self.holders)
        assert len(pool.owners()) == pool.allocated + pool.quarantined
        # Whoever holds a prefix block holds all before it: what is left is always a chain from the start.
        for name in self.holders:
            beginning = next(prefix[: prefix.index(name)] for prefix in self.prefix.values() if name in prefix)
            assert set(beginning) <= set(self.holders)


TestPool = PoolAgainstModel.TestCase


def test_of_one_prompt_the_end_is_forgotten_first() -> None:
    pool = CachingPool(6, 2)
    prompt = pool.share((1, 2, 3), 0, 6)
    assert prompt is not None
    pool.remember(prompt, 3)
    pool.release(prompt)
    assert pool.grow(1)
    assert pool.find((1, 2, 3), 3) == 2
    assert (pool.free, pool.idle, pool.grown) == (5, 4, 1)


def test_what_is_held_is_never_forgotten() -> None:
    pool = CachingPool(6, 2)
    prompt = pool.share((1, 2), 0, 5)
    assert prompt is not None
    pool.remember(prompt, 2)
    other = pool.share((1, 2), 1, 1)
    assert other is not None
    assert pool.table(other)[:2] == prompt.blocks[:2]
    pool.release(prompt)
    assert (pool.free, pool.idle) == (3, 2)
    assert pool.allocate(3) is not None
    assert pool.allocate(1) is None
    assert pool.find((1, 2), 2) == 1
    assert pool.owner_of(prompt.blocks[0]) == other.generation


def test_what_follows_a_prompt_is_found_in_its_own_blocks_and_in_those_that_were_grown() -> None:
    pool = CachingPool(6, 2)
    prompt = pool.share((1, 2), 0, 3)
    assert prompt is not None
    pool.remember(prompt, 1)
    assert pool.grow(2)
    longer = pool.named(prompt, 2)
    pool.remember(longer, 2)
    pool.release(longer)
    assert (pool.free, pool.idle, pool.grown) == (6, 4, 0)
    other = pool.share((1, 2), 2, 0)
    assert other is not None
    assert pool.table(other) == longer.blocks[:4]


def test_two_that_compute_the_same_keep_their_own() -> None:
    pool = CachingPool(20, 1)
    first, second = pool.share((1, 2), 0, 2), pool.share((1, 2, 3), 0, 3)
    assert first is not None
    assert second is not None
    pool.remember(first, 1)
    pool.remember(second, 3)
    pool.remember(first, 2)
    assert pool.find((1, 2, 3), 3) == 2
    pool.release(second)
    assert (pool.free, pool.idle) == (18, 0)


def test_a_prefix_block_holds_something() -> None:
    with pytest.raises(PoolError, match="must be 1 or more"):
        CachingPool(10, 0)
