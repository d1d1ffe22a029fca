"""Admission limits of the router: a request beyond them fails at once and is never dispatched.

An admitted request is never shed later. A retry is no new request.
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class AdmissionLimits(Value, frozen=True, gc=False):
    """The bounds on open requests and queued tokens; None is no bound."""

    max_inflight: int | None = None
    """The most open requests, all together."""
    max_queue_tokens: int | None = None
    """The most prompt tokens of open prefill legs for each prefill engine that is up. A single prompt may be longer."""

    def refusal(self, prompt_tokens: int, inflight: int, queue_tokens: int, engines: int) -> str:
        """Return the reason why a request with that prompt is rejected; "" if it is admitted."""
        if self.max_inflight is not None and inflight >= self.max_inflight:
            return "shed: too many requests in flight"
        bound = self.max_queue_tokens
        if bound is not None and queue_tokens and queue_tokens + prompt_tokens > bound * engines:
            return "shed: too many prompt tokens in the queue"
        return ""
