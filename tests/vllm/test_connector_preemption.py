"""What becomes of P's prompts that vLLM preempts after the connector has announced them."""

from __future__ import annotations

import pytest

from tests.vllm.support.required import MARKS, importing_vllm

with importing_vllm():
    from tests.vllm.support.connector_pair import ConnectorPair
    from tests.vllm.support.random_schedule import Mix, setting_of

pytestmark = MARKS


@pytest.mark.xfail(strict=True, reason="P holds the blocks of a prompt that vLLM must compute again, without end")
def test_a_prompt_is_preempted_while_its_last_chunk_is_computed() -> None:
    """With async scheduling the next step is scheduled before the output of the last chunk is seen. It finds no block
    for a request that decodes, and preempts the prompt, whose output vLLM then drops (`requires_kv_delivery`)."""
    setting = setting_of(0, Mix())
    setting.p.update(num_blocks=6, max_num_batched_tokens=64, max_num_seqs=16, async_scheduling=True, uniproc=False)
    pair = ConnectorPair(setting)
    pair.p.add_request("decodes", range(47), 12)
    pair.p.add_request("p-x", range(500, 548), 1, pair.prefill_params("x", []))
    for _ in range(100):
        pair.step()
    assert pair.p.seen["preempted"]
    assert set(pair.p.answers) == {"decodes", "p-x"}, "they keep one another from blocks"
