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

    policy: Policy = field(default="round-robin", metadata=field_doc("how the router chooses a request's engines"))
    prefill_policy: Policy | None = field(
        default=None, metadata=field_doc("how the router chooses the prefill engine; default: `policy`")
    )
    decode_policy: Policy | None = field(
        default=None, metadata=field_doc("how the router chooses the decode engine; default: `policy`")
    )
    prefix_weight: float | None = field(
        default=None,
        metadata=field_doc(
            "prefix-aware: number of queued tokens that outweigh one prompt token in the engine's cache; default: 1",
            NOT_NEGATIVE,
        ),
    )
    prefix_memory_tokens: int | None = field(
        default=None,
        metadata=field_doc(
            "prefix-aware: number of prompt tokens that the router remembers for each engine; default: the "
            "engine's KV capacity",
            AT_LEAST_ONE,
        ),
    )
    affinity_most_load: float | None = field(
        default=None,
        metadata=field_doc(
            "session-affinity: a session moves away from an engine with more than this many times the mean "
            "number of open legs; default: 1.25",
            AT_LEAST_ONE,
        ),
    )
    dispatch: Literal["sequential", "concurrent"] = field(
        default="sequential",
        metadata=field_doc(
            "sequential: the decode leg starts after the prefill leg's answer; concurrent: both legs start "
            "together (pull methods always wait for the answer)"
        ),
    )
    first_token: Literal["decode", "prefill"] = field(
        default="decode", metadata=field_doc("which engine's first token the client receives; TTFT ends with it")
    )
    disaggregate_above_tokens: WholeOrAuto | None = field(
        default=None,
        metadata=field_doc(
            "a decode engine computes a prompt itself if it lacks at most this many of its tokens; auto: "
            "whichever the cost models predict to be faster; default: never",
            NOT_NEGATIVE,
        ),
    )
    on_failure: Literal["fail", "retry", "recompute"] | None = field(
        default=None,
        metadata=field_doc(
            "after a failed attempt: fail the request, retry on other engines, or recompute on a decode "
            "engine alone; default: retry, up to max_attempts (with kv-store the last attempt is recomputed)"
        ),
    )
    max_attempts: int | None = field(
        default=None,
        metadata=field_doc(
            "maximum number of attempts per request, including the first; default: 2 with more than one engine of a "
            "kind or on_failure retry or recompute, otherwise 1 (and with as-published and vllm-stock)",
            AT_LEAST_ONE,
        ),
    )
    resume: bool | None = field(
        default=None,
        metadata=field_doc(
            "after a failed attempt of which the client has received tokens: another attempt, within max_attempts, "
            "continues the answer behind them; false: the request fails; default: true"
        ),
    )
    hedge_after_s: float | None = field(
        default=None,
        metadata=field_doc(
            "start a second attempt on other engines if the client has no token after this time; the first "
            "attempt to stream a token wins, the other is cancelled",
            TIMER,
        ),
    )
    heartbeat_s: float | None = field(
        default=None,
        metadata=field_doc(
            "interval of the engines' heartbeats; the router then learns only from these which engines are "
            "up; default: the router sees engines stop and start without heartbeats (p2p-nccl-* "
            "as-published: 3 s)",
            TIMER,
        ),
    )
    silent_after_s: float | None = field(
        default=None,
        metadata=field_doc(
            "time without a heartbeat after which an engine gets no requests; default: 5/3 of heartbeat_s", TIMER
        ),
    )
    abandon_silent: bool | None = field(
        default=None,
        metadata=field_doc(
            "take back the requests of an engine that falls silent, as if it had died: they are retried or resumed; "
            "false: they continue; default: true (false with as-published)"
        ),
    )
    stalled_after_s: float | None = field(
        default=None,
        metadata=field_doc(
            "silence after which an engine that owes a prompt's KV, a first token or further tokens counts as stalled, "
            "although its connections are open; where it owes whole answers, time without a step; "
            "default: four times the longest silence that was usual lately, at least 5 s. An engine that serves others "
            "may pass one request over for four times as long",
            TIMER,
        ),
    )
    abandon_stalled: bool | None = field(
        default=None,
        metadata=field_doc(
            "take back the requests of a stalled engine, and those that hang at an engine which serves others, if "
            "another one can serve them: they are retried or resumed; default: true, within max_attempts (false with "
            "as-published, and in simulations without a pause fault)"
        ),
    )
    max_inflight: int | None = field(
        default=None,
        metadata=field_doc("maximum number of open requests; the router rejects further ones", AT_LEAST_ONE),
    )
    max_queue_tokens: int | None = field(
        default=None,
        metadata=field_doc(
            "maximum number of prompt tokens sent to prefill engines and not answered yet, per running "
            "engine; the router rejects requests that would exceed it",
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

    @property
    def resumes(self) -> bool:
        """Whether answers are resumed."""
        return self.resume is not False

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
