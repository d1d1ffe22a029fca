"""Whom the router turns away at once, because others wait already: the request fails, and was never dispatched.

What has been let in is never shed later. A retry is no new request.
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class AdmissionLimits(Value, frozen=True, gc=False):
    """Bounds; None is none."""

    max_inflight: int | None = None
    """Requests that are open, all together."""
    max_queue_tokens: int | None = None
    """Prompt tokens of open prefill legs for each prefill engine that is up. A single prompt may be longer."""

    def refusal(self, prompt_tokens: int, inflight: int, queue_tokens: int, engines: int) -> str:
        """Why a request with that prompt is turned away; "" if it is not."""
        if self.max_inflight is not None and inflight >= self.max_inflight:
            return "shed: too many requests in flight"
        bound = self.max_queue_tokens
        if bound is not None and queue_tokens and queue_tokens + prompt_tokens > bound * engines:
            return "shed: too many prompt tokens in the queue"
        return ""
