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
from tests.serving.script import Step, Together
from tests.serving.setting import Setting

STEPS = 30
DECODE = ("nixl-push", "nixl-pull", "kv-store", "mooncake-v0", "mooncake-v1", "p2p-nccl-get")
"""Methods whose KV lands in D's blocks."""


def kind(step: Step) -> tuple[object, ...]:
    """Of a kind, one happens to a request at a time."""
    return type(step), getattr(step, "r", None)


async def drawn(setting: Setting, data: st.DataObject) -> None:
    """A random script, as far as the two sides agree."""
    drifts = drifts_of(setting)
    pair = Pair(setting, [drift.even for drift in drifts if drift.even is not None])
    forbids = [drift.forbids for drift in drifts if drift.forbids is not None]

    def allowed(step: Step) -> bool:
        return not any(forbid(pair, step) for forbid in forbids)

    for _ in range(data.draw(st.integers(5, STEPS), label="steps")):
        may = [step for step in pair.likely() if allowed(step)]
        step = data.draw(st.sampled_from(may), label="step")
        beside = [one for one in may if kind(one) != kind(step) and allowed(Together((step, one)))]
        if beside and data.draw(st.integers(0, 4), label="together") == 4:
            step = Together((step, data.draw(st.sampled_from(beside), label="beside")))
        await pair.play(step)
    pair.done()


@pytest.mark.parametrize("setting", [Setting(method, "decode") for method in DECODE], ids=str)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_decode(setting: Setting, data: st.DataObject) -> None:
    trio.run(drawn, setting, data)
