"""The CPU connector (PR #18332): layer by layer through rings of host memory, while the next layers are computed.

P copies each layer of each chunk into its ring, and writes it from there into D's ring. D copies the prompt into blocks
when all of it has landed: before its first step or, with `load_by_layer` and as published, layer by layer while that
step computes (`engine/layered.py`). As published, each piece asks for memory of the ring by itself, and the last copies
block P's engine. Here a prompt has memory for all of its KV on both sides before its first piece is sent, which
prevents the ring's deadlock. In the simulator, as published, pieces ask by themselves at D alone: P's ring takes a
prompt whole, since P sends nothing of it before its answer.
As published, NIXL gets the rings as pages of 4 KiB, each a descriptor: a token of a layer of a small model is one.
D's leg waits for P's answer, which has the id under which P's pieces arrive (vLLM #18332).
"""

from __future__ import annotations

from pdflow.methods.guards import Guards
from pdflow.methods.method import Grain, Hop, MemoryKind, Method, PipelinePolicy
from pdflow.methods.wire_profile import UNASKED, Occasion, ProfileMessage, Side, WireProfile

_WIRE_PROFILE = WireProfile(
    messages=(
        ProfileMessage("REQ", Side.P, Occasion.CONTACT),
        ProfileMessage("REQMSG", Side.P, Occasion.PIECE),
        ProfileMessage("READYMSG", Side.D, Occasion.PIECE),
        ProfileMessage("FINISHMSG", Side.P, Occasion.BEHIND, waits=False),
    ),
    # D asks for memory piece by piece, and counts the pieces that have arrived.
    silent=UNASKED | {"REG", "REG_ACK", "DONE"},
    decode_leg="prefill_request_id",
)

CPU_STAGED = Method(
    name="cpu-staged",
    summary="P copies layers into a ring of host memory and writes them into D's ring while it computes the next",
    source="PR #18332",
    names_decode=True,
    initiator="D registers memory of its ring, P writes",
    grain=Grain.LAYER_CHUNK,
    p_memory=MemoryKind.RING,
    d_memory=MemoryKind.RING,
    staging=Hop.D2H,
    loading=Hop.H2D,
    back_pressure="if a ring is full, the prompt stays in P's blocks, or D registers later",
    on_loss="as nixl-push; as published, D waits forever for KV of a P that has died",
    limits="a prompt's KV must fit the ring; as published, equal tensor-parallel sizes",
    strict=PipelinePolicy(early=True),
    published=PipelinePolicy(
        equal_tp=True,
        early=True,
        prefill_waits=True,
        decode_waits=True,
        loads_by_layer=True,
        asks=True,
        answer_first=True,
        page_bytes=4096,
        guards=Guards(reserves_whole=False, indexes_by_piece=False, ends_receives=False),
        wire_profile=_WIRE_PROFILE,
    ),
)
