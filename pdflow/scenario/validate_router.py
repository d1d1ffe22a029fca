"""What the keys of [router] must be to each other and to the engines: rules as in `validate`."""

from __future__ import annotations

from collections.abc import Iterator

from pdflow.scenario.convert import Complaint
from pdflow.scenario.router_schema import Router

ONLY_OF = {
    "prefix_weight": "prefix-aware",
    "prefix_memory_tokens": "prefix-aware",
    "affinity_most_load": "session-affinity",
}
"""Keys that say something to one policy alone."""


def check_router(router: Router) -> Iterator[Complaint]:
    """What is wrong within the table."""
    for key, policy in ONLY_OF.items():
        if getattr(router, key) is not None and policy not in router.policies:
            yield Complaint(("router", key), f"says something of {policy} only, and no engine is chosen by that")
