"""Runs of tokens against the token-by-token definition: where does position t lie on either side?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.pairing import TokenRun, pieces, runs, runs_within
from pdflow.layout.shapes import LayoutError

SIZES = st.sampled_from([(16, 16), (1, 1), (4, 16), (16, 4), (1, 3), (6, 2), (5, 5)])


@given(sizes=SIZES, prefix_blocks=st.integers(0, 5), num_tokens=st.integers(0, 70), extra=st.integers(0, 2))
def test_each_position_goes_where_it_belongs(
    sizes: tuple[int, int], prefix_blocks: int, num_tokens: int, extra: int
) -> None:
    source_size, target_size = sizes
    start = prefix_blocks * target_size
    # Descending ids, so that an id never equals its place in the list.
    source = [900 - at for at in range(-(-(start + num_tokens) // source_size) + extra)]
    target = [500 - at for at in range(-(-num_tokens // target_size) + extra)]
    got = list(runs(source, source_size, target, target_size, start, num_tokens))
    where = [
        (run.source_block, run.source_offset + token, run.target_block, run.target_offset + token)
        for run in got
        for token in range(run.tokens)
    ]
    assert where == [
        (
            source[(start + t) // source_size],
            (start + t) % source_size,
            target[t // target_size],
            t % target_size,
        )
        for t in range(num_tokens)
    ]
    shape = pieces(source_size, target_size, num_tokens)
    assert shape.count == len(got)
    assert shape.full * shape.unit + shape.tail == num_tokens
    assert [run.tokens for run in got] == [shape.unit] * shape.full + [shape.tail] * (shape.tail > 0)


def test_a_prefix_hit_skips_the_source_s_first_blocks() -> None:
    assert list(runs([7, 8, 9], 16, [3, 4], 16, 16, 20)) == [TokenRun(8, 0, 3, 0, 16), TokenRun(9, 0, 4, 0, 4)]


def test_one_block_too_many_on_d_shifts_nothing() -> None:
    # R52: trimming the source to its last len(target) blocks would pair 7 with 3.
    assert [(run.source_block, run.target_block) for run in runs([7, 8, 9], 16, [3, 4, 5], 16, 16, 32)] == [
        (8, 3),
        (9, 4),
    ]


def test_a_prefix_hit_may_start_inside_a_larger_source_block() -> None:
    assert list(runs([7, 8], 32, [3, 4], 16, 16, 32)) == [TokenRun(7, 16, 3, 0, 16), TokenRun(8, 0, 4, 0, 16)]


@pytest.mark.parametrize(
    ("source", "source_size", "target", "target_size", "start", "tokens", "message"),
    [
        ([1], 16, [1], 12, 0, 1, "prefill block size 16 and decode block size 12"),
        ([1], 0, [1], 16, 0, 1, "must be 1 or more"),
        ([1], 16, [1], 16, 0, -1, "must be 0 or more"),
        ([1], 16, [1], 16, 8, 1, "not a multiple of decode's block size"),
        ([1], 16, [1], 16, -16, 1, "not a multiple"),
        ([1], 16, [1], 16, 16, 1, "1 prefill blocks of 16 tokens do not cover the 1 tokens from 16"),
        ([1, 2], 16, [1], 16, 0, 17, "1 decode blocks of 16 tokens do not cover the 17 tokens"),
    ],
)
def test_lists_that_cannot_be_paired_are_refused_before_the_first_run(
    source: list[int], source_size: int, target: list[int], target_size: int, start: int, tokens: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        runs(source, source_size, target, target_size, start, tokens)


def cells(found: Iterable[TokenRun]) -> list[tuple[int, int, int, int]]:
    return [
        (run.source_block, run.source_offset + at, run.target_block, run.target_offset + at)
        for run in found
        for at in range(run.tokens)
    ]


@given(sizes=SIZES, prefix_blocks=st.integers(0, 3), num_tokens=st.integers(0, 60), data=st.data())
def test_subranges_make_the_range(
    sizes: tuple[int, int], prefix_blocks: int, num_tokens: int, data: st.DataObject
) -> None:
    source_size, target_size = sizes
    start = prefix_blocks * target_size
    stop = start + num_tokens
    source = [900 - at for at in range(-(-stop // source_size))]
    target = [500 - at for at in range(-(-num_tokens // target_size))]
    args = (source, source_size, target, target_size, start)
    borders = sorted({start, *data.draw(st.lists(st.integers(start, stop), max_size=5)), stop})
    segments = [runs_within(*args, first, last) for first, last in pairwise(borders)]
    assert [cell for segment in segments for cell in cells(segment)] == cells(runs(*args, num_tokens))


def test_a_range_beyond_the_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="1 prefill blocks of 4 tokens do not cover tokens 3 to 5"):
        list(runs_within([7], 4, [8, 9], 4, 0, 3, 5))
    with pytest.raises(LayoutError, match="do not follow one another from 4 on"):
        list(runs_within([7, 8], 4, [9], 4, 4, 2, 5))
