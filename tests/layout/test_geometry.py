"""The protocol's questions are answered as the pairs say."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.ranks import Rule, writers
from pdflow.layout.shapes import KvShape, LayoutError

SHAPE = KvShape(6, 4, 128, 2, 16)


class Sharding(NamedTuple):
    tp: int
    pp: int = 1
    block_size: int = 16


@pytest.mark.parametrize(
    ("p", "d"),
    [
        (Sharding(2, 2), Sharding(4)),
        (Sharding(4, 3), Sharding(1)),
        (Sharding(8), Sharding(2)),
        (Sharding(4, 1, 64), Sharding(8)),
    ],
)
@pytest.mark.parametrize("rule", ["exactly-once", "vllm"])
def test_answers_are_the_pairs(p: Sharding, d: Sharding, rule: Rule) -> None:
    if rule == "vllm" and d.tp == 8:
        pytest.skip("vLLM refuses replicated heads on a wider decode side")
    geometry = TransferGeometry(SHAPE, rule=rule)
    found = writers(SHAPE, p.tp, p.pp, d.tp, rule=rule)
    assert geometry.pairs(p, d) == tuple(sorted((pair.p_rank, pair.d_rank) for pair in found))
    for p_rank in range(p.tp * p.pp):
        for d_rank in range(d.tp):
            exchange = (p_rank, d_rank) in geometry.pairs(p, d)
            assert (d_rank in geometry.targets(p_rank, p, d)) == exchange
            assert (p_rank in geometry.sources(d_rank, p, d)) == exchange
    for pair in found:
        assert geometry.nbytes(pair.p_rank, pair.d_rank, p, d, 77) == 77 * pair.bytes_per_token


@pytest.mark.parametrize("p", [Sharding(2, 2), Sharding(4)])
def test_of_layers_with_a_window_its_end_is_moved(p: Sharding) -> None:
    d = Sharding(2)
    geometry = TransferGeometry(KvShape(6, 4, 128, 2, 16, window_layers=4, window_tokens=48))
    for pair in writers(SHAPE, p.tp, p.pp, d.tp):
        ranks = (pair.p_rank, pair.d_rank, p, d)
        assert geometry.nbytes(*ranks, 48) == 48 * pair.bytes_per_token
        assert geometry.nbytes(*ranks, 1000) * 3 == (1000 + 2 * 48) * pair.bytes_per_token
    with pytest.raises(LayoutError, match="7 of 6 layers with a window"):
        KvShape(6, 4, 128, 2, 16, window_layers=7, window_tokens=48)


def test_an_idle_replica_has_no_targets() -> None:
    geometry = TransferGeometry(SHAPE)
    assert [geometry.targets(rank, Sharding(8), Sharding(2)) for rank in range(4)] == [(0,), (), (0,), ()]
    with pytest.raises(LayoutError, match="prefill rank 1 and decode rank 0 exchange nothing"):
        geometry.nbytes(1, 0, Sharding(8), Sharding(2), 1)


@pytest.mark.parametrize(
    ("p", "d", "message"),
    [
        (Sharding(1), Sharding(1, 2), "only the prefill side"),
        (Sharding(1, 1, 24), Sharding(1), "block size 24"),
        (Sharding(1, 7), Sharding(1), "each stage needs at least one layer"),
        (Sharding(3), Sharding(1), "prefill TP 3"),
        (Sharding(1), Sharding(2**30), "decode with 1073741824 ranks"),
        (Sharding(2**30), Sharding(1), "prefill with 1073741824 ranks"),
        (Sharding(-(2**30)), Sharding(1), "prefill TP -1073741824"),
    ],
)
def test_what_cannot_be_paired_is_named(p: Sharding, d: Sharding, message: str) -> None:
    for _ in range(2):
        with pytest.raises(LayoutError, match=message):
            TransferGeometry(SHAPE).pairs(p, d)
