"""What [router] may say, and what each thing that it may not is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario import load
from pdflow.scenario.router_schema import Router
from sim.run import _content

REFERENCE = Path(__file__).resolve().parents[2] / "examples/reference.toml"


def refused(*overrides: str) -> list[str]:
    """What is wrong, without where: of an override that is the override itself."""
    with pytest.raises(ScenarioError) as caught:
        load(REFERENCE, overrides=overrides)
    return [problem.path + ": " + problem.message for problem in caught.value.problems]


def test_each_leg_may_have_a_policy_of_its_own() -> None:
    says = load(REFERENCE, overrides=["router.policy=two-choices", "router.decode_policy=session-affinity"]).router
    assert says.policies == ("two-choices", "session-affinity")
    assert str(says) == "two-choices for P, session-affinity for D, concurrent dispatch"
    assert str(Router()) == "round-robin, sequential dispatch"


@pytest.mark.parametrize(
    ("key", "value", "policy"),
    [
        ("prefix_weight", "2", "prefix-aware"),
        ("prefix_memory_tokens", "100000", "prefix-aware"),
        ("affinity_most_load", "1.5", "session-affinity"),
    ],
)
def test_a_key_of_another_policy_is_refused(key: str, value: str, policy: str) -> None:
    assert refused(f"router.{key}={value}") == [
        f"router.{key}: says something of {policy} only, and no engine is chosen by that"
    ]
    says = load(REFERENCE, overrides=[f"router.{key}={value}", f"router.prefill_policy={policy}"]).router
    assert getattr(says, key) == float(value)


def test_a_share_below_one_cannot_be_held() -> None:
    assert refused("router.policy=session-affinity", "router.affinity_most_load=0.5") == [
        "router.affinity_most_load: is 0.5, expected a number of at least 1"
    ]


def test_what_the_router_leaves_unsaid_does_not_make_another_scenario() -> None:
    assert set(_content(load(REFERENCE))["router"]) == {"policy", "dispatch", "first_token", "max_attempts"}
