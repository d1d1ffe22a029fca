"""Random schedules of pdflow's connector on vLLM's own Scheduler, and the mutants of the connector that they find.

No assertion of vLLM's fails, each request gets exactly the reports that vLLM waits for, no block is lost, and no
request reads KV that is not of its tokens. 1,000 schedules take half a minute of CPU time.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from pdflow_runtime.vllm.connector import PdflowConnector
    from pdflow_runtime.vllm.instance import Instance
    from pdflow_runtime.vllm.scheduler import decode_side, prefill_side
    from pdflow_runtime.vllm.scheduler.block_references import BlockReferences
    from pdflow_runtime.vllm.scheduler.decode_side import DecodeSide
    from pdflow_runtime.vllm.scheduler.ledger import LoadLedger
    from tests.vllm.support.connector_pair import ConnectorPair
    from tests.vllm.support.random_schedule import Mix, played

pytestmark = MARKS

SCHEDULES = 200
MIX = Mix(tps=((1, 1), (2, 2), (1, 2), (2, 1)), foreign=True, roles=(("kv_producer",), ("kv_consumer",)))


def test_schedules_end_at_rest_and_reach_what_they_are_for() -> None:
    seen = played(range(SCHEDULES), ConnectorPair, MIX)
    for goal in (
        *("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR", "load failed"),
        *("aborted WAITING", "aborted RUNNING", "aborted WAITING_FOR_REMOTE_KVS", "received", "paused", "hit"),
        *("loaded, looked up again", "matched, not allocated, matched again"),
        *("reset True", "reset False", "reset raises", "Released NONE", "Released EXPIRED"),
        *("EndDecode CONTENT", "EndDecode UNREACHABLE", "EndDecode CANCELLED"),
    ):
        assert seen[goal] >= 5, (goal, seen)
    # Rare: a second decode leg of a prompt asks nobody.
    assert seen["EndDecode NO_REQUEST"] >= 1, seen


SLIDING = attrs.evolve(MIX, windows=((None, 24), (40, None), (None, 16, 33), (24,)))


def test_schedules_with_sliding_windows_end_at_rest() -> None:
    """Where a load keeps nothing outside of windows, and where P has none of it any more."""
    seen = played(range(SCHEDULES), ConnectorPair, SLIDING)
    for goal in ("FINISHED_LENGTH_CAPPED", "received", "hit", "load failed", "Released NONE"):
        assert seen[goal] >= 5, (goal, seen)
    assert seen["blocks outside of windows"] >= 20, seen


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1_000, 5_000, 2_000))
def test_many_schedules_with_sliding_windows_end_at_rest(first: int) -> None:
    played(range(first, first + 2_000), ConnectorPair, SLIDING)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1_000, 21_000, 2_000))
def test_many_schedules_end_at_rest(first: int) -> None:
    played(range(first, first + 2_000), ConnectorPair, MIX)


@pytest.mark.parametrize("seed", [15_140])
def test_a_schedule_that_has_failed_ends_at_rest(seed: int) -> None:
    """15140: the caches were reset while a prompt was computed, and its KV was named by the weights of after it."""
    played([seed], ConnectorPair, MIX)


# Mutants.


def forgets_the_end(self: LoadLedger, request_id: str) -> None:
    self.fail(request_id)


def keeps_the_received(self: LoadLedger) -> set[str]:
    return set(self._received)


def notes_no_begin(self: LoadLedger, request_id: str) -> None:
    pass


def holds_nothing(self: BlockReferences, pool: Any, allocation: Any) -> None:
    self._held[allocation.generation] = []


def drops_without_a_report(self: DecodeSide, _: Any, effect: Any) -> None:
    self._dropped(effect.handle)


def loads_again(self: DecodeSide, request: Any, computed: int) -> tuple[int | None, bool]:
    if request.request_id not in self._requests:
        return 0, False
    return max(0, request.num_prompt_tokens - computed), computed < request.num_prompt_tokens


def is_any_content(request: Any, weights: int) -> int:
    return 7


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (LoadLedger, "end", forgets_the_end),
        (LoadLedger, "begin", notes_no_begin),
        (LoadLedger, "take_received", keeps_the_received),
        (BlockReferences, "hold", holds_nothing),
        (DecodeSide, "_drop", drops_without_a_report),
        (DecodeSide, "get_num_new_matched_tokens", loads_again),
        ((decode_side, prefill_side), "content_digest", is_any_content),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_schedules_find_mutants(owner: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in owner if isinstance(owner, tuple) else (owner,):
        monkeypatch.setattr(each, name, mutant)
    with pytest.raises(AssertionError, match="seed"):
        played(range(SCHEDULES), ConnectorPair, MIX)


def loads_the_last_token(self: Instance, prompt_tokens: int) -> int:
    return prompt_tokens


def keeps_the_first_group_alone(self: Any, block_ids: Any) -> list[list[int]]:
    return [list(block_ids[0]) for _ in block_ids]


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [(Instance, "exchanged", loads_the_last_token), (PdflowConnector, "_tables", keeps_the_first_group_alone)],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_schedules_with_sliding_windows_find_mutants(
    owner: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError, match="seed"):
        played(range(SCHEDULES), ConnectorPair, SLIDING)
