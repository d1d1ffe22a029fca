"""Streams are a fixed function of seed and name, and their numbers are where they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdflow.workload import Rng, Stream

ROOT = Path(__file__).resolve().parents[2]


def test_golden_values() -> None:
    """A change here changes every simulated result: don't."""
    stream = Rng(1).stream("arrivals")
    assert [stream.u64() for _ in range(3)] == [7623371875189151865, 6484083441176073303, 5758237206438519543]
    stream = Rng(0).stream("input")
    assert [stream.integer(512, 1536) for _ in range(8)] == [1439, 647, 982, 638, 1253, 519, 1135, 1044]
    assert Rng(7).stream("x").uniform() == 0.10386941501042968
    assert Rng(7).stream("x").exponential(2.0) == 4.529241587395831


def test_streams_are_independent_of_each_other_and_of_the_block_size() -> None:
    rng = Rng(3)
    alone = [rng.stream("a").u64() for _ in range(1)]
    a, b = rng.stream("a"), rng.stream("b")
    mixed = []
    for _ in range(600):  # past the end of a block
        mixed.append(a.u64())
        b.u64()
    fresh = rng.stream("a")
    assert mixed == [fresh.u64() for _ in range(600)]
    assert mixed[0] == alone[0]
    assert len(set(mixed)) == 600
    assert Rng(4).stream("a").u64() != mixed[0] != rng.stream("b").u64()


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_the_same_in_every_process(hash_seed: str) -> None:
    script = "from pdflow.workload import Rng; s = Rng(9).stream('n'); print([s.u64() for _ in range(4)])"
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    stream = Rng(9).stream("n")
    assert result.stdout.strip() == str([stream.u64() for _ in range(4)])


def test_uniform_numbers_never_reach_the_ends() -> None:
    for extreme in (0, 2**64 - 1):
        stream = Stream(0, "x")
        stream._next = lambda extreme=extreme: extreme
        assert 0.0 < stream.uniform() < 1.0
        assert 0.0 < stream.exponential(1.0) < 37.0


def test_integers_are_unbiased_and_in_range() -> None:
    stream, counts = Rng(5).stream("dice"), [0] * 6
    for _ in range(60_000):
        counts[stream.below(6)] += 1
    assert sum((count - 10_000) ** 2 / 10_000 for count in counts) < 20.5  # chi-square, 5 degrees, 0.1 %
    assert {stream.integer(3, 5) for _ in range(100)} == {3, 4, 5}
    assert stream.integer(7, 7) == 7


def test_below_rejects_the_numbers_that_would_bias_it() -> None:
    """2**64 = 1 (mod 3): one number of 2**64 must be drawn again, and it is the one whose low product is least."""
    drawn = iter([0, 1])
    stream = Stream(0, "x")
    stream._next = drawn.__next__
    assert stream.below(3) == 0
    assert next(drawn, None) is None, "0 was accepted"


def test_exponentials_have_their_mean_and_variance() -> None:
    stream = Rng(6).stream("gaps")
    gaps = [stream.exponential(3.0) for _ in range(100_000)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(3.0, rel=0.015)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(9.0, rel=0.04)
