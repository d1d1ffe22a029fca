"""One story, told in every dialect: what it comes to in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT, VLLM_STOCK
from pdflow.protocol.errors import InvariantViolated
from tests.support.cluster import Cluster

WAITS = "waits"
"""Neither loaded nor resolved."""


def in_each_dialect(*, strict: object, compat: object, stock: object) -> pytest.MarkDecorator:
    """Parametrise a story over (dialect, comes_to)."""
    expected = [(STRICT, strict), (VLLM_COMPAT, compat), (VLLM_STOCK, stock)]
    cases = [pytest.param(dialect, comes_to, id=dialect.name) for dialect, comes_to in expected]
    return pytest.mark.parametrize(("dialect", "comes_to"), cases)


class NamedCluster(Cluster):
    """P's id of prompt "x..." is D's id of its request, "r...", with the suffix that vLLM's engine appends."""

    def prefill_id(self, xid: str) -> str:
        return f"r{xid[1:]}-0000000a"


class Counterexample:
    end: str = ""


@contextmanager
def counterexample(c: Cluster, request_id: str = "r") -> Iterator[Counterexample]:
    """Whatever happens inside: its `end` is the request's outcome, or the invariant that the oracle saw broken."""
    outcome = Counterexample()
    try:
        yield outcome
    except InvariantViolated as broken:
        outcome.end = f"breaks {broken.name}"
    else:
        outcome.end = " ".join(c.outcomes[request_id]) or WAITS
