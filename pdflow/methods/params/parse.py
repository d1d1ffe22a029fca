"""The parameters of one request: which class each method's leg has, read from JSON's values and written again.

P's answer to the prefill leg is the decode leg's parameters: NIXL's and the CPU connector's are forwarded as they are,
the others answer nothing. A peer's input affects only its own request: a ParamsError describes what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from pdflow.methods.params.cpu_staged import CpuStagedDecode
from pdflow.methods.params.errors import ParamsError, shown
from pdflow.methods.params.extras import Params
from pdflow.methods.params.fields import plain, structure
from pdflow.methods.params.kv_store import KVTransferParams
from pdflow.methods.params.mooncake import MooncakeV1Decode, MooncakeV1Prefill
from pdflow.methods.params.nixl import NixlPrefill, NixlPullDecode, NixlPushDecode

Leg: TypeAlias = Literal["prefill", "decode"]

PARAMS: Final[Mapping[str, Mapping[Leg, type[Params]]]] = {
    "nixl-push": {"prefill": NixlPrefill, "decode": NixlPushDecode},
    "nixl-pull": {"prefill": NixlPrefill, "decode": NixlPullDecode},
    "cpu-staged": {"prefill": Params, "decode": CpuStagedDecode},
    "p2p-nccl-put": {"prefill": Params, "decode": Params},
    "p2p-nccl-put-async": {"prefill": Params, "decode": Params},
    "p2p-nccl-get": {"prefill": Params, "decode": Params},
    "kv-store": {"prefill": KVTransferParams, "decode": KVTransferParams},
    "mooncake-v0": {"prefill": Params, "decode": Params},
    "mooncake-v1": {"prefill": MooncakeV1Prefill, "decode": MooncakeV1Decode},
}
"""By method and leg. `Params` alone where the original has none: P2P NCCL has addresses in the request id
(`request_id.py`), Mooncake V0 matches by tokens."""


def parse(method: str, leg: str, mapping: object) -> Params:
    """Read the kv_transfer_params that came with one leg of a request; None if none came. ParamsError for the first
    thing wrong.

    `mapping` is the result of a JSON decoder, of any type, size and depth.
    """
    legs = _named("method", PARAMS, method)
    params: type[Params] = _named("leg", legs, leg)
    return structure(params, {} if mapping is None else mapping)


def to_json(params: Params) -> dict[str, Any]:
    """Return the JSON object of the same content, under the original's names; `parse` reads it as an equal object."""
    return plain(params)


def _named(what: str, known: Mapping[Any, Any], name: object) -> Any:
    if not isinstance(name, str) or name not in known:
        raise ParamsError(what, f"is {shown(name)}", f"one of {', '.join(known)}")
    return known[name]
