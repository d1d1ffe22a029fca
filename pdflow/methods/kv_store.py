"""A store between P and D (PR #12957, and Mooncake Store): P puts a prompt's KV there, D gets it from there.

The store is D towards P, and P towards D: what PutStart asks for is a registration, PutEnd is its commit, and what
GetReplicaList gives is a lease. So P may die when it has put, and neither side needs to know the other. The original's
router puts the keys to store and to load in both legs; ours need not, as whoever has the prompt makes the same
(`store/keys.py`). As published, puts and gets hold the engines up, one prompt that cannot be got has D compute its
whole batch again, and each process salts its keys.
"""

from __future__ import annotations

from pdflow.methods.method import Method, PipelinePolicy
from pdflow.methods.wire_profile import LEASE_WORD, UNASKED, Occasion, ProfileMessage, Side, WireProfile

_WIRE_PROFILE = WireProfile(
    messages=(
        ProfileMessage("handshake", Side.P, Occasion.CONTACT),
        ProfileMessage("handshake", Side.D, Occasion.CONTACT),
        # PutStart is a call of the store's in either dialect (`sim/pdflow_sim/nodes/store_node.py`), and REG what it
        # comes back with.
        ProfileMessage("PutStart's answer", Side.D, Occasion.REQUEST, frame="REG"),
        ProfileMessage("PutEnd", Side.P, Occasion.CLOSING, frame="DONE"),
        ProfileMessage("GetReplicaList", Side.D, Occasion.REQUEST),
        ProfileMessage("replicas", Side.P, Occasion.REQUEST),
    ),
    # TAKEN is ours, and told: there a lease is over when its time is.
    silent=UNASKED | {"REG_ACK", LEASE_WORD},
    prefill_leg="kvcache_store_keys",
    decode_leg="kvcache_load_keys",
)

KV_STORE = Method(
    name="kv-store",
    summary="P puts a prompt's KV into a store, D gets it from there",
    source="PR #12957, Mooncake Store",
    pulls=True,
    stores=True,
    initiator="P puts, D gets",
    back_pressure="the store evicts what nobody holds; what finds no room waits for it, in P's blocks",
    on_loss="the request fails, or is tried again, or D computes it: that request alone",
    limits="a prompt's KV must fit one node of the store",
    strict=PipelinePolicy(),
    published=PipelinePolicy(
        prefill_waits=True,
        decode_waits=True,
        hidden_states=True,
        fails_whole_batches=True,
        salts_keys=True,
        wire_profile=_WIRE_PROFILE,
    ),
)
