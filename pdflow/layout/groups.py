"""Models with several KV cache groups: each layer belongs to one, and each group has a block table of its own.

This module decides which runs of tokens a group's tables exchange, and gathers the descriptors of a pair whose layers
have different tables. Addresses are `descriptors`, runs within one table are `pairing`.

All groups take their blocks from one pool. A group with a sliding window keeps no block for tokens that have left the
window (NO_BLOCK in its table). What D keeps, P must have: a hole of P's where D has a block is an error, and never
skipped in silence. What only P keeps is not moved. There is no closed form of the count for several groups.

Source: vLLM 0.32, vllm/v1/core/single_type_kv_cache_manager.py (SlidingWindowManager) and kv_cache_interface.py
(KVCacheGroupSpec).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdflow.layout.descriptors import Descriptor, RankMemory, descriptors
from pdflow.layout.pairing import TokenRun, runs_within
from pdflow.layout.ranks import Pair, of_layer
from pdflow.layout.shapes import LayoutError
from pdflow.protocol.values import NO_BLOCK, BlockTables


def runs_kept(
    source_table: Sequence[int],
    source_block_size: int,
    target_table: Sequence[int],
    target_block_size: int,
    token_start: int,
    first: int,
    last: int,
) -> list[TokenRun]:
    """Return the runs of tokens `first ... last - 1` that D's table keeps, as `pairing.runs_within`.

    LayoutError if a table is too short, or P's keeps nothing of a run that D's does.
    """
    found = []
    at = first
    for run in runs_within(source_table, source_block_size, target_table, target_block_size, token_start, first, last):
        if run.target_block != NO_BLOCK:
            if run.source_block == NO_BLOCK:
                raise LayoutError(
                    f"decode keeps the tokens from {at} on in block {run.target_block}, and prefill has no block of "
                    "them: both must run the same model with the same sliding windows"
                )
            found.append(run)
        at += run.tokens
    return found


def table_descriptors(
    pair: Pair,
    source: RankMemory,
    target: RankMemory,
    source_tables: BlockTables,
    target_tables: BlockTables,
    token_start: int,
    first: int,
    last: int,
) -> list[Descriptor]:
    """Return every descriptor of tokens `first ... last - 1` of one pair, neighbours merged as by `descriptors`.

    `source_tables` begin at token 0, `target_tables` at `token_start`; there is one for each KV cache group. Raises
    LayoutError if the two ranks cannot exchange this pair by these tables.
    """
    of_source = source.groups_of(pair.source_layer, pair.num_layers)
    of_target = target.groups_of(pair.target_layer, pair.num_layers)
    groups = 1 + max(of_source)
    known = len(of_source) == pair.num_layers and of_source == of_target
    if not known or not groups <= len(source_tables) == len(target_tables):
        raise LayoutError(
            f"layers are in the KV cache groups {of_source} on prefill, with {len(source_tables)} block tables, and "
            f"{of_target} on decode, with {len(target_tables)}: both must run the same model"
        )
    runs = [
        runs_kept(from_table, source.block_size, to_table, target.block_size, token_start, first, last)
        for from_table, to_table in zip(source_tables, target_tables, strict=True)
    ]
    if len(runs) == 1:
        return descriptors(pair, source, target, runs[0], coalesce=True)
    found = []
    for layer, group in enumerate(of_source):
        found += descriptors(of_layer(pair, layer), source, target, runs[group], coalesce=True)
    return found
