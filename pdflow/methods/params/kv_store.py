"""KVTransferParams of vLLM #12957, for stores of KV by key.

Both legs have the same three fields. For plain disaggregation P gets store keys, D the same as load keys, and the
prefix ids are the prompt's token ids, or absent. How many keys there are says nothing of how many tokens: a key may
stand for a prompt or for a block. One prompt is a list, several are a list with a list or null for each.

Narrower than the original: true is no token id, which Python's isinstance lets pass, and a key is not empty.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from pdflow.methods.params.extras import Params
from pdflow.methods.params.fields import param
from pdflow.methods.params.kinds import KEY_LISTS, TOKEN_LISTS

TokenIds: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...] | None, ...]
Keys: TypeAlias = tuple[str, ...] | tuple[tuple[str, ...] | None, ...]


@attrs.frozen(kw_only=True)
class KVTransferParams(Params):
    """The parameters of either leg, from the router to P and to D."""

    prefix_prompt_ids: TokenIds | None = param(  # noqa: RUF009 (a field, as those below)
        TOKEN_LISTS, "token ids whose KV is transferred; for plain P/D, the prompt's", default=None, null=True
    )
    kvcache_load_keys: Keys | None = param(  # noqa: RUF009
        KEY_LISTS, "keys to read", default=None, null=True
    )
    kvcache_store_keys: Keys | None = param(  # noqa: RUF009
        KEY_LISTS, "keys to store under", default=None, null=True
    )
