"""S12 in vLLM's order of hooks: D's half holds on to what a writer may still reach, and says how much that is."""

from __future__ import annotations

from typing import Any

import pytest

from pdflow_runtime.vllm.scheduler.block_references import BlockReferences
from tests.runtime.vllm.support.pair import Pair
from tests.runtime.vllm.test_hook_order import METHODS, loading


def nothing(*_: Any) -> None:
    """Carry out nothing."""


def cancelled(pulls: bool) -> Pair:
    """A request has been aborted while bytes are on their way into its blocks."""
    pair, _ = loading(pulls)
    pair.d.abort("r")
    pair.step(3)
    return pair


@METHODS
def test_blocks_of_an_aborted_request_are_in_quarantine(pulls: bool) -> None:
    pair = cancelled(pulls)
    assert pair.decode_side.references.quarantined
    pair.assert_at_rest()


@METHODS
def test_a_quarantine_that_is_left_out_is_noticed(pulls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockReferences, "quarantine", nothing)
    with pytest.raises(AssertionError, match="blocks of r must be in quarantine, but are not"):
        cancelled(pulls)
