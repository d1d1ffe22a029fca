"""Rates are the max-min fair ones: against lexicographic linear programmes, and against a fluid model in fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from pdflow.network import FlowNetwork

S = 10**9


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]]]:
    """Bandwidths of a few links, and paths over them: few enough that all of them meet."""
    bandwidths = draw(st.lists(st.integers(1, 30).map(lambda n: n * 1_000_003), min_size=1, max_size=5))
    subset = st.sets(st.integers(0, len(bandwidths) - 1), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
    return bandwidths, draw(st.lists(subset, min_size=1, max_size=6, unique=True))


def exhaustive_filling(bandwidths: list[int], paths: list[tuple[int, ...]], counts: list[int]) -> list[Fraction]:
    """Raise all unfrozen rates together until some link is full, one level at a time, in fractions."""
    rates = [Fraction(0)] * len(paths)
    growing = {i for i, count in enumerate(counts) if count}
    while growing:
        steps = []
        for link, bandwidth in enumerate(bandwidths):
            used = sum(rates[i] * counts[i] for i, path in enumerate(paths) if link in path)
            weight = sum(counts[i] for i in growing if link in paths[i])
            if weight:
                steps.append((Fraction(bandwidth - used) / weight, link))
        step = min(steps)[0]
        full = {link for each, link in steps if each == step}
        for i in growing:
            rates[i] += step
        growing = {i for i in growing if not full & set(paths[i])}
    return rates


def lexicographic_programme(bandwidths: list[int], paths: list[tuple[int, ...]], counts: list[int]) -> list[float]:
    """Max-min by linear programmes alone: maximise the least rate, find who cannot exceed it, fix them, repeat."""
    n = len(paths)
    rows = [[counts[i] if link in paths[i] else 0 for i in range(n)] for link in range(len(bandwidths))]
    fixed: dict[int, float] = {}
    while len(fixed) < n:
        free = [i for i in range(n) if i not in fixed]
        bounds = [(fixed[i], fixed[i]) if i in fixed else (0, None) for i in range(n)]
        # variables: the n rates and the level below all free ones
        level_rows = [[*row, 0] for row in rows]
        level_rows += [[-1.0 if j == i else 0.0 for j in range(n)] + [1.0] for i in free]
        limits = [*bandwidths, *[0.0] * len(free)]
        best = linprog([*[0.0] * n, -1.0], A_ub=level_rows, b_ub=limits, bounds=[*bounds, (0, None)])
        level = -best.fun
        for i in free:
            cost = np.zeros(n)
            cost[i] = -1.0
            at_least = [(level * (1 - 1e-9), None) if j in free else bounds[j] for j in range(n)]
            most = -linprog(cost, A_ub=rows, b_ub=bandwidths, bounds=at_least).fun
            if most <= level * (1 + 1e-6):
                fixed[i] = level
    return [fixed[i] for i in range(n)]


def loaded(bandwidths: list[int], paths: list[tuple[int, ...]], counts: list[int]) -> FlowNetwork:
    network = FlowNetwork()
    for i, bandwidth in enumerate(bandwidths):
        network.add_resource(f"link{i}", bandwidth)
    for path, count in zip(paths, counts, strict=True):
        for _ in range(count):
            network.start(network.path(path), 10**12, 0)
    return network


@given(networks(), st.data())
@settings(deadline=None)
def test_rates_are_those_of_exhaustive_filling(
    links: tuple[list[int], list[tuple[int, ...]]], data: st.DataObject
) -> None:
    bandwidths, paths = links
    counts = [data.draw(st.integers(0, 7)) for _ in paths]
    network = loaded(bandwidths, paths, counts)
    got = [network.rate(network.path(path)) for path in paths]
    for rate, expected, count in zip(got, exhaustive_filling(bandwidths, paths, counts), counts, strict=True):
        assert abs(rate - expected) < Fraction(1, 1 << 50) if count else rate == 0
    for link, bandwidth in enumerate(bandwidths):
        used = sum(rate * count for rate, count, path in zip(got, counts, paths, strict=True) if link in path)
        assert used <= bandwidth, "a resource is over capacity"
    for i, path in enumerate(paths):
        if counts[i]:
            assert any(is_bottleneck(link, i, got, bandwidths, paths, counts) for link in path)


def is_bottleneck(
    link: int, i: int, rates: list[Fraction], bandwidths: list[int], paths: list[tuple[int, ...]], counts: list[int]
) -> bool:
    """The link is full, and nobody on it gets more than path i (Bertsekas and Gallager's definition)."""
    crossing = [j for j, path in enumerate(paths) if link in path and counts[j]]
    used = sum(rates[j] * counts[j] for j in crossing)
    slack = Fraction(1, 1 << 50)
    return bandwidths[link] - used < slack and all(rates[j] <= rates[i] + slack for j in crossing)


@given(networks(), st.data())
@settings(deadline=None, max_examples=25)
def test_rates_are_those_of_linear_programmes(
    links: tuple[list[int], list[tuple[int, ...]]], data: st.DataObject
) -> None:
    bandwidths, paths = links
    counts = [data.draw(st.integers(1, 5)) for _ in paths]
    network = loaded(bandwidths, paths, counts)
    got = [float(network.rate(network.path(path))) for path in paths]
    assert got == pytest.approx(lexicographic_programme(bandwidths, paths, counts), rel=1e-5)


def fluid(
    bandwidths: list[int], paths: list[tuple[int, ...]], flows: list[tuple[int, int, int]]
) -> list[Fraction | None]:
    """Exact ends of (ns, path, bytes) flows: refilled by flow at every arrival and departure, in fractions."""
    left: dict[int, Fraction] = {}
    ends: list[Fraction | None] = [None] * len(flows)
    now, waiting = Fraction(0), sorted(range(len(flows)), key=lambda i: flows[i][0])
    while waiting or left:
        rates = exhaustive_filling(bandwidths, [paths[flows[i][1]] for i in left], [1] * len(left))
        ending = [(now + left[i] * S / rate, i) for i, rate in zip(left, rates, strict=True) if rate]
        following = [at for at, _ in ending] + ([Fraction(flows[waiting[0]][0])] if waiting else [])
        if not following:
            return ends
        at = min(following)
        for i, rate in zip(list(left), rates, strict=True):
            left[i] -= rate * (at - now) / S
            if left[i] == 0:
                del left[i]
                ends[i] = at
        now = at
        while waiting and flows[waiting[0]][0] == now:
            i = waiting.pop(0)
            left[i] = Fraction(flows[i][2])
    return ends


def carry(network: FlowNetwork, flows: list[tuple[int, int, int]]) -> list[int | None]:
    """Ends in ns of (ns, path, bytes) flows, in the order given, started in order of time."""
    ends: list[int | None] = [None] * len(flows)
    waiting, named = sorted(range(len(flows)), key=lambda i: flows[i][0]), {}
    while True:
        wake = network.wake_at()
        if waiting and (wake is None or flows[waiting[0]][0] <= wake):
            i = waiting.pop(0)
            named[network.start(flows[i][1], flows[i][2], flows[i][0])] = i
        elif wake is None:
            return ends
        else:
            for flow in network.advance(wake):
                ends[named[flow]] = wake


def built(bandwidths: list[int], paths: list[tuple[int, ...]]) -> FlowNetwork:
    network = FlowNetwork()
    for i, bandwidth in enumerate(bandwidths):
        network.add_resource(f"link{i}", bandwidth)
    for path in paths:
        network.path(path)
    return network


# On a grid, many flows start and end at one instant; off it, never.
INSTANTS = st.one_of(st.integers(0, 4).map(lambda n: n * 250_000_000), st.integers(0, S))
SIZES = st.one_of(st.integers(1, 4).map(lambda n: n * 1_000_003), st.integers(1, 10**7))


@given(networks(), st.data())
@settings(deadline=None)
def test_ends_are_those_of_a_fluid_model(links: tuple[list[int], list[tuple[int, ...]]], data: st.DataObject) -> None:
    bandwidths, paths = links
    flow = st.tuples(INSTANTS, st.integers(0, len(paths) - 1), SIZES)
    flows = data.draw(st.lists(flow, min_size=1, max_size=12))
    network = built(bandwidths, paths)
    ends = carry(network, flows)
    for got, expected in zip(ends, fluid(bandwidths, paths, flows), strict=True):
        assert expected is not None
        assert got == -(-expected.numerator // expected.denominator)
    last = max(end for end in ends if end is not None)
    for link in range(len(bandwidths)):
        sent = sum(size for _, path, size in flows if link in paths[path])
        assert network.carried_bytes(link, last) == sent, "bytes are conserved"
        assert network.in_flight(link) == 0


@given(networks(), st.data())
@settings(deadline=None, max_examples=50)
def test_the_order_of_one_instants_events_does_not_matter(
    links: tuple[list[int], list[tuple[int, ...]]], data: st.DataObject
) -> None:
    bandwidths, paths = links
    flow = st.tuples(INSTANTS, st.integers(0, len(paths) - 1), SIZES)
    flows = data.draw(st.lists(flow, min_size=2, max_size=12))
    order = data.draw(st.permutations(range(len(flows))))
    ends = carry(built(bandwidths, paths), flows)
    shuffled = carry(built(bandwidths, paths), [flows[i] for i in order])
    assert [ends[i] for i in order] == shuffled
