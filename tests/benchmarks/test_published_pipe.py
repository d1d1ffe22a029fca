"""What Mooncake's V0 pipe is made of, one part at a time: each makes a prompt's way longer by what it takes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published.common import run

TOKENS = 2000
KV_BYTES, HIDDEN_BYTES = 28 * 2 * 4 * 128 * 2 * TOKENS, 3584 * 2 * TOKENS


def wire_ms(dialect: str, requests: int = 1, pickle_bytes_per_s: int = 1 << 60) -> float:
    """From D's READ to its last byte, of the first request; P's steps take 1 s each, D's nothing."""
    tables: dict[str, Any] = {
        "workload": {
            "requests": requests,
            "arrival": {"process": "constant", "rate_rps": 0.9},
            "input_tokens": TOKENS,
            "output_tokens": 2,
        },
        "model": {"preset": "qwen2.5-7b-gptq-int4"},
        "pool": [
            {"name": "p", "role": "prefill", "gpu": "a10", "cost": {"model": "constant", "prefill_s": 1.0}},
            {"name": "d", "role": "decode", "gpu": "a10", "cost": {"model": "constant"}},
        ],
        "transfer": {"method": "mooncake-v0", "dialect": dialect, "pickle_bytes_per_s": pickle_bytes_per_s},
        "network": {"preset": "ideal", "bandwidth_bytes_per_s": 12_500_000_000},
    }
    ends = next(iter(run(tables).records))["ends_ns"]
    return float(ends["xfer_wire"] - ends["handshake"]) / 1e6


def test_pickling_takes_its_time_on_both_hosts() -> None:
    free, paid = (wire_ms("as-published", pickle_bytes_per_s=each) for each in (1 << 60, 1_000_000_000))
    assert paid - free == pytest.approx(2 * (KV_BYTES + HIDDEN_BYTES) / 1e6, rel=0.01)
    assert wire_ms("strict", pickle_bytes_per_s=1_000_000_000) == wire_ms("strict")


def test_hidden_states_are_sent_with_the_kv() -> None:
    ours, theirs = wire_ms("strict"), wire_ms("as-published")
    assert theirs / ours == pytest.approx(1 + HIDDEN_BYTES / KV_BYTES, rel=0.02)


def test_copies_out_wait_for_the_step_that_p_computes() -> None:
    """The second of three tensors, while the next prompt's step is half done: it ends 1.11 s after the first one's."""
    slow = 100_000_000  # so that the first tensor's way reaches into that step
    alone, together = (wire_ms("as-published", requests, slow) for requests in (1, 2))
    first_tensor_ms = 2 * (KV_BYTES + HIDDEN_BYTES) / 3 / slow * 1e3
    assert together - alone == pytest.approx(1000 / 0.9 - first_tensor_ms, rel=0.05)
