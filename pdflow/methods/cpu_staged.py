"""The CPU connector (PR #18332): layer by layer through rings of host memory, while the next layers are computed.

P copies each layer of each chunk into its ring, and writes it from there into D's; D copies it into blocks when all is
there. As published, the ring is asked for piece by piece and the last copies hold the engines up; here a prompt has
room for all of it on either side before its first piece goes, which is what the ring's deadlock needs to be avoided.
In the simulated world pieces ask by themselves at D alone: P's ring takes a prompt whole, since nothing of it can go
before P's answer.
As published, NIXL is given the rings as pages of 4 KiB, each a descriptor: a token of a layer of a small model is one.
And D's leg waits for P's answer, which has the id that P's pieces come under (SEED_SYSTEMS section 2).
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
    # D's room is asked for piece by piece, and D counts what has come.
    silent=UNASKED | {"REG", "REG_ACK", "DONE"},
    decode_leg="prefill_request_id",
)

CPU_STAGED = Method(
    name="cpu-staged",
    summary="P copies layers into a ring of host memory and writes them into D's, while it computes the next",
    source="PR #18332",
    names_decode=True,
    initiator="D registers room in its ring, P writes",
    grain=Grain.LAYER_CHUNK,
    p_memory=MemoryKind.RING,
    d_memory=MemoryKind.RING,
    staging=Hop.D2H,
    loading=Hop.H2D,
    back_pressure="a full ring: the prompt stays in P's blocks, D registers later",
    on_loss="as nixl-push; as published what a P that has died was sending is waited for without end",
    limits="a prompt's KV must fit the ring",
    strict=PipelinePolicy(early=True),
    published=PipelinePolicy(
        early=True,
        prefill_waits=True,
        decode_waits=True,
        asks=True,
        answer_first=True,
        page_bytes=4096,
        guards=Guards(reserves_whole=False, indexes_by_piece=False, ends_receives=False),
        wire_profile=_WIRE_PROFILE,
    ),
)
