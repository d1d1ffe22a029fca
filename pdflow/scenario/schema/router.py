"""The schema of [router]: the choice of engines, the order in which legs start, and the retries after a failure.

The other tables, and how to read this class, are in `scenario.py`; what keys must be to each other is in
`validation/router.py`. What a policy does is in docs/routing.md.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
from attrs import field

from pdflow.methods.catalogue import METHODS
from pdflow.scenario.schema.fields import AT_LEAST_ONE, NOT_NEGATIVE, TIMER, WholeOrAuto, field_doc
from pdflow.scenario.schema.transfer import Transfer

Policy: TypeAlias = Literal["round-robin", "least-loaded", "two-choices", "prefix-aware", "session-affinity"]


@attrs.frozen(kw_only=True)
class RouterConfig:
    """[router]: which engines serve a request, and in which order its two legs start."""

    policy: Policy = field(default="round-robin", metadata=field_doc("how a request's engines are chosen"))
    prefill_policy: Policy | None = field(
        default=None, metadata=field_doc("how its prefill engine is chosen; as `policy` says if absent")
    )
    decode_policy: Policy | None = field(
        default=None, metadata=field_doc("how its decode engine is chosen; as `policy` says if absent")
    )
    prefix_weight: float | None = field(
        default=None,
        metadata=field_doc(
            "prefix-aware: how many waiting tokens one token is worth that an engine has already; 1 if absent",
            NOT_NEGATIVE,
        ),
    )
    prefix_memory_tokens: int | None = field(
        default=None,
        metadata=field_doc(
            "prefix-aware: prompt tokens that the router remembers of each engine; what its KV cache holds if absent",
            AT_LEAST_ONE,
        ),
    )
    affinity_most_load: float | None = field(
        default=None,
        metadata=field_doc(
            "session-affinity: a session leaves an engine that has this many times its share of open legs; 1.25 if "
            "absent",
            AT_LEAST_ONE,
        ),
    )
    dispatch: Literal["sequential", "concurrent"] = field(
        default="sequential",
        metadata=field_doc(
            "the decode leg starts after the prefill leg's reply, or with it (a pull always waits for the reply)"
        ),
    )
    first_token: Literal["decode", "prefill"] = field(
        default="decode", metadata=field_doc("whose first token the client gets: TTFT ends with it")
    )
    disaggregate_above_tokens: WholeOrAuto | None = field(
        default=None,
        metadata=field_doc(
            "prompts of which the decode engine lacks no more than this are computed there; auto: what the engines' "
            "costs make best; none are if absent",
            NOT_NEGATIVE,
        ),
    )
    on_failure: Literal["fail", "retry", "recompute"] | None = field(
        default=None,
        metadata=field_doc(
            "what follows a failed attempt: nothing, another one elsewhere, or one on a decode engine alone; retry if "
            "absent, as far as max_attempts allows"
        ),
    )
    max_attempts: int | None = field(
        default=None,
        metadata=field_doc(
            "attempts of a request, the first included; if absent 2 where on_failure says what follows, else 1",
            AT_LEAST_ONE,
        ),
    )
    hedge_after_s: float | None = field(
        default=None,
        metadata=field_doc(
            "a request that has no token by then gets a second attempt beside the first, elsewhere; the first to "
            "stream a token is the answer",
            TIMER,
        ),
    )
    heartbeat_s: float | None = field(
        default=None,
        metadata=field_doc(
            "engines report to the router so often, and by nothing else does it know who is up; if absent it sees them "
            "go down and come up, but with p2p-nccl-* as published they report every 3 s",
            TIMER,
        ),
    )
    silent_after_s: float | None = field(
        default=None,
        metadata=field_doc(
            "so long after its last report an engine gets no requests; 5/3 of heartbeat_s if absent: 5 s for 3 s", TIMER
        ),
    )
    max_inflight: int | None = field(
        default=None,
        metadata=field_doc("requests that are open; who comes when there are so many is shed", AT_LEAST_ONE),
    )
    max_queue_tokens: int | None = field(
        default=None,
        metadata=field_doc(
            "prompt tokens sent to prefill engines and not answered yet, for each that is up; who would exceed it is "
            "shed",
            AT_LEAST_ONE,
        ),
    )

    @property
    def policies(self) -> tuple[Policy, Policy]:
        """The policies by which the prefill and the decode engine are chosen."""
        return self.prefill_policy or self.policy, self.decode_policy or self.policy

    @property
    def attempts(self) -> int:
        """The most attempts of a request."""
        return self.max_attempts or (2 if self.on_failure in ("retry", "recompute") else 1)

    def reports_every_s(self, transfer: Transfer) -> float | None:
        """Return how often engines report to the router: `heartbeat_s`, or as the method's original; None if never."""
        return self.heartbeat_s or METHODS[transfer.method].pipeline_policy(transfer.dialect).heartbeat_s

    def __str__(self) -> str:
        p, d = self.policies
        settings = [p if p == d else f"{p} for P, {d} for D", f"{self.dispatch} dispatch"]
        if self.disaggregate_above_tokens is not None:
            most = self.disaggregate_above_tokens
            settings.append(
                "D computes " + ("what is best" if most == "auto" else f"up to {most:,} tokens") + " itself"
            )
        if self.attempts > 1:
            settings.append(f"{self.attempts} attempts" + (", by D alone" if self.on_failure == "recompute" else ""))
        if self.hedge_after_s is not None:
            settings.append(f"hedged after {self.hedge_after_s:g} s")
        if self.heartbeat_s is not None:
            settings.append(f"heartbeats every {self.heartbeat_s:g} s")
        if self.max_inflight is not None:
            settings.append(f"at most {self.max_inflight:,} in flight")
        if self.max_queue_tokens is not None:
            settings.append(f"at most {self.max_queue_tokens:,} tokens waiting for each P")
        return ", ".join(settings)
