"""What a scenario may say of sessions and clients, and what each thing that it may not is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario import load
from pdflow.scenario.schema.distributions import ExponentialTime, FixedLength, FixedTime, FixedTurns, GeometricTurns
from pdflow.scenario.summary import workload_summary

SESSIONS = Path(__file__).resolve().parents[2] / "examples/sessions.toml"


def refused(*overrides: str) -> list[str]:
    """What is wrong, without where: of an override that is the override itself."""
    with pytest.raises(ScenarioError) as caught:
        load(SESSIONS, overrides=overrides)
    return [problem.path + ": " + problem.message for problem in caught.value.problems]


def test_a_number_is_a_distribution_too() -> None:
    config = load(
        SESSIONS,
        overrides=["workload.sessions.turns=3", "workload.sessions.think_s=2", "workload.sessions.new_tokens=7"],
    ).workload.sessions
    assert config is not None
    assert (config.turns, config.think_s) == (FixedTurns(turns=3), FixedTime(time_s=2.0))
    assert config.new_tokens == FixedLength(tokens=7)
    plain = load(SESSIONS, overrides=["workload.sessions.think_s={dist='exponential',mean_s=1}"])
    assert plain.workload.sessions is not None
    assert plain.workload.sessions.think_s == ExponentialTime(mean_s=1.0)
    assert plain.workload.sessions.turns == GeometricTurns(mean=5.0, high=40)
    assert workload_summary(plain) == "2,000 requests in sessions, Poisson at 2/s"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sessions.turns=0", "sessions.turns: is 0, expected a number of at least 1 and at most 1,000"),
        ("sessions.turns=2.5", "sessions.turns: is 2.5, expected an integer"),
        ("sessions.turns={dist='geometric',mean=0.5,high=5}", "sessions.turns.mean: is 0.5, expected a number"),
        (
            "sessions.turns={dist='uniform',low=5,high=2}",
            "sessions.turns: high is 2, expected at least low, which is 5",
        ),
        (
            "sessions.turns={dist='empirical',turns=[0]}",
            "sessions.turns: turns contains 0, expected numbers of at least 1",
        ),
        ("sessions.think_s=-1", "sessions.think_s: is -1, expected a number of at least 0"),
        ("sessions.think_s='long'", 'sessions.think_s: is "long", expected a number'),
        ("sessions.think_s={dist='normal'}", 'sessions.think_s.dist: is "normal", expected one of fixed, uniform'),
        (
            "sessions.think_s={dist='uniform',low_s=2,high_s=1}",
            "sessions.think_s: high_s is 1, expected at least low_s, which is 2",
        ),
        ("sessions.think=1", "sessions.think: unknown key (did you mean think_s?)"),
        (
            "sessions.max_context_tokens=11000",
            "sessions.max_context_tokens: is 11000, expected at least 11200: the longest first turn with its answer",
        ),
        ("client.timeout_s=0", "client.timeout_s: is 0, expected a number"),
        (
            "client.cancel_probability=0.5",
            "client: cancel_probability and cancel_after_s need each other",
        ),
        ("client.cancel_after_s=5", "client: cancel_probability and cancel_after_s need each other"),
        (
            "client={timeout_s=5,first_token_timeout_s=5}",
            "client: first_token_timeout_s is 5, expected less than timeout_s, which is 5",
        ),
    ],
)
def test_values(override: str, expected: str) -> None:
    [problem] = refused(f"workload.{override}")
    assert problem.startswith(f"workload.{expected}")


@pytest.mark.parametrize("source", ["like='azure-conv',requests=5", "trace={path='sessions.toml',format='sharegpt'}"])
def test_what_is_not_drawn_here_has_no_sessions(source: str) -> None:
    key = source.partition("=")[0]
    found = refused(f"workload={{{source},sessions={{turns=2,think_s=1,new_tokens=5}}}}")
    expected = f"workload.sessions: cannot be combined with {key}; it needs an arrival process"
    assert any(problem.startswith(expected) for problem in found)


def test_a_session_that_outgrows_an_engine_needs_a_limit() -> None:
    found = refused("workload.sessions.max_context_tokens=600000", "pool.decode.kv_tokens=100000")
    assert found == [
        "workload.sessions.max_context_tokens: a request of up to 245200 tokens does not fit an engine of pool decode "
        "(100000 tokens); limit it here, or raise kv_tokens, tp or the GPU's memory"
    ]


def test_classes_are_first_and_later_turns() -> None:
    assert refused("slo.class={'turn 2'={ttft_ms=5}}") == [
        'slo.class."turn 2": is no class of the workload, expected one of turn 1, turn 2+ (did you mean turn 2+?)'
    ]
