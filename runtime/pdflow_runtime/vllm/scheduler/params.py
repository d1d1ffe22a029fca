"""kv_transfer_params of vLLM's requests, to and from the parameters that cores use.

The keys are those of vLLM's NIXL connectors, so that routers and proxies that know these pass ours on as they are, with
pdflow's own under "pdflow" (`pdflow/methods/params`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pdflow.methods.params.nixl import NixlPrefill
from pdflow.methods.params.parse import parse
from pdflow.protocol.ids import KvParams
from pdflow.protocol.values import Xid
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json, read_decode


def is_prefill_leg(params: Mapping[str, Any] | None) -> bool:
    """Whether a D will come for the KV of this request."""
    return bool(params) and bool(params.get("do_remote_decode"))  # type: ignore[union-attr]


def is_decode_leg(params: Mapping[str, Any] | None) -> bool:
    """Whether a P has, or will have, the KV of this request's prompt."""
    return bool(params) and bool(params.get("do_remote_prefill"))  # type: ignore[union-attr]


def xid_of(params: Mapping[str, Any], method: str) -> Xid:
    """Return the name of the prompt's KV that a router has given it, or a new one. ParamsError."""
    parsed = parse(method, "prefill", params)
    assert isinstance(parsed, NixlPrefill)
    return secrets.token_hex(16) if parsed.pdflow is None else parsed.pdflow.xid


def answer_of(params: KvParams, ranks: tuple[tuple[str, int], ...], method: str) -> dict[str, Any]:
    """Return P's answer, which the decode leg is given as it is. `ranks`: where each of P's ranks listens."""
    host, port = ranks[0]
    return decode_json(params, Coordinates(host, port, ranks), method)


def read_answer(params: Mapping[str, Any], method: str) -> tuple[KvParams, Coordinates]:
    """Return what a decode leg's parameters say. ParamsError."""
    return read_decode(method, params)
