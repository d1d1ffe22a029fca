"""The same script through the simulated node and the live one: the same calls, in the same order, after each step.

Hypothesis draws what happens next from what may happen next. What differed once is in `test_scripts.py`.
"""

from __future__ import annotations

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.play import Pair
from tests.serving.script import Arrive, Do, Look, Step, Store, Together, Wait
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


def go_together(step: Step, other: Step) -> bool:
    """While a step of the engine runs, time passes by its layers. A store's answer reaches a live node by a task of its
    own, so not in the script's order."""
    both = (step, other)
    runs = any(isinstance(one, Do) and one.act == "compute" for one in both)
    waits = any(isinstance(one, Wait) for one in both)
    answers = any(isinstance(one, Store) for one in both)
    # Nobody asks a store for what it puts itself: a second call of that name is refused.
    named = all(isinstance(one, Arrive | Look) for one in both) and kind(step)[1] == kind(other)[1]
    return kind(step) != kind(other) and not (runs and waits) and not answers and not named


async def drawn(setting: Setting, data: st.DataObject) -> None:
    """A random script."""
    pair = Pair(setting)
    for _ in range(data.draw(st.integers(5, STEPS), label="steps")):
        may = pair.likely()
        step = data.draw(st.sampled_from(may), label="step")
        companions = [one for one in may if go_together(step, one)]
        if companions and data.draw(st.integers(0, 4), label="together") == 4:
            step = Together((step, data.draw(st.sampled_from(companions), label="companions")))
        await pair.play(step)
    pair.done()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_both_do_the_same(setting: Setting, data: st.DataObject) -> None:
    trio.run(drawn, setting, data)
