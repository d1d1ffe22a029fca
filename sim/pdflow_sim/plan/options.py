"""The options of a cluster that `pdflow plan` can search, each with the keys of a scenario that it sets.

Numbers and sizes of engines are not here: they make the cluster itself (`designs`, `space`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs

from pdflow.errors import ScenarioError
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.scenario import ResolvedScenario, Role

Kind: TypeAlias = Literal["aggregated", "disaggregated"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@attrs.frozen
class Option:
    """One option: `key` is a dotted key of the scenario or, with `roles`, a key of the pools of these roles.

    `values` are searched in their order.
    """

    key: str
    values: tuple[Any, ...]
    summary: str
    kinds: tuple[Kind, ...] = KINDS
    roles: tuple[Role, ...] = ()

    def own(self, scenario: ResolvedScenario) -> Any:
        """Return the scenario's own value."""
        if self.roles:
            return next((getattr(pool, self.key) for pool in scenario.pools if pool.role in self.roles), None)
        table, _, name = self.key.partition(".")
        return getattr(getattr(scenario, table), name)

    def refusals(self, scenario: Scenario, values: Iterable[Any]) -> Iterator[str]:
        """Yield why values cannot be ones of this option, as the scenario's loader says it."""
        pools = scenario.resolved.pools
        named = [f"pool.{pool.name}.{self.key}" for pool in pools if pool.role in self.roles]
        keys = (named or [f"pool.{pools[0].name}.{self.key}"]) if self.roles else [self.key]
        for value in values:
            try:
                scenario.with_(dict.fromkeys(keys, value))
            except ScenarioError as error:
                yield f"{value}: {error.problems[0].message}"


OPTIONS: Final[Mapping[str, Option]] = {
    "chunk": Option(
        "max_num_batched_tokens",
        (512, 1024, 2048, 4096, 8192, 16384),
        "tokens in a step of engines that compute prompts (max_num_batched_tokens)",
        roles=("prefill", "aggregated"),
    ),
    "policy": Option(
        "router.policy",
        ("round-robin", "least-loaded", "prefix-aware"),
        "how the router chooses engines",
    ),
    "method": Option(
        "transfer.method",
        ("nixl-push", "nixl-pull"),
        "transfer method",
        kinds=("disaggregated",),
    ),
    "block_size": Option(
        "block_size",
        (16, 32, 64, 128),
        "tokens in a KV block, at P and D alike",
        roles=("prefill", "decode", "aggregated"),
        kinds=("disaggregated",),
    ),
    "dispatch": Option(
        "router.dispatch",
        ("sequential", "concurrent"),
        "whether both legs of a request start together",
        kinds=("disaggregated",),
    ),
    "conditional": Option(
        "router.disaggregate_above_tokens",
        (None, "auto"),
        "whether decode engines compute short prompts themselves (disaggregate_above_tokens)",
        kinds=("disaggregated",),
    ),
}
"""By the name that `--search` knows, in the order in which they are searched."""
