"""What a slice costs: python benchmarks/published/slices.py

Mooncake's EFA page (design/transfer-engine/efa_transport.md): GB/s between two p5en.48xlarge, 16 NICs of 200 Gb/s
each, GPU to GPU, 16 threads with 128 requests each. Here 8 transfers of 4 GB, one for each GPU of two engines at TP8,
cut over the two NICs of their GPU: the preset `efa-200g`, whose queue and wire are from rows marked fitted. READs
have a separate wire rate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # what is installed comes first, and may be compiled
import pdflow

KB = 1024
PUBLISHED = {
    "nixl-push": {64: 97.11, 128: 190.82, 256: 324.9, 512: 357.62, 1024: 352.59, 2048: 366.87},
    "nixl-pull": {64: 96.87, 128: 203.88, 256: 296.19, 512: 289.47, 1024: 301.14, 2048: 302.25},
}
"""By slice in KB: writes and reads."""
FITTED = {("nixl-push", 64), ("nixl-push", 2048), ("nixl-pull", 2048)}
TOKENS = 100_000
"""Of llama-3.1-70b at TP8: 4.1 GB from each GPU."""


def rate(method: str, slice_kb: int) -> float:
    """GB/s of all GPUs together, from the first byte of a prompt's KV to the last."""
    engine = {"gpu": "h200", "tp": 8, "kv_tokens": 2 * TOKENS, "cost": {"model": "constant"}}
    network: dict[str, Any] = {"preset": "efa-200g", "slice_bytes": slice_kb * KB, "per_descriptor_s": 0.0}
    if method == "nixl-pull":
        network["bandwidth_bytes_per_s"] = PUBLISHED[method][2048] / 16 * 1e9
    tables = {
        "workload": {
            "requests": 1,
            "arrival": {"process": "constant", "rate_rps": 1.0},
            "input_tokens": TOKENS,
            "output_tokens": 2,
        },
        "model": {"preset": "llama-3.1-70b"},
        "pool": [{"name": "p", "role": "prefill", **engine}, {"name": "d", "role": "decode", **engine}],
        "transfer": {"method": method},
        "network": network,
    }
    result = pdflow.simulate(pdflow.Scenario.from_dict(tables))
    (record,) = result.records
    ends = record["ends_ns"]
    nbytes = 80 * 2 * 8 * 128 * 2 * TOKENS
    return float(nbytes / (ends["xfer_wire"] - ends["xfer_post"]))


def lines() -> Iterator[str]:
    yield f"{'':12}{'slice KB':>10}{'GB/s':>9}{'published':>11}"
    errors = []
    for method, rows in PUBLISHED.items():
        for slice_kb, published in rows.items():
            simulated = rate(method, slice_kb)
            error = simulated / published - 1
            fitted = (method, slice_kb) in FITTED
            if not fitted:
                errors.append(abs(error))
            mark = "  fitted" if fitted else ""
            yield f"{method:12}{slice_kb:10}{simulated:9.1f}{published:11.1f}{error:+8.1%}{mark}"
    errors.sort()
    yield f"{len(errors)} rows not fitted: median error {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}"


if __name__ == "__main__":
    print("\n".join(lines()))
