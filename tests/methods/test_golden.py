"""One request by each method, told in words, as it is kept under `golden/`: methods differ in what is sent, copied and
held, and in that order, not in a constant. Each text was compared with the code of its source when it was taken.

`UPDATE_GOLDEN=1 pytest tests/methods/test_golden.py` writes them anew: read what changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.methods.show import frames
from pdflow_sim.observe.text_trace import one_request

HERE = Path(__file__).parent
CASES = [(name, dialect) for name in METHODS for dialect in ("strict", "as-published")]


def trace_text(method: str, dialect: str) -> str:
    return "\n".join(one_request(method, dialect)) + "\n"


@pytest.mark.parametrize(("method", "dialect"), CASES)
def test_one_request_goes_as_it_is_kept(method: str, dialect: str) -> None:
    kept, now = HERE / "golden" / f"{method}.{dialect}.txt", trace_text(method, dialect)
    if os.environ.get("UPDATE_GOLDEN"):
        kept.write_text(now, encoding="utf-8")
    assert now == kept.read_text(encoding="utf-8")


def test_no_two_methods_go_alike() -> None:
    texts = {method: trace_text(method, "strict") for method in METHODS}
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize("name", METHODS)
def test_the_table_counts_what_is_sent(name: str) -> None:
    method = METHODS[name]
    lines = trace_text(name, "strict").splitlines()
    sent = [line.split()[2].rstrip(":") for line in lines if line.split()[1:2] == ["sends"] and ".r" in line.split()[0]]
    done = ["DONE" for line in lines if "receives DONE" in line]
    counted = [frame for frame in sent if frame.isupper()] + done
    assert sorted(counted) == sorted(frames(method))
    announced = any("announces" in line for line in lines) or (method.strict.asks and method.pulls)
    assert announced == method.strict.asks
