"""Pairs of ranks: cover without overlap, and the same head slots as vLLM's own formulas."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.ranks import Initiator, Pair, by_consumer, by_producer, check_tp, writers
from pdflow.layout.shapes import KvShape, LayoutError, MlaDims, heads_of_rank, stage_layers

TP = st.sampled_from([1, 2, 4, 8, 16])


def shape_of(num_layers: int, num_kv_heads: int, mla: bool) -> KvShape:
    return KvShape(num_layers, num_kv_heads, 16, 2, 16, MlaDims(12, 4) if mla else None)


SHAPES = st.builds(shape_of, st.integers(3, 9), st.sampled_from([1, 2, 4, 8, 16]), st.booleans())


def deliveries(shape: KvShape, pairs: tuple[Pair, ...], p_tp: int, p_pp: int, d_tp: int) -> Counter[tuple[int, ...]]:
    """How often each (D rank, layer, head slot) is written, checking that the content is that slot's own."""
    count: Counter[tuple[int, ...]] = Counter()
    stages = stage_layers(shape.num_layers, p_pp)
    for pair in pairs:
        layers = stages[pair.p_rank // p_tp]
        held = heads_of_rank(shape.stored_heads, p_tp, pair.p_rank % p_tp)
        stored = heads_of_rank(shape.stored_heads, d_tp, pair.d_rank)
        for layer in range(pair.num_layers):
            assert layers[pair.source_layer + layer] == pair.target_layer + layer
            for head in range(pair.num_heads):
                assert held[pair.source_head + head] == stored[pair.target_head + head]
                count[pair.d_rank, pair.target_layer + layer, pair.target_head + head] += 1
    return count


def stored_slots(shape: KvShape, d_tp: int) -> set[tuple[int, ...]]:
    return {
        (d_rank, layer, slot)
        for d_rank in range(d_tp)
        for layer in range(shape.num_layers)
        for slot in range(len(heads_of_rank(shape.stored_heads, d_tp, d_rank)))
    }


@given(shape=SHAPES, p_tp=TP, p_pp=st.integers(1, 3), d_tp=TP, initiator=st.sampled_from(["push", "pull"]))
def test_every_cell_of_d_is_carried_exactly_once(
    shape: KvShape, p_tp: int, p_pp: int, d_tp: int, initiator: Initiator
) -> None:
    pairs = writers(shape, p_tp, p_pp, d_tp, initiator=initiator)
    count = deliveries(shape, pairs, p_tp, p_pp, d_tp)
    assert set(count) == stored_slots(shape, d_tp)
    assert set(count.values()) == {1}
    assert sum(pair.bytes_per_token for pair in pairs) == shape.engine_bytes_per_token(d_tp)
    for d_rank, own in by_consumer(pairs).items():
        assert sum(pair.bytes_per_token for pair in own) == shape.rank_bytes_per_token(d_tp)
        assert {pair.d_rank for pair in own} == {d_rank}
    assert sum(map(len, by_producer(pairs).values())) == len(pairs)
    assert len({(pair.p_rank, pair.d_rank) for pair in pairs}) == len(pairs), "one pair per two ranks"


def vllm_pairs(initiator: Initiator, p_tp: int, d_tp: int, heads: int, mla: bool) -> set[tuple[int, int, int, int]]:
    """The rule of spec 1.4 for vLLM 0.32.0: (P rank, D rank, source slot, target slot) of one stage."""
    local, remote = (p_tp, d_tp) if initiator == "push" else (d_tp, p_tp)
    found = set()
    for r in range(local):
        if local >= remote:
            moved = [r * remote // local]
        elif mla:
            q = remote // local
            moved = list(range(r * q, r * q + q)) if initiator == "push" else [r * remote // local]
        else:
            q = remote // local
            seen: dict[int, int] = {}
            for x in range(r * q, r * q + q):
                seen.setdefault(x * heads // remote, x)
            moved = list(seen.values())
        for chunk, x in enumerate(moved):
            local_heads = 1 if mla else max(1, heads // local)
            if mla or local <= remote:
                remote_slot = 0
            elif local > heads:
                remote_slot = r * heads // local - x * heads // remote
            else:
                # The factor counts local blocks, each of local_heads heads.
                remote_slot = (r % (local // remote)) * local_heads
            local_slot = 0 if mla or local >= remote else chunk * (local_heads // len(moved))
            if initiator == "push":
                found.add((r, x, local_slot, remote_slot))
            else:
                found.add((x, r, remote_slot, local_slot))
    return found


@given(shape=SHAPES, p_tp=TP, d_tp=TP, initiator=st.sampled_from(["push", "pull"]))
def test_the_vllm_rule_is_vllm_s_arithmetic(shape: KvShape, p_tp: int, d_tp: int, initiator: Initiator) -> None:
    mla = shape.mla is not None
    local, remote = (p_tp, d_tp) if initiator == "push" else (d_tp, p_tp)
    if not mla and remote > local and remote > shape.num_kv_heads:
        with pytest.raises(LayoutError, match="or the strict dialect"):
            writers(shape, p_tp, 1, d_tp, initiator=initiator, rule="vllm")
        return
    pairs = writers(shape, p_tp, 1, d_tp, initiator=initiator, rule="vllm")
    slots = {(pair.p_rank, pair.d_rank, pair.source_head, pair.target_head) for pair in pairs}
    assert slots == vllm_pairs(initiator, p_tp, d_tp, shape.num_kv_heads, mla)
    if initiator == "push":
        # What D counts: one completion from each P rank that faces it.
        assert {len(own) for own in by_consumer(pairs).values()} == {max(1, p_tp // d_tp)}
        again = max(1, p_tp // max(d_tp, shape.stored_heads))
        assert sum(pair.bytes_per_token for pair in pairs) == again * shape.engine_bytes_per_token(d_tp)
    else:
        assert pairs == writers(shape, p_tp, 1, d_tp, initiator=initiator)


def test_mla_reaches_every_rank_of_a_wider_d() -> None:
    pairs = writers(shape_of(4, 8, mla=True), 2, 1, 8)
    assert [(pair.p_rank, pair.d_rank) for pair in pairs] == [(d // 4, d) for d in range(8)]
    assert {pair.bytes_per_token for pair in pairs} == {4 * 16 * 2}


def test_replicas_of_p_stay_idle_unless_the_rule_is_vllm_s() -> None:
    shape = shape_of(4, 2, mla=False)
    assert sorted(by_producer(writers(shape, 8, 1, 2))) == [0, 4]
    assert sorted(by_producer(writers(shape, 8, 1, 2, rule="vllm"))) == list(range(8))


def test_rank_indices_with_stages() -> None:
    shape = shape_of(5, 8, mla=False)
    pairs = by_consumer(writers(shape, 2, 3, 1))[0]
    assert [pair.p_rank for pair in pairs] == [0, 1, 2, 3, 4, 5]
    assert [(pair.target_layer, pair.num_layers) for pair in pairs] == [(0, 2), (0, 2), (2, 2), (2, 2), (4, 1), (4, 1)]
    assert [(pair.source_head, pair.target_head, pair.num_heads) for pair in pairs] == [(0, 0, 4), (0, 4, 4)] * 3


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "heads", "message"),
    [
        (3, 4, 12, "prefill TP 3 and decode TP 4: one of the two must divide"),
        (3, 1, 8, "prefill TP 3 and 8 KV heads"),
        (1, 6, 4, "decode TP 6 and 4 KV heads"),
        (0, 1, 4, "prefill TP 0"),
    ],
)
def test_sizes_that_do_not_divide_are_named(p_tp: int, d_tp: int, heads: int, message: str) -> None:
    shape = shape_of(4, heads, mla=False)
    with pytest.raises(LayoutError, match=message):
        check_tp(shape, p_tp, d_tp)
    with pytest.raises(LayoutError, match=message):
        writers(shape, p_tp, 1, d_tp)
