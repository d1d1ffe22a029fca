"""What becomes of P's prompts that vLLM preempts after the connector has announced them."""

from __future__ import annotations

import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from tests.vllm.support.connector_pair import ConnectorPair
    from tests.vllm.support.random_schedule import Mix, setting_of

pytestmark = MARKS


def preempted_in_the_last_chunk(max_tokens: int) -> ConnectorPair:
    """With async scheduling the next step is scheduled before the output of the last chunk is seen. It finds no block
    for a request that decodes, and preempts the prompt."""
    setting = setting_of(0, Mix())
    setting.p.update(num_blocks=6, max_num_batched_tokens=64, max_num_seqs=16, async_scheduling=True, uniproc=False)
    pair = ConnectorPair(setting)
    pair.p.add_request("decodes", range(47), 12)
    pair.p.add_request("p-x", range(500, 548), max_tokens, pair.prefill_params("x", []))
    for _ in range(100):
        pair.step()
    assert pair.p.seen["preempted"]
    return pair


def test_the_prompt_finishes_by_the_output_of_its_last_chunk() -> None:
    """Its blocks are not vLLM's any more, but the connector's: vLLM need not compute it again."""
    pair = preempted_in_the_last_chunk(1)
    assert set(pair.p.answers) == {"p-x"}
    assert pair.ends == {}, "D can have it"
    pair.assert_at_rest()
    assert set(pair.p.answers) == {"decodes", "p-x"}


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_a_prompt_that_is_computed_again_does_not_wait_for_its_own_blocks_for_ever(max_tokens: int) -> None:
    """P must generate more than one token, so vLLM computes the prompt again, for which there are no blocks until the
    lease of what was computed first is over."""
    pair = preempted_in_the_last_chunk(max_tokens)
    assert "p-x" not in pair.p.answers
    pair.assert_at_rest()
    assert set(pair.p.answers) == {"decodes", "p-x"}
    assert pair.ends == {"Released EXPIRED": 1}
