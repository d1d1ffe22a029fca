"""What [router] may say, and what each thing that it may not is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario import load
from pdflow.scenario.reading.content import content_of
from pdflow.scenario.schema.jsonschema import schema_json
from pdflow.scenario.schema.router import RouterConfig
from pdflow.scenario.schema.scale import Scale

REFERENCE = Path(__file__).resolve().parents[2] / "examples/reference.toml"


def refused(*overrides: str) -> list[str]:
    """What is wrong, without where: of an override that is the override itself."""
    with pytest.raises(ScenarioError) as caught:
        load(REFERENCE, overrides=overrides)
    return [problem.path + ": " + problem.message for problem in caught.value.problems]


def test_each_leg_may_have_a_policy_of_its_own() -> None:
    router = load(REFERENCE, overrides=["router.policy=two-choices", "router.decode_policy=session-affinity"]).router
    assert router.policies == ("two-choices", "session-affinity")
    assert str(router) == "two-choices for P, session-affinity for D, concurrent dispatch, 2 attempts"
    assert str(RouterConfig()) == "round-robin, sequential dispatch"


def test_a_router_config_is_printed_in_one_line() -> None:
    config = RouterConfig(
        policy="two-choices",
        disaggregate_above_tokens="auto",
        on_failure="recompute",
        hedge_after_s=2.5,
        heartbeat_s=3,
        max_inflight=1000,
        max_queue_tokens=50_000,
    )
    assert str(config) == (
        "two-choices, sequential dispatch, D computes what is best itself, 2 attempts, by D alone, hedged after 2.5 s, "
        "heartbeats every 3 s, at most 1,000 in flight, at most 50,000 tokens waiting for each P"
    )
    load_scale = Scale(pool="p", target_queue=2, max_replicas=4, start_lag_s=10)
    assert str(load_scale) == "p: 1 to 4, by load, for 2 open legs each, 10 s to start"
    assert str(Scale(pool="d", at_s=5, replicas=3)) == "d: 3 from 5 s on"


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
        f"router.{key}: has no effect: it is read by policy {policy} only, and no policy is {policy}"
    ]
    router = load(REFERENCE, overrides=[f"router.{key}={value}", f"router.prefill_policy={policy}"]).router
    assert getattr(router, key) == float(value)


def test_a_share_below_one_cannot_be_held() -> None:
    assert refused("router.policy=session-affinity", "router.affinity_most_load=0.5") == [
        "router.affinity_most_load: is 0.5, expected a number of at least 1"
    ]


def test_omitted_router_keys_do_not_change_the_content() -> None:
    assert set(content_of(load(REFERENCE))["router"]) == {"policy", "dispatch", "first_token", "max_attempts"}


@pytest.mark.parametrize(
    ("overrides", "attempts"),
    [
        ([], 2),
        (["pool.prefill.replicas=1"], 2),
        (["pool.prefill.replicas=1", "pool.decode.replicas=1"], 1),
        (["transfer.dialect=as-published"], 1),
        (["router.on_failure=fail"], 1),
        (["router.on_failure=retry"], 2),
        (["router.on_failure=recompute"], 2),
        (["router.on_failure=recompute", "router.max_attempts=4"], 4),
        (["router.max_attempts=3"], 3),
    ],
)
def test_how_many_attempts_there_are(overrides: list[str], attempts: int) -> None:
    """By default another one where another engine can make it."""
    assert load(REFERENCE, overrides=overrides).router.attempts == attempts


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["router.on_failure=fail", "router.max_attempts=2"],
            'router.max_attempts: is 2, expected 1 with on_failure = "fail"',
        ),
        (
            ["router.on_failure=recompute", "router.max_attempts=1"],
            'router.max_attempts: is 1, expected at least 2 with on_failure = "recompute"',
        ),
        (
            ["router.disaggregate_above_tokens=often"],
            'router.disaggregate_above_tokens: is "often", expected an integer or "auto"',
        ),
        (
            ["router.disaggregate_above_tokens=-1"],
            "router.disaggregate_above_tokens: is -1, expected a number of at least 0",
        ),
        (
            ["router.disaggregate_above_tokens=1.5"],
            "router.disaggregate_above_tokens: is 1.5, expected an integer",
        ),
        (
            ["router.hedge_after_s=0"],
            "router.hedge_after_s: is 0, expected a number of at least 1e-06 and at most 1,000,000",
        ),
        (
            ["router.heartbeat_s=0"],
            "router.heartbeat_s: is 0, expected a number of at least 1e-06 and at most 1,000,000",
        ),
        (
            ["router.silent_after_s=5"],
            "router.silent_after_s: has no effect without heartbeats: set heartbeat_s",
        ),
        (
            ["router.heartbeat_s=3", "router.silent_after_s=3"],
            "router.silent_after_s: is 3, expected more than heartbeat_s, which is 3: else running "
            "engines count as silent",
        ),
        (["router.max_inflight=0"], "router.max_inflight: is 0, expected a number of at least 1"),
    ],
)
def test_what_cannot_be(overrides: list[str], expected: str) -> None:
    assert refused(*overrides) == [expected]


def test_heartbeats_default_to_those_of_the_original() -> None:
    published = ["transfer.method=p2p-nccl-put-async", "transfer.dialect=as-published"]
    for overrides, every_s in (
        ([], None),
        (published[:1], None),
        (published, 3),
        ([*published, "router.heartbeat_s=1"], 1),
    ):
        scenario = load(REFERENCE, overrides=overrides)
        assert scenario.router.reports_every_s(scenario.transfer) == every_s
    assert load(REFERENCE, overrides=[*published, "router.silent_after_s=4"]).router.silent_after_s == 4
    assert refused(*published, "router.silent_after_s=2")[0].startswith(
        "router.silent_after_s: is 2, expected more than"
    )


def test_a_number_or_auto() -> None:
    for value, found in (("0", 0), ("256", 256), ("auto", "auto")):
        router = load(REFERENCE, overrides=[f"router.disaggregate_above_tokens={value}"]).router
        assert router.disaggregate_above_tokens == found
    key = schema_json()["properties"]["router"]["properties"]["disaggregate_above_tokens"]
    assert key["oneOf"] == [{"type": "integer"}, {"enum": ["auto"]}]


def test_only_decode_engines_compute_prompts_of_their_own() -> None:
    alone = ['pool=[{name="w",role="aggregated",gpu="h100-sxm"}]']
    overrides = ["router.disaggregate_above_tokens=auto", "router.on_failure=recompute"]
    assert refused(*alone, *overrides) == [
        "router.disaggregate_above_tokens: needs a decode pool, and the scenario has none",
        "router.on_failure: needs a decode pool, and the scenario has none",
    ]


# [[scale]]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (
            '{ pool = "prefil", at_s = 1, replicas = 2 }',
            '[0].pool: is "prefil", expected the name of a pool: prefill, ',
        ),
        (
            '{ pool = "prefill", at_s = 1 }',
            "[0]: sets at_s, expected at_s and replicas (scheduled), or target_queue and max_",
        ),
        (
            '{ pool = "prefill" }',
            "[0]: sets none of its keys, expected at_s and replicas (scheduled), or target_queue",
        ),
        (
            '{ pool = "prefill", at_s = 1, replicas = 2, target_queue = 3 }',
            "[0]: sets at_s, replicas and target_queue, expected at_s and replicas (scheduled), or target_queue",
        ),
        (
            '{ pool = "prefill", target_queue = 3, max_replicas = 2, min_replicas = 3 }',
            "[0]: max_replicas is 2, expected at least min_replicas, 3",
        ),
        ('{ pool = "prefill", at_s = 1, replicas = 0 }', "[0].replicas: is 0, expected a number of at least 1"),
        (
            '{ pool = "decode", at_s = 1, replicas = 2 }, { pool = "decode", target_queue = 3, max_replicas = 2 }',
            "[1]: scales decode by load, and another [[scale]] sets its size too; keep one of them",
        ),
    ],
)
def test_what_a_scale_cannot_be(scale: str, expected: str) -> None:
    [error] = refused(f"scale=[{scale}]")
    assert error.startswith(f"scale{expected}")


def test_a_scale_is_written_as_an_array() -> None:
    assert refused('scale={ pool = "decode", at_s = 1, replicas = 2 }') == [
        "scale: is a table, expected an array of tables: write [[scale]]"
    ]


def test_a_location_in_a_file_is_its_line(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(REFERENCE.read_text() + '\n[[scale]]\npool = "decode"\nat_s = 1\nreplicas = 2.5\n')
    with pytest.raises(ScenarioError) as caught:
        load(file)
    line = file.read_text().split("\n").index("replicas = 2.5") + 1
    assert str(caught.value) == f"{file}:{line}: scale[0].replicas: is 2.5, expected an integer"
