"""Whose is what: base ids and lives, in every dialect."""

from __future__ import annotations

import pytest

from pdflow.protocol.dialect import VLLM_STOCK, Dialect
from pdflow.protocol.values import S
from tests.protocol.support.counterexamples import WAITS, NamedCluster, counterexample, in_each_dialect


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock="breaks S4")
def test_r39_two_prompts_with_one_base_id(dialect: Dialect, comes_to: str) -> None:
    """Two tenants chose one X-Request-Id: stock delivers the first prompt to whoever registers first."""
    c = NamedCluster(dialect=dialect)
    mine = "cmpl-u-cccccccc"
    with counterexample(c, mine) as outcome:
        c.prefill("x1", request_id="cmpl-u-aaaaaaaa")
        c.prefill("x2", request_id="cmpl-u-bbbbbbbb")
        c.finish("x1", digest=1)
        c.finish("x2", digest=2)
        c.decode(mine, "x2")
        c.admit(mine, digest=2)
        c.run()
    assert outcome.end == comes_to


@pytest.mark.parametrize("first", ["P", "D"])
def test_an_exact_id_goes_before_an_older_base_id(first: str) -> None:
    """So vLLM does it, and so does stock, in both orders."""
    c = NamedCluster(dialect=VLLM_STOCK)
    same = "cmpl-u-bbbbbbbb"
    c.prefill("x1", request_id="cmpl-u-aaaaaaaa")
    c.prefill("x2", request_id=same)
    if first == "P":
        c.finish("x1", digest=1)
        c.finish("x2", digest=2)
    c.decode("cmpl-u-cccccccc", "x1")
    c.decode(same, "x2")
    if first == "D":
        c.admit("cmpl-u-cccccccc", digest=1)
    c.admit(same, digest=2)
    c.run()
    if first == "D":
        c.finish("x2", digest=2)
        c.finish("x1", digest=1)
    else:
        c.admit("cmpl-u-cccccccc", digest=1)
    c.run()
    assert c.outcomes == {same: ["COMMITTED"], "cmpl-u-cccccccc": ["COMMITTED"]}


@in_each_dialect(strict="COMMITTED", compat="DEADLINE", stock="breaks S8")
def test_r46_d_starts_again_with_the_same_id(dialect: Dialect, comes_to: str) -> None:
    """P has an agent of that name and writes through it, at the addresses of a process that is gone."""
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill_and_admit("r0", "x0")
        c.run()
        assert c.outcomes["r0"] == ["COMMITTED"]
        c.crash("D")
        c.start_decode("D", 202)
        c.prefill_and_admit("r", "x")
        c.pass_time(500 * S)
    assert outcome.end == comes_to


@in_each_dialect(strict=0, compat=0, stock=1)
def test_r46_registrations_of_the_former_incarnation(dialect: Dialect, comes_to: int) -> None:
    """It was waiting for its prompt when D died: who writes it once the new life has been heard?"""
    c = NamedCluster(dialect=dialect, watched=False)
    c.prefill("x")
    c.decode("r", "x")
    c.admit("r")
    c.run()
    c.crash("D")
    c.start_decode("D", 202)
    c.prefill_and_admit("other", "other")
    c.run()
    c.finish("x")
    c.run()
    assert len([w for w in c.wrote() if w.op.reg.request_id == "r"]) == comes_to


@in_each_dialect(strict="COMMITTED", compat="COMMITTED", stock="COMMITTED")
def test_sequential_dispatch_without_disturbance(dialect: Dialect, comes_to: str) -> None:
    c = NamedCluster(dialect=dialect)
    with counterexample(c) as outcome:
        c.prefill_and_admit("r", "x")
        c.run()
        c.at_rest()
    assert outcome.end == comes_to != WAITS
