"""Prompts that begin the same are the same objects as far as they do, and take the blocks that they fill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.store.keys import origin
from pdflow.methods.store.memory import Item, blocks_of
from pdflow.methods.store.objects import most_named, objects_of

START = origin("m", 0, 1)
UNIT = 32
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=200)


def by_block(tokens: list[int], block_size: int) -> tuple[Item, ...]:
    ends = range(UNIT, (most_named(len(tokens), UNIT) + 1) * UNIT, UNIT)
    named = [tokens[end - UNIT : end] for end in ends]
    return objects_of(START, len(tokens), block_size, UNIT, named, tokens[len(named) * UNIT :])


@pytest.mark.parametrize("block_size", [8, 32])
@given(first=TOKENS, second=TOKENS)
def test_objects_are_shared_as_far_as_prompts_are(block_size: int, first: list[int], second: list[int]) -> None:
    one, other = by_block(first, block_size), by_block(second, block_size)
    same = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    alike = [a.key == b.key for a, b in zip(one[:-1], other[:-1], strict=False)]
    if same is None:
        assert all(alike)
        assert (one == other) == (first == second)
    else:
        assert alike == [(number + 1) * UNIT <= same for number in range(len(alike))]


@pytest.mark.parametrize("block_size", [8, 32])
@given(tokens=TOKENS)
def test_objects_take_the_blocks_of_their_prompt_and_name_all_but_its_last_token(
    block_size: int, tokens: list[int]
) -> None:
    items = by_block(tokens, block_size)
    assert blocks_of(items) == -(-len(tokens) // block_size)
    assert all(item.blocks >= 1 for item in items)
    assert (len(items) - 1) * UNIT < len(tokens)


def test_by_the_prompt_it_is_one_object() -> None:
    assert len(objects_of(START, 100, 16, UNIT, (), [1] * 100)) == 1
