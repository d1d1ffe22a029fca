"""Identities of engines, ranks, registrations and operations, and the base id of vLLM's push matcher.

Sources: spec 1.2 and spec 1.3; vLLM 0.32.0 for its ids.
"""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import UNSET, UnsetType

from pdflow.protocol.values import Address, EngineId, RequestId, Value, Xid


class Reg(Value, frozen=True, gc=False):
    """One registration: the write grant of one attempt at one decode engine (d_engine, d_inc, seq).

    `seq` is minted by D's scheduler, strictly increasing within one incarnation, the same on all its ranks. In
    `vllm-compat`, whose wire has neither, incarnation and seq are 0 and the request id alone names the registration.
    """

    engine: EngineId
    incarnation: int
    seq: int
    request_id: RequestId


class Op(Value, frozen=True, gc=False):
    """A one-sided operation: it moves the shard that prefill rank `p_rank` and decode rank `d_rank` share for `reg`."""

    reg: Reg
    p_rank: int
    d_rank: int


class Shards(Value, frozen=True, gc=False):
    """The sharding of an engine's KV cache: tensor parallel ranks, pipeline stages, tokens in a block."""

    tp: int
    pp: int
    block_size: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


class EngineInfo(Value, frozen=True, gc=False):
    """The identity and sharding of an engine, from which another engine derives the names of its ranks."""

    engine: EngineId
    shards: Shards


class LeaseWord(Value, frozen=True, gc=False):
    """One slot of P's lease-word array, as advertised to D: 8 bytes that P bumps before it may free (spec 2.3)."""

    index: int
    value: int


class KvParams(Value, frozen=True, gc=False):
    """The coordinates of a prefill leg that its decode leg needs (kv_transfer_params). `source` fields: pull only."""

    prefill: EngineInfo
    xid: Xid
    request_id: RequestId
    """P's internal id of the prefill leg, which heartbeats and pull completions name."""
    num_tokens: int
    blocks: tuple[int, ...] = ()
    rank_words: tuple[LeaseWord, ...] = ()
    digest: int = 0
    weights: int = 0
    """The version of the weights that the prompt's KV was computed with: a pulling D compares before it reads (S4)."""
    groups: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    """As of an Allocation, with `blocks`. Not recorded where there is one group, as before there were several."""
    incarnation: int | UnsetType = UNSET
    """The incarnation of P that has computed the prompt, by P's answer. Not recorded where no answer has named it."""


@lru_cache(maxsize=65536)
def rank_address(engine: EngineId, rank: int) -> Address:
    return f"{engine}.r{rank}"


@lru_cache(maxsize=65536)
def rank_of(address: Address) -> int:
    """The rank that an address names; -1, which no rank is, if it names none (S9: addresses come from peers)."""
    digits = address.rpartition(".r")[2]
    return int(digits) if digits.isdecimal() and digits.isascii() and len(digits) <= 6 else -1


@lru_cache(maxsize=65536)
def engine_of(address: Address) -> EngineId:
    return address.rpartition(".r")[0] or address


_SUFFIX = re.compile(r"-[0-9a-fA-F]{8}\Z")


def base_id(request_id: RequestId) -> str:
    """The internal id without the one trailing `-xxxxxxxx` that vLLM's input processor appends.

    The ambiguity is kept on purpose, since the peer does the same: a client's own id that happens to end that way loses
    it too (R39, R41).
    """
    return _SUFFIX.sub("", request_id, count=1)
