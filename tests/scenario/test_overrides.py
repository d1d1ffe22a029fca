"""`--set` and `--seed`: what they reach, how values are read, and that their errors say which one was wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario import ResolvedScenario, load
from pdflow.scenario.schema.distributions import FixedLength

REFERENCE = Path(__file__).resolve().parents[2] / "examples/reference.toml"


def with_sets(*overrides: str, seed: int | None = None) -> ResolvedScenario:
    return load(REFERENCE, overrides=overrides, seed=seed)


def refusals(*overrides: str, seed: int | None = None) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        with_sets(*overrides, seed=seed)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("scenario.seed=7", "seed", 7),
        ("workload.requests=12", "workload.requests", 12),
        ("workload.arrival.rate_rps=2", "workload.arrival.rate_rps", 2.0),
        ("workload.input_tokens=64", "workload.input_tokens", FixedLength(tokens=64)),
        ("router.policy=least-loaded", "router.policy", "least-loaded"),
        ('router.policy="least-loaded"', "router.policy", "least-loaded"),
        ("network.bandwidth_bytes_per_s=inf", "network.bandwidth_bytes_per_s", None),
        ("network.bandwidth_bytes_per_s=12.5e9", "network.bandwidth_bytes_per_s", 12_500_000_000),
        ("network.preset=tcp-100g", "network.latency_s", 25e-6),
        ("slo.e2e_ms=9000", "slo.e2e_ms", 9000.0),
        (' slo . "e2e_ms" = 9000', "slo.e2e_ms", 9000.0),
        ("model.kv_dtype=fp8", "model.kv_bytes_per_value", 1),
        ("scenario.name=a=b", "name", "a=b"),
        ("scenario.name=", "name", "reference"),
    ],
)
def test_one_value(override: str, path: str, value: Any) -> None:
    found: Any = with_sets(override)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_pools_by_name() -> None:
    scenario = with_sets("pool.decode.replicas=2", "pool.prefill.gpu=h200", "pool.decode.gpu.ec=0.5")
    assert scenario.pool("decode").replicas == 2
    assert scenario.pool("prefill").replicas == 4
    assert scenario.pool("prefill").gpu.name == "h200"
    decode = scenario.pool("decode").gpu
    assert (decode.name, decode.ec) == ("h100-sxm", 0.5)


def test_later_ones_win_and_seed_wins_over_all() -> None:
    assert with_sets("router.max_attempts=2", "router.max_attempts=3").router.max_attempts == 3
    assert with_sets("scenario.seed=2", seed=9).seed == 9


def test_whole_tables_can_be_set() -> None:
    scenario = with_sets(
        'network.links=[{name="a", bandwidth_bytes_per_s=1e9}]',
        'network.paths=[{from="prefill",to="decode",via=["a"]}]',
    )
    assert scenario.network.paths[0].via == ("a",)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("pool.prefil.tp=2", "no pool named prefil, expected one of prefill, decode (did you mean prefill?)"),
        ("pool.decode=2", "pool.decode is a pool; name one of its keys, as in pool.decode.tp"),
        ("workload.requests.n=2", "workload.requests is 10000, so it has no key n"),
        ("workload.requests.n.m=2", "workload.requests is 10000, so it has no key n"),
        ("seed", "expected key=value, as in --set pool.decode.tp=2"),
        ("=3", '"" is not a key, expected a dotted one, as in pool.decode.tp'),
        ("a..b=3", '"a..b" is not a key, expected a dotted one, as in pool.decode.tp'),
        (
            "a=1\nb=3",
            "a: unknown table, expected one of scenario, workload, model, pool, transfer, network, router, slo",
        ),
        ("pool.decode.tpp=2", "pool.decode.tpp: unknown key (did you mean tp?)"),
        ("pool.decode.tp=two", 'pool.decode.tp: is "two", expected an integer'),
        ("pool=3", "pool: is 3, expected an array of tables"),
        ("workload.arrival.rate_rps=-1", "workload.arrival.rate_rps: is -1, expected a number above 0"),
        ("rooter.policy=round-robin", "rooter: unknown table (did you mean router?)"),
    ],
)
def test_errors_name_the_option_of_the_command_line(override: str, expected: str) -> None:
    assert f"--set {override}: {expected}" in "\n".join(refusals(override))


def test_errors_of_the_file_and_of_every_override_come_together(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(REFERENCE.read_text().replace("tp = 1", "tp = 0", 1))
    with pytest.raises(ScenarioError) as caught:
        load(file, overrides=["x", "pool.decode.tp=0", "slo.ttft_ms=0"], seed=-1)
    assert [problem.location for problem in caught.value.problems] == [
        f"{file}:21",
        "--seed -1",
        "--set pool.decode.tp=0",
        "--set slo.ttft_ms=0",
        "--set x",
    ]
