"""Mooncake in vLLM: the pipe with a lookup buffer (PR #10884), and the V1 connector.

V0: P inserts a prompt's KV into a buffer, D selects and drops it; each tensor goes through host memory on both sides.
As published, keys, values and hidden states are sent one after the other. Each is copied out after the step that P's
GPU computes. One thread pickles it and another unpickles it, and D's engine waits until all have arrived.

V1: D sends a message that names its blocks, and one of P's worker threads writes them and waits for the end.
"""

from __future__ import annotations

from typing import Final

from pdflow.methods.method import Hop, MemoryKind, Method, PipelinePolicy, Turns
from pdflow.methods.wire_profile import LEASE_WORD, UNASKED, Occasion, ProfileMessage, Side, WireProfile

NUM_WORKERS: Final = 10
"""Sender threads of a P rank, unless a scenario sets another number: vLLM's default."""


def _pulled(name: str, by: Side, when: Occasion) -> tuple[ProfileMessage, ProfileMessage]:
    """A tensor of the pipe: its address and length, two integers of 64 bits, and an ACK when it has been pulled."""
    behind = Occasion.BEHIND if when is Occasion.PIECE else when
    other = Side.D if by is Side.P else Side.P
    return ProfileMessage(name, by, when, num_bytes=16), ProfileMessage("ACK", other, behind, waits=False, num_bytes=3)


_PIPE = WireProfile(
    messages=(
        # The engine that moves bytes contacts the other's Transfer Engine when it first does.
        ProfileMessage("handshake", Side.D, Occasion.CONTACT),
        *_pulled("signal", Side.D, Occasion.REQUEST),
        *_pulled("tokens", Side.D, Occasion.REQUEST),
        *_pulled("roi", Side.D, Occasion.REQUEST),
        *_pulled("tokens", Side.P, Occasion.REQUEST),
        *_pulled("roi", Side.P, Occasion.REQUEST),
        *_pulled("address and length", Side.P, Occasion.PIECE),
    ),
    # P drops KV when it has sent it; the last ACK is pdflow's TAKEN.
    silent=UNASKED | {LEASE_WORD, "TAKEN"},
)
_BOOTSTRAPPED = WireProfile(
    messages=(
        ProfileMessage("GET /query", Side.D, Occasion.CONTACT),
        ProfileMessage("handshake", Side.P, Occasion.CONTACT),
        ProfileMessage("MooncakeXferMetadata", Side.D, Occasion.REQUEST, frame="REG"),
        ProfileMessage("MooncakeXferResponse", Side.P, Occasion.CLOSING, frame="DONE"),
    ),
    silent=UNASKED | {"REG_ACK"},
    prefill_leg="transfer_id",
    decode_leg="transfer_id, remote_engine_id, remote_bootstrap_addr",
)

MOONCAKE_V0 = Method(
    name="mooncake-v0",
    summary="P inserts KV into a lookup buffer, and D selects from it, through host memory on both sides",
    source="PR #10884",
    pulls=True,
    initiator="D selects and drops",
    p_memory=MemoryKind.LOOKUP,
    staging=Hop.D2D,
    hops=(Hop.D2H, Hop.WIRE, Hop.H2D),
    back_pressure="if the lookup buffer is full, P's next step waits",
    on_loss="as nixl-pull; as published, D computes the prompt",
    limits="as published, one pair of engines of equal tensor-parallel sizes; one transfer at a time on each side",
    strict=PipelinePolicy(sending_lanes=1, receiving_lanes=1),
    published=PipelinePolicy(
        equal_tp=True,
        one_pair=True,
        prefill_waits=True,
        decode_waits=True,
        prompts_first=True,
        sending_lanes=1,
        receiving_lanes=1,
        turns=Turns.PIECE,
        tensors=3,
        in_stream=True,
        pickles=True,
        hidden_states=True,
        wire_profile=_PIPE,
    ),
)
MOONCAKE_V1 = Method(
    name="mooncake-v1",
    summary="D sends its block ids to P, and one of P's workers writes the blocks",
    source="vLLM 0.32.0, after PR #10884",
    initiator="D asks, P writes",
    back_pressure="P has num_workers workers, each busy until its WRITE has ended; a request fails after 480 s",
    on_loss="as nixl-push",
    limits="pipeline parallelism only at P",
    has_workers=True,
    connector="vllm-mooncake",
    strict=PipelinePolicy(sending_lanes=NUM_WORKERS),
    published=PipelinePolicy(sending_lanes=NUM_WORKERS, wire_profile=_BOOTSTRAPPED),
)
