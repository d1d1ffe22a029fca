"""What a block size costs a pull: python benchmarks/published/descriptors.py

vLLM RFC #50913: a pull of about 5,000 tokens at block size 16 is tens of thousands of descriptors of about 8 KB, its
transfer window takes about 105 ms and the whole hand-over 263 ms; block size 64 saves about 58 ms of window and comes
to 197 ms. The RFC names neither model nor machine. Descriptors of 8 KB are two KV heads of 128 values on each
rank, as in these models at TP4.

For each, `per_descriptor_s` is fitted on one row, the window at 16, over 400 Gb/s NICs; the other rows are predictions.
Each pull is one request in a separate simulation, without a handshake.

The published window shrinks to 45 % while descriptors shrink to 25 %, so about 20 ms of it do not depend on them. A
later comment in the same issue (2026-08-28) has the averages of another run at 64: 167 MB in 1,785 descriptors, 6.7 ms
of posting (3.8 us each) and 38.7 ms in all. So its links move 5 GB/s, where 46 are simulated. The published hand-over
has 150 to 160 ms in addition to the window at either block size; the simulator has 31 ms. A busy D, whose steps poll
for READs and admit requests, would show both. The RFC does not say what else D computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2]))  # what is installed comes first, and may be compiled
import pdflow
from pdflow.layout.descriptors import descriptor_count, rank_memory
from pdflow.layout.ranks import writers
from pdflow.layout.shapes import KvShape

TOKENS, TP = 5000, 4
MODELS = {"llama-3.1-8b": 32, "qwen3-32b": 64, "llama-3.1-70b": 80}
"""By layers; each has 8 KV heads of 128 values in 16 bits."""
WINDOW_MS = {16: 105.0, 64: 105.0 - 58.0}
HAND_OVER_MS = {16: 263.0, 64: 197.0}


class Pull(NamedTuple):
    """`window_ms`: from the post of the READ to its last byte. `hand_over_ms`: from P's last step until D knows."""

    window_ms: float
    hand_over_ms: float


def descriptors(layers: int, block_size: int) -> int:
    """Of each rank."""
    shape = KvShape(layers, 8, 128, 2, block_size)
    pair = writers(shape, TP, 1, TP, initiator="pull")[0]
    return descriptor_count(pair, rank_memory(shape, 1, TP), rank_memory(shape, 1, TP), TOKENS)


def pulled(model: str, block_size: int, **network: Any) -> Pull:
    """One request; its first token, from D's next step, is not waited for."""
    engine = {"gpu": "h100-sxm", "tp": TP, "block_size": block_size}
    tables: dict[str, Any] = {
        "workload": {"requests": 1, "arrival": {"process": "constant", "rate_rps": 1.0}},
        "model": {"preset": model},
        "pool": [{"name": "p", "role": "prefill", **engine}, {"name": "d", "role": "decode", **engine}],
        "transfer": {"method": "nixl-pull", "dialect": "vllm-compat", "connector": "vllm-nixl-0.28"},
        "network": {"preset": "rdma-400g", **network},
    }
    tables["workload"] |= {"input_tokens": TOKENS, "output_tokens": 2}
    (record,) = pdflow.simulate(pdflow.Scenario.from_dict(tables)).records
    ends = record["ends_ns"]
    return Pull((ends["xfer_wire"] - ends["handshake"]) / 1e6, (ends["notify"] - ends["prefill"]) / 1e6)


def fitted_s(model: str) -> float:
    """What each descriptor takes, if that explains the window at 16."""
    bare = pulled(model, 16, per_descriptor_s=0.0)
    return (WINDOW_MS[16] - bare.window_ms) / 1e3 / descriptors(MODELS[model], 16)


def lines() -> Iterator[str]:
    yield f"{'block':>22}{'descriptors':>13}{'window ms':>11}{'published':>11}{'hand-over ms':>14}{'published':>11}"
    for model, layers in MODELS.items():
        per_descriptor_s = fitted_s(model)
        yield f"{model}: {per_descriptor_s * 1e6:.2f} us per descriptor"
        for block_size in (16, 32, 64, 128):
            pull = pulled(model, block_size, per_descriptor_s=per_descriptor_s)
            window, hand_over = WINDOW_MS.get(block_size, ""), HAND_OVER_MS.get(block_size, "")
            mark = "fitted" if block_size == 16 else ""
            if block_size == 64:
                mark = f"window {pull.window_ms / WINDOW_MS[64] - 1:+.0%}, saved {105.0 - pull.window_ms:.0f} of 58 ms"
            yield (
                f"{block_size:22}{descriptors(layers, block_size):13,}{pull.window_ms:11.1f}{window:>11}"
                f"{pull.hand_over_ms:14.1f}{hand_over:>11}  {mark}"
            )
        merged = pulled(model, 16, per_descriptor_s=per_descriptor_s, coalesce=True)
        yield f"{16:22}{'merged':>13}{merged.window_ms:11.1f}"


if __name__ == "__main__":
    print("\n".join(lines()))
