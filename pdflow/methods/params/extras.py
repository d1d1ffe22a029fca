"""The parameters that pdflow adds, under the one key "pdflow" (spec 2.3 and spec 2.12).

They are all that the core's KvParams needs and no original has. Stock vLLM skips the key; pdflow's router removes it
from a client's request (spec 2.12).
"""

from __future__ import annotations

from typing import Final

import attrs

from pdflow.methods.params.fields import Kind, nested, param
from pdflow.methods.params.kinds import ADDRESSES, GROUPS, ID, LEASE_WORDS, RANKS, U64, integer
from pdflow.protocol.wire.limits import MAX_BLOCK_TOKENS


@attrs.frozen(kw_only=True)
class Extras:
    """The object under "pdflow"."""

    xid: str = param(ID, "id of the prefill product; the same in both legs")
    block_size: int | None = param(integer(1, MAX_BLOCK_TOKENS), "tokens in a block of P", default=None)
    tp: int | None = param(RANKS, "P's tensor-parallel size, where the original D asks P for it", default=None)
    pp: int | None = param(RANKS, "P's pipeline-parallel size, where the original D asks P for it", default=None)
    digest: int = param(U64, "digest of the content that P's KV was computed from", default=0)
    weights: int = param(U64, "the version of P's weights", default=0)
    incarnation: int | None = param(U64, "incarnation of P that has computed the prompt", default=None)
    lease: tuple[tuple[int, int], ...] = param(LEASE_WORDS, "pull: index of P's lease word, and its value", default=())
    groups: tuple[tuple[int, ...], ...] | None = param(
        GROUPS, "pull: P's block table of each KV cache group, from token 0 on, if there are several", default=None
    )
    ranks: tuple[tuple[str, int], ...] | None = param(
        ADDRESSES, "address of each P rank, if ranks are separate processes", default=None
    )
    stores: tuple[tuple[str, int], ...] | None = param(
        ADDRESSES, "kv-store, to P: address of each node of the store; port 0 if it is down", default=None
    )


EXTRAS: Final[Kind] = nested(Extras, "pdflow", "an object with xid")


@attrs.frozen(kw_only=True)
class Params:
    """Base of the parameters of every method and leg."""

    pdflow: Extras | None = param(EXTRAS, "pdflow's own parameters", default=None)  # noqa: RUF009 (a field)
