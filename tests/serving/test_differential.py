"""The same script through the simulated node and the live one: the same calls, in the same order, after each step.

Hypothesis draws what happens next from what may happen next. What drifts today is left out by name (`drifts.py`).
"""

from __future__ import annotations

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.drifts import drifts_of
from tests.serving.play import Pair
from tests.serving.setting import Setting

STEPS = 30
DECODE = ("nixl-push", "nixl-pull", "kv-store", "mooncake-v0", "mooncake-v1", "p2p-nccl-get")
"""Methods whose KV lands in D's blocks."""


async def drawn(setting: Setting, data: st.DataObject) -> None:
    """A random script, as far as the two sides agree."""
    drifts = drifts_of(setting)
    pair = Pair(setting, [drift.even for drift in drifts if drift.even is not None])
    forbids = [drift.forbids for drift in drifts if drift.forbids is not None]
    for _ in range(data.draw(st.integers(5, STEPS), label="steps")):
        may = [step for step in pair.possible() if not any(forbid(pair, step) for forbid in forbids)]
        step = data.draw(st.sampled_from(may), label="step")
        await pair.play(step)
    pair.done()


@pytest.mark.parametrize("setting", [Setting(method, "decode") for method in DECODE], ids=str)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_decode(setting: Setting, data: st.DataObject) -> None:
    trio.run(drawn, setting, data)
