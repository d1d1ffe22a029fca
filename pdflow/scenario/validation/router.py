"""The rules between the keys of [router] and [[scale]], and between these and the engines: rules as in `validate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdflow.scenario.reading.convert import Complaint, did_you_mean
from pdflow.scenario.schema.router import RouterConfig
from pdflow.scenario.schema.scale import Scale
from pdflow.scenario.schema.scenario import Pool
from pdflow.scenario.schema.transfer import Transfer

ONLY_OF = {
    "prefix_weight": "prefix-aware",
    "prefix_memory_tokens": "prefix-aware",
    "affinity_most_load": "session-affinity",
}
"""Keys that only one policy reads."""


def check_router(router: RouterConfig, transfer: Transfer | None, pools: Sequence[Pool] | None) -> Iterator[Complaint]:
    """Check [router]. `transfer` is None if it is not sound, `pools` if they are not all."""
    if transfer is not None and router.silent_after_s is not None:
        yield from _silence(router.silent_after_s, router.reports_every_s(transfer))
    for key, policy in ONLY_OF.items():
        if getattr(router, key) is not None and policy not in router.policies:
            yield Complaint(
                ("router", key), f"has no effect: it is read by policy {policy} only, and no policy is {policy}"
            )
    attempts = router.max_attempts
    if attempts is not None and router.on_failure is not None and (attempts > 1) is (router.on_failure == "fail"):
        expected = "1" if router.on_failure == "fail" else "at least 2"
        yield Complaint(
            ("router", "max_attempts"), f'is {attempts}, expected {expected} with on_failure = "{router.on_failure}"'
        )
    if pools is None:
        return
    roles = {pool.role for pool in pools}
    if router.disaggregate_above_tokens == "auto" and any(pool.attention_replicas > 1 for pool in pools):
        expected = "expected a number of tokens with dp_attention: auto does not know which replica a prompt is given"
        yield Complaint(("router", "disaggregate_above_tokens"), f'is "auto", {expected}')
    alone: dict[str, object] = {"disaggregate_above_tokens": router.disaggregate_above_tokens}
    if router.on_failure == "recompute":
        alone["on_failure"] = router.on_failure
    for key, value in alone.items():
        if value is not None and "decode" not in roles:
            yield Complaint(("router", key), "needs a decode pool, and the scenario has none")


def _silence(silent_after_s: float, every_s: float | None) -> Iterator[Complaint]:
    at = ("router", "silent_after_s")
    if every_s is None:
        yield Complaint(at, "has no effect without heartbeats: set heartbeat_s")
    elif silent_after_s <= every_s:
        expected = f"expected more than heartbeat_s, which is {every_s:g}: else running engines count as silent"
        yield Complaint(at, f"is {silent_after_s:g}, {expected}")


def check_scales(scales: Sequence[Scale | None], pools: Sequence[Pool] | None) -> Iterator[Complaint]:
    """Check all [[scale]] tables. `pools` is None if they are not all sound: then no name can be checked."""
    for index, scale in enumerate(scales):
        if scale is None:
            continue
        at = ("scale", index)
        names = [] if pools is None else [pool.name for pool in pools]
        if pools is not None and scale.pool not in names:
            hint = did_you_mean(scale.pool, names)
            expected = f"expected the name of a pool: {', '.join(names)}{hint}"
            yield Complaint((*at, "pool"), f'is "{scale.pool}", {expected}')
        others = [other for other in scales if other is not None and other is not scale and other.pool == scale.pool]
        if scale.target_queue is not None and others:
            yield Complaint(
                at, f"scales {scale.pool} by load, and another [[scale]] sets its size too; keep one of them"
            )
