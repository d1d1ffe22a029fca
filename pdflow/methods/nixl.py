"""NIXL push and pull (PR #35264, vLLM 0.32.0): all layers at once, from blocks to blocks, one-sided."""

from __future__ import annotations

from pdflow.methods.method import Method

NIXL_PUSH = Method(
    name="nixl-push",
    summary="P writes its blocks into D's blocks after D has sent P their addresses",
    source="PR #35264",
    hybrid=True,
    initiator="D registers, P writes",
    connector="vllm-nixl",
    back_pressure="P holds blocks for a lease of 30 s; D limits the share of its pool that one P may hold",
    on_loss="the request fails, is retried, or D computes its prompt, as [router] sets",
    limits="no pipeline stages at D",
    other_dialects=("vllm-compat", "vllm-stock"),
)
NIXL_PULL = Method(
    name="nixl-pull",
    summary="D reads P's blocks into its own blocks after P's answer has named them",
    source="PR #35264",
    pulls=True,
    hybrid=True,
    initiator="D reads",
    connector="vllm-nixl",
    back_pressure="P holds blocks for a lease of 30 s, which D renews",
    on_loss="the request fails, is retried, or D computes its prompt, as [router] sets",
    limits="the decode leg waits for the prefill leg",
    other_dialects=("vllm-compat", "vllm-stock"),
)
