"""The random numbers of a run: one seed, and named streams that do not affect each other.

A stream is SHAKE-128 (FIPS 202) over the seed, the stream's name and a block counter, read as little-endian 64-bit
numbers. Drawing more from one stream changes no other, so a longer prompt distribution never moves an arrival. The
numbers are a standard's, the same on every platform, Python and PYTHONHASHSEED; a block of them costs one call into C,
about 0.1 µs each. Not for secrets.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from hashlib import shake_128
from itertools import count
from statistics import NormalDist
from typing import Final

_PER_BLOCK: Final = 512
_FIRST: Final = 64
"""Numbers that are computed at first: many streams, such as those of a random walk, end before they need a block."""
_UNPACK: Final = struct.Struct(f"<{_PER_BLOCK}Q").unpack
_UNPACK_FIRST: Final = struct.Struct(f"<{_FIRST}Q").unpack
_NORMAL: Final = NormalDist()
_2_64: Final = 1 << 64
_2_MINUS_52: Final = 2.0**-52


class Rng:
    """The random streams of a run, by name."""

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, from its beginning."""
        return Stream(self.seed, name)


class Stream:
    """A named sequence of random numbers."""

    __slots__ = ("_next",)

    def __init__(self, seed: int, name: str) -> None:
        self._next = _numbers(f"pdflow/1/{seed}/{name}/".encode()).__next__

    def u64(self) -> int:
        """Draw a whole number from 0 to 2**64 - 1, all equally likely."""
        return self._next()

    def uniform(self) -> float:
        """Draw a number strictly between 0 and 1: the middle of one of 2**52 equal intervals, so neither end occurs."""
        return ((self._next() >> 12) + 0.5) * _2_MINUS_52

    def exponential(self, mean: float) -> float:
        """Draw an exponentially distributed number, by inversion: above 0, at most 36.8 means."""
        return -mean * math.log(((self._next() >> 12) + 0.5) * _2_MINUS_52)

    def below(self, n: int) -> int:
        """Draw a whole number from 0 to n - 1, without bias (Lemire 2019, arXiv:1805.10941). n is at most 2**64."""
        product = self._next() * n
        if product & (_2_64 - 1) < n:
            rejected = _2_64 % n
            while product & (_2_64 - 1) < rejected:
                product = self._next() * n
        return product >> 64

    def integer(self, low: int, high: int) -> int:
        """Draw a whole number from low to high, both included, without bias."""
        return low + self.below(high - low + 1)


def standard_normal(stream: Stream) -> float:
    """Draw a standard normal number by inversion: one number of the stream for each."""
    return _NORMAL.inv_cdf(stream.uniform())


def standard_gamma(shape: float, stream: Stream) -> float:
    """Draw a gamma number of scale 1, mean `shape` (Marsaglia and Tsang 2000; below 1 by their boost of shape + 1)."""
    if shape < 1.0:
        return float(standard_gamma(shape + 1.0, stream) * stream.uniform() ** (1.0 / shape))
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = standard_normal(stream)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and math.log(stream.uniform()) < 0.5 * x * x + d - d * v + d * math.log(v):
            return d * v


def _numbers(key: bytes) -> Iterator[int]:
    # A longer output of SHAKE-128 begins with the shorter one.
    yield from _UNPACK_FIRST(shake_128(key + b"0").digest(8 * _FIRST))
    yield from _UNPACK(shake_128(key + b"0").digest(8 * _PER_BLOCK))[_FIRST:]
    for block in count(1):
        yield from _UNPACK(shake_128(key + str(block).encode()).digest(8 * _PER_BLOCK))
