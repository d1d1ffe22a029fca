"""P2P NCCL (PR #18242): layer by layer over groups of two ranks, into a GPU buffer of D's that spills to the host.

With PUT, P's engine waits while it sends; with PUT_ASYNC, a separate thread sends. With GET, P keeps the KV that it has
computed in its own store, and D fetches it. A control message announces each layer. As published, D's one listener
thread receives one layer at a time from all its peers, and D's engine waits for every layer. Here D receives several at
a time, and only the request waits.
"""

from __future__ import annotations

import attrs

from pdflow.methods.guards import Guards
from pdflow.methods.method import Grain, Hop, MemoryKind, Method, PipelinePolicy, Turns
from pdflow.methods.wire_profile import LEASE_WORD, UNASKED, Occasion, ProfileMessage, Side, WireProfile

_LIMITS = (
    "as published, equal tensor-parallel sizes and no pipeline parallelism; an NCCL group for each pair of ranks takes "
    "GPU memory"
)
_LANES = 4
"""Lanes of a D rank, in strict. The authors proposed more than their one listener."""
_HEARTBEAT_S = 3.0
"""Between two messages of an engine to the proxy."""
_PUBLISHED = Guards(
    reserves_whole=False,
    survives_exhaustion=False,
    invalidates_lost=False,
    ends_receives=False,
    ranks_by_address=False,
)
_ADDRESSES = "both addresses in its id"
_UNIQUE_ID_BYTES = 149
"""The size of NEW, msgpack of `cmd` and NCCL's id of 128 bytes. A PUT is about 180: an id of 130 characters, shape and
dtype."""
_PUT = WireProfile(
    messages=(
        ProfileMessage("NEW", Side.P, Occasion.CONTACT, num_bytes=_UNIQUE_ID_BYTES),
        ProfileMessage("PUT", Side.P, Occasion.PIECE),
        ProfileMessage("0", Side.D, Occasion.PIECE, num_bytes=1),
    ),
    # P has D's address from the id, asks for no room, and D counts the layers that have come.
    silent=UNASKED | {"REG", "REG_ACK", "DONE"},
    prefill_leg=_ADDRESSES,
    decode_leg=_ADDRESSES,
)
_GET = WireProfile(
    messages=(
        ProfileMessage("NEW", Side.D, Occasion.CONTACT, num_bytes=_UNIQUE_ID_BYTES),
        ProfileMessage("GET", Side.D, Occasion.PIECE),
        ProfileMessage("ret", Side.P, Occasion.PIECE),
    ),
    # TAKEN is pdflow's, and shown: the original's P keeps fetched KV until it evicts it.
    silent=UNASKED | {LEASE_WORD},
    prefill_leg=_ADDRESSES,
    decode_leg=_ADDRESSES,
)

P2P_NCCL_PUT = Method(
    name="p2p-nccl-put",
    summary="P sends each layer into D's buffer, and P's engine waits until all are sent",
    source="PR #18242",
    names_decode=True,
    initiator="P sends",
    grain=Grain.LAYER,
    p_memory=MemoryKind.TENSORS,
    d_memory=MemoryKind.BUFFER,
    staging=Hop.D2D,
    loading=Hop.D2D,
    groups=True,
    back_pressure="P's engine waits; D's buffer spills to host memory; if that is full, D registers later",
    on_loss="if a layer is lost, the request fails; as published, the layer is skipped",
    limits=_LIMITS,
    strict=PipelinePolicy(prefill_waits=True, asks=True, sending_lanes=1, receiving_lanes=_LANES),
    published=PipelinePolicy(
        equal_tp=True,
        pipelined=False,
        prefill_waits=True,
        decode_waits=True,
        asks=True,
        sending_lanes=1,
        receiving_lanes=1,
        turns=Turns.PIECE,
        guards=_PUBLISHED,
        wire_profile=_PUT,
        heartbeat_s=_HEARTBEAT_S,
    ),
)
P2P_NCCL_PUT_ASYNC = attrs.evolve(
    P2P_NCCL_PUT,
    name="p2p-nccl-put-async",
    summary="a thread of P sends each layer into D's buffer while P computes the next",
    back_pressure="D's buffer spills to host memory; if that is full, D registers later",
    strict=attrs.evolve(P2P_NCCL_PUT.strict, early=True, prefill_waits=False),
    published=attrs.evolve(P2P_NCCL_PUT.published, early=True),
)
P2P_NCCL_GET = Method(
    name="p2p-nccl-get",
    summary="P keeps layers in a store with eviction, and D fetches them one by one",
    source="PR #18242",
    pulls=True,
    initiator="D gets",
    grain=Grain.LAYER,
    p_memory=MemoryKind.STORE,
    staging=Hop.D2D,
    groups=True,
    back_pressure="P's store evicts the least recently used prompts",
    on_loss="if a layer is lost, the request fails; as published, the layer is skipped",
    limits=_LIMITS,
    strict=PipelinePolicy(asks=True, sending_lanes=1, receiving_lanes=_LANES),
    published=PipelinePolicy(
        equal_tp=True,
        pipelined=False,
        decode_waits=True,
        asks=True,
        sending_lanes=1,
        receiving_lanes=1,
        turns=Turns.PIECE,
        guards=_PUBLISHED,
        wire_profile=_GET,
        heartbeat_s=_HEARTBEAT_S,
    ),
)
