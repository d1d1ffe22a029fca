"""kv_transfer_params of NIXL pull and push, vLLM 0.32.0 (vLLM #35264, connector version 14).

P's answer is the decode leg's parameters, forwarded as it is. Only push may also be given P's coordinates before P has
answered, by a router that dispatches both legs at once; then there are no block ids.

Where vLLM has no default and no check, a missing field ends its engine (tp_size, the coordinates and remote_request_id
of a push: R35) or parks the request for good (those of a pull: R36). Here all of these have to be there. Not supported:
bidirectional transfer (P reading from D) and decode context parallelism, whose fields have one value.
"""

from __future__ import annotations

from typing import Final

import attrs

from pdflow.methods.params.extras import Params
from pdflow.methods.params.fields import param
from pdflow.methods.params.kinds import BLOCKS, HOST, ID, NAME, NO, PORT, RANKS, SECONDS, TOKENS, YES, only

_NOTHING: Final = only(None, "P reads nothing from D")
_NO_DCP: Final = only(1, "KV is split by tp and pp only")


@attrs.frozen(kw_only=True)
class NixlPrefill(Params):
    """The parameters of the prefill leg, from the router to P, pull and push."""

    do_remote_decode: bool = param(YES, "P holds the prompt's blocks for a D", default=True, required=True)
    do_remote_prefill: bool = param(NO, "P prefills itself", default=False)
    remote_engine_id: None = param(_NOTHING, "only for bidirectional transfer", default=None, null=True)
    remote_block_ids: None = param(_NOTHING, "only for bidirectional transfer", default=None, null=True)
    remote_host: None = param(_NOTHING, "only for bidirectional transfer", default=None, null=True)
    remote_port: None = param(_NOTHING, "only for bidirectional transfer", default=None, null=True)
    transfer_id: str | None = param(ID, "the router's id of this dispatch; the match key in newer vLLM", default=None)


@attrs.frozen(kw_only=True)
class NixlPullDecode(Params):
    """The parameters of a pull's decode leg, P's answer, which the router sends to D: D reads these blocks."""

    do_remote_prefill: bool = param(YES, "P has prefilled for D", default=True, required=True)
    do_remote_decode: bool = param(NO, "D decodes itself", default=False)
    remote_block_ids: tuple[int, ...] = param(BLOCKS, "P's logical block ids of the one KV-cache group")
    remote_engine_id: str = param(NAME, "P's engine_id, with _dp{rank} under data parallelism")
    remote_request_id: str = param(ID, "P's internal request id, used in heartbeats and completions")
    remote_host: str = param(HOST, "host of P's side channel, VLLM_NIXL_SIDE_CHANNEL_HOST")
    remote_port: int = param(PORT, "port of the side channel, VLLM_NIXL_SIDE_CHANNEL_PORT + data parallel index")
    tp_size: int = param(RANKS, "P's tensor-parallel size", default=1)
    dcp_size: int = param(_NO_DCP, "P's decode context parallelism", default=1)
    pp_size: int = param(RANKS, "P's pipeline-parallel size", default=1)
    remote_num_tokens: int | None = param(TOKENS, "number of tokens in P's blocks; 0: none", default=None)
    remote_blocks_expiry_time: float | None = param(
        SECONDS, "expiry on P's clock, if the source is a D", default=None, null=True
    )
    transfer_mode: str = param(only("pull", "or the other engine runs the push connector"), "P's mode", default="pull")
    remote_prefill_cached_tokens: int | None = param(TOKENS, "tokens of the prompt in P's prefix cache", default=None)
    transfer_id: str | None = param(ID, "as in the prefill leg", default=None)


@attrs.frozen(kw_only=True)
class NixlPushDecode(Params):
    """The parameters of a push's decode leg, from the router to D, perhaps before P has answered: D registers with P, P
    writes."""

    do_remote_prefill: bool = param(YES, "P prefills for D", default=True, required=True)
    do_remote_decode: bool = param(NO, "D decodes itself", default=False)
    remote_engine_id: str = param(NAME, "P's engine_id, with _dp{rank} under data parallelism")
    remote_host: str = param(HOST, "host of P's side channel, VLLM_NIXL_SIDE_CHANNEL_HOST")
    remote_port: int = param(PORT, "port of the side channel, VLLM_NIXL_SIDE_CHANNEL_PORT + data parallel index")
    tp_size: int = param(RANKS, "P's tensor-parallel size")
    pp_size: int = param(RANKS, "P's pipeline-parallel size", default=1)
    remote_request_id: str = param(
        ID, "P's internal request id; another id (a bare uuid) is accepted but renews no lease (R05)"
    )
    dcp_size: int | None = param(_NO_DCP, "P's decode context parallelism", default=None)
    remote_block_ids: tuple[int, ...] | None = param(BLOCKS, "present only after P's answer; not read", default=None)
    remote_num_tokens: int | None = param(TOKENS, "present only after P's answer", default=None)
    transfer_mode: str | None = param(
        only("push", "or the other engine runs the pull connector"),
        "P's mode; present only after its answer",
        default=None,
    )
    remote_prefill_cached_tokens: int | None = param(TOKENS, "tokens of the prompt in P's prefix cache", default=None)
    transfer_id: str | None = param(ID, "as in the prefill leg", default=None)
