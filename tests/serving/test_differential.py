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
EXAMPLES = max(5, settings().max_examples // 4)
"""Of each setting: there are many of them."""
METHODS = ("nixl-push", "nixl-pull", "cpu-staged", "p2p-nccl-put", "p2p-nccl-put-async", "p2p-nccl-get", "kv-store")
MOONCAKE = ("mooncake-v0", "mooncake-v1")
SETTINGS: list[Setting] = [
    *(Setting(method, "decode") for method in (*METHODS, *MOONCAKE)),
    *(Setting(method, "prefill") for method in (*METHODS, *MOONCAKE)),
    *(Setting(method, "prefill", progressive=True) for method in ("nixl-push", "mooncake-v1")),
    *(Setting(method, "decode", ranks=2) for method in ("nixl-push", "nixl-pull", "cpu-staged")),
    *(Setting(method, "prefill", ranks=2) for method in ("nixl-push", "cpu-staged", "p2p-nccl-get")),
    Setting("mooncake-v1", "prefill", progressive=True, ranks=2),
    *(Setting(method, "decode", first_token="prefill") for method in ("nixl-push", "cpu-staged")),
    Setting("kv-store", "store"),
    *(Setting("kv-store", role, ranks=2) for role in ("prefill", "store")),
    Setting("nixl-push", "aggregated"),
]


def kind(step: Step) -> tuple[object, ...]:
    """Of a kind, one happens to a request at a time."""
    return type(step), getattr(step, "r", None)


async def drawn(setting: Setting, data: st.DataObject) -> None:
    """A random script, as far as the two sides agree."""
    drifts = drifts_of(setting)
    evens = [drift.even for drift in drifts if drift.even is not None]
    pair = Pair(setting, evens)
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


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_both_do_the_same(setting: Setting, data: st.DataObject) -> None:
    trio.run(drawn, setting, data)
