"""`vllm-stock` simulated: undisturbed it moves what vllm-compat moves; disturbed, it still comes to an end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pdflow.scenario import load
from pdflow_sim.run import RunOptions, prepare, run
from pdflow_sim.world import World

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def played(example: str, *overrides: str, fails_one_of: int = 0) -> World:
    scenario = load(EXAMPLES / f"{example}.toml", overrides=("workload.requests=200", *overrides))
    undisturbed = not fails_one_of
    world, oracle = prepare(scenario, RunOptions(drain=True, quiet=True, check_invariants=undisturbed), [])
    asked = Counter[str]()

    def fails(_: object) -> bool:
        asked["anything"] += 1
        return asked["anything"] % fails_one_of == 3

    world.fabric.fails = None if undisturbed else fails
    run(world, oracle, drain=True)
    return world


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("example", ["reference", "shared-link"])
def test_undisturbed_it_is_vllm_compat(example: str, method: str, dispatch: str) -> None:
    both = []
    for dialect in ("vllm-compat", "vllm-stock"):
        chosen = (f"transfer.dialect={dialect}", f"transfer.method={method}", f"router.dispatch={dispatch}")
        world = played(example, *chosen)
        records = world.records
        both.append((records.outcome, records.output_tokens, world.totals.bytes_moved, world.totals.transfers))
        assert set(records.outcome) == {"completed"}
    assert both[0] == both[1]


def test_a_run_in_which_requests_hang_ends_with_the_client_timeouts() -> None:
    """Nothing of stock's own ends them: the deadline is the client's, and the blocks of some are never free again."""
    world = played(
        "reference", "transfer.dialect=vllm-stock", "transfer.deadline_s=50", "router.max_attempts=1", fails_one_of=17
    )
    outcomes = Counter(world.records.outcome)
    assert set(outcomes) == {"completed", "failed"}
    assert Counter(world.records.reason)["deadline"] > 5
    assert any(node.scheduler.endpoint.cells for node in world.decodes)
