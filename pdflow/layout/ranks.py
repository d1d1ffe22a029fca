"""Pairs of P and D ranks that exchange KV when their parallelism differs, and the layers and heads of each pair.

This module decides pairs of ranks and the slice that each carries; block lists and addresses are `pairing` and
`descriptors`.

With L the initiator's TP and R the other side's, one divides the other. The narrower side's rank faces several of the
wider: rank d of D takes from rank `d * P // D` of P, or from the ranks `d * q ... d * q + q - 1` where P is q times
wider, keeping the first of each distinct head. D has no pipeline parallelism; every stage of P contributes its layers.
A rank's index is `pp_rank * tp + tp_rank`.

Two rules share this geometry:

- `exactly-once`: each cell (layer, head) that a rank of D stores is carried by exactly one rank of P, whichever side
  starts. Any TP sizes do of which one divides the other, replicated heads included.
- `vllm`: what vLLM 0.32.0 does. When P writes and has more ranks than D and than KV heads, every replica writes the
  same bytes to the same place: more bytes than D stores, and completions are counted accordingly (`pp * max(1, P // D)`
  for each D rank). It also refuses a peer that is wider than the initiator and has more ranks than KV heads, except
  for MLA, where the initiator writes to every rank of D.

Source: spec 1.4.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pdflow.layout.shapes import KvShape, LayoutError, heads_of_rank, stage_layers
from pdflow.protocol.values import Value

Initiator: TypeAlias = Literal["push", "pull"]
"""The side that moves the bytes: P writes (push) or D reads (pull)."""

Rule: TypeAlias = Literal["exactly-once", "vllm"]


class Pair(Value, frozen=True, gc=False):
    """A pair of ranks, one of P (the source) and one of D (the target), and the slice of KV that goes between them.

    Layers and heads are counted as that rank stores them, from 0: `source_layer` within P's stage, `source_head`
    within the heads of P's rank, `target_head` within those of D's rank.
    """

    p_rank: int
    d_rank: int
    source_layer: int
    target_layer: int
    num_layers: int
    source_head: int
    target_head: int
    num_heads: int
    bytes_per_token: int


def of_layer(pair: Pair, layer: int) -> Pair:
    """Return the pair of one of its layers, counted from its first."""
    return Pair(
        pair.p_rank,
        pair.d_rank,
        pair.source_layer + layer,
        pair.target_layer + layer,
        1,
        pair.source_head,
        pair.target_head,
        pair.num_heads,
        pair.bytes_per_token,
    )


def writers(
    shape: KvShape, p_tp: int, p_pp: int, d_tp: int, *, initiator: Initiator = "push", rule: Rule = "exactly-once"
) -> tuple[Pair, ...]:
    """Return all pairs of one transfer, by D rank, then stage, then P rank.

    A rank of P that stands in no pair has nothing to send (a replica of another's heads).
    Raises LayoutError for sizes of which neither divides the other, and for what the `vllm` rule refuses.
    """
    heads = shape.stored_heads
    check_tp(shape, p_tp, d_tp, initiator=initiator, rule=rule)
    stages = stage_layers(shape.num_layers, p_pp)
    every_replica = rule == "vllm" and initiator == "push"
    pairs = []
    for d_rank in range(d_tp):
        stored = heads_of_rank(heads, d_tp, d_rank)
        sources = _sources(heads, p_tp, d_tp, d_rank, every_replica)
        for pp_rank, layers in enumerate(stages):
            for tp_rank in sources:
                held = heads_of_rank(heads, p_tp, tp_rank)
                first = max(held.start, stored.start)
                count = min(held.stop, stored.stop) - first
                pairs.append(
                    Pair(
                        p_rank=pp_rank * p_tp + tp_rank,
                        d_rank=d_rank,
                        source_layer=0,
                        target_layer=layers.start,
                        num_layers=len(layers),
                        source_head=first - held.start,
                        target_head=first - stored.start,
                        num_heads=count,
                        bytes_per_token=len(layers) * shape.tensors_per_layer * count * shape.cell_bytes
                        + shape.index_bytes * len(layers) // shape.num_layers,
                    )
                )
    return tuple(pairs)


def check_tp(
    shape: KvShape, p_tp: int, d_tp: int, *, initiator: Initiator = "push", rule: Rule = "exactly-once"
) -> None:
    """Raise LayoutError, in words for the scenario's author, if these TP sizes cannot exchange this model's KV."""
    heads = shape.stored_heads
    for side, tp in (("prefill", p_tp), ("decode", d_tp)):
        if tp < 1 or max(heads, tp) % min(heads, tp):
            raise LayoutError(f"{side} TP {tp} and {heads} KV heads: one of the two must divide the other")
    if max(p_tp, d_tp) % min(p_tp, d_tp):
        raise LayoutError(f"prefill TP {p_tp} and decode TP {d_tp}: one of the two must divide the other")
    local, remote = (p_tp, d_tp) if initiator == "push" else (d_tp, p_tp)
    if rule == "vllm" and shape.mla is None and remote > local and remote > heads:
        wide, narrow = ("decode", "prefill") if initiator == "push" else ("prefill", "decode")
        raise LayoutError(
            f"{wide} TP {remote} replicates {heads} KV heads, which vLLM's {initiator} refuses from {narrow} TP {local}"
            f": use {wide} TP {heads} or less, or equal TP, or the strict dialect"
        )


def by_producer(pairs: tuple[Pair, ...]) -> dict[int, tuple[Pair, ...]]:
    """Map each P rank to its pairs, both in increasing order of rank. Idle ranks of P are not among the keys."""
    found: dict[int, list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.p_rank, pair.d_rank)):
        found.setdefault(pair.p_rank, []).append(pair)
    return {rank: tuple(own) for rank, own in found.items()}


def by_consumer(pairs: tuple[Pair, ...]) -> dict[int, tuple[Pair, ...]]:
    """Map each D rank to its pairs, both in increasing order of rank: the completions that the rank waits for."""
    found: dict[int, list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.d_rank, pair.p_rank)):
        found.setdefault(pair.d_rank, []).append(pair)
    return {rank: tuple(own) for rank, own in found.items()}


def _sources(heads: int, p_tp: int, d_tp: int, d_rank: int, every_replica: bool) -> tuple[int, ...]:
    """Return the TP ranks of P, within a stage, from which this rank of D gets its heads."""
    if p_tp <= d_tp:
        return (d_rank * p_tp // d_tp,)
    width = p_tp // d_tp
    facing = range(d_rank * width, (d_rank + 1) * width)
    if every_replica:
        return tuple(facing)
    first_of_head: dict[int, int] = {}
    for tp_rank in facing:
        first_of_head.setdefault(tp_rank * heads // p_tp, tp_rank)
    return tuple(first_of_head.values())
