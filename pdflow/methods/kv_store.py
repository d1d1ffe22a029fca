"""A store between P and D (PR #12957, and Mooncake Store): P puts a prompt's KV there, D gets it from there.

The store is a D for P, and a P for D: PutStart is a registration, PutEnd is its commit, and GetReplicaList returns a
lease. So P may die after its put, and neither side needs to know the other. The original's router sends the keys to
store and to load in both legs. pdflow's router need not, because each process makes the same keys from the prompt
(`store/keys.py`). As published, puts and gets block the engines, D computes its whole batch again if it cannot get one
prompt, and each process salts its keys.
"""

from __future__ import annotations

from pdflow.methods.method import Method, PipelinePolicy
from pdflow.methods.wire_profile import LEASE_WORD, UNASKED, Occasion, ProfileMessage, Side, WireProfile

_WIRE_PROFILE = WireProfile(
    messages=(
        ProfileMessage("handshake", Side.P, Occasion.CONTACT),
        ProfileMessage("handshake", Side.D, Occasion.CONTACT),
        # PutStart is a call of the store in either dialect (`sim/pdflow_sim/nodes/store_node.py`), and REG is its
        # answer.
        ProfileMessage("PutStart's answer", Side.D, Occasion.REQUEST, frame="REG"),
        ProfileMessage("PutEnd", Side.P, Occasion.CLOSING, frame="DONE"),
        ProfileMessage("GetReplicaList", Side.D, Occasion.REQUEST),
        ProfileMessage("replicas", Side.P, Occasion.REQUEST),
    ),
    # TAKEN is pdflow's, and shown: the original's lease ends by time only.
    silent=UNASKED | {"REG_ACK", LEASE_WORD},
    prefill_leg="kvcache_store_keys",
    decode_leg="kvcache_load_keys",
)

KV_STORE = Method(
    name="kv-store",
    summary="P puts a prompt's KV into a store, and D gets it from the store",
    source="PR #12957, Mooncake Store",
    pulls=True,
    stores=True,
    initiator="P puts, D gets",
    back_pressure="the store evicts objects that no request holds; a prompt that does not fit waits in P's blocks",
    on_loss="the request fails, is retried, or D computes its prompt; no other request is affected",
    limits="a prompt's KV must fit one node of the store; as published, equal tensor-parallel sizes",
    strict=PipelinePolicy(),
    published=PipelinePolicy(
        equal_tp=True,
        prefill_waits=True,
        decode_waits=True,
        prompts_first=True,
        hidden_states=True,
        fails_whole_batches=True,
        salts_keys=True,
        wire_profile=_WIRE_PROFILE,
    ),
)
