"""What posting READs on D's engine thread costs its tokens: python benchmarks/published/read_thread.py

vLLM PR #35264, Llama 3.3 70B on p5en (its issue at NIXL, #1514, says TP8): once the memory is fragmented, a transfer of
118 blocks has 18,880 descriptors, whose posting takes 46 ms over EFA, just before D's forward pass; TPOT of push, which
posts in another thread, is 30 % better. The PR does not state the rate of these requests, so here it is a range, and
nothing is fitted: the preset `efa-200g` has the posting time of the same source, and the connector its descriptors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # what is installed comes first, and may be compiled
import pdflow

TOKENS = 118 * 16
RATES_RPS = (2.0, 4.0, 5.0, 8.0)


def served(rate_rps: float, method: str, **transfer: Any) -> pdflow.Result:
    """Two prefill engines and one decode engine, 128 tokens each."""
    engine = {"gpu": "h200", "tp": 8}
    tables: dict[str, Any] = {
        "workload": {"requests": 300, "arrival": {"process": "poisson", "rate_rps": rate_rps}},
        "model": {"preset": "llama-3.1-70b"},
        "pool": [
            {"name": "p", "role": "prefill", "replicas": 2, **engine},
            {"name": "d", "role": "decode", **engine},
        ],
        "transfer": {"method": method, "connector": "vllm-nixl-0.28", **transfer},
        "network": {"preset": "efa-200g"},
    }
    tables["workload"] |= {"input_tokens": TOKENS, "output_tokens": 128}
    return pdflow.simulate(pdflow.Scenario.from_dict(tables))


def tpot_ms(result: pdflow.Result) -> float:
    return float(result.summary["tpot_mean_ms"])


def lines() -> Iterator[str]:
    yield "| requests/s | TPOT, push | pull | over push | pull, overlapped | over push | p99 of ITL, pull |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for rate_rps in RATES_RPS:
        push, pull = (served(rate_rps, method) for method in ("nixl-push", "nixl-pull"))
        overlapped = served(rate_rps, "nixl-pull", reads_on="overlapped")
        ratios = [tpot_ms(each) / tpot_ms(push) for each in (pull, overlapped)]
        yield (
            f"| {rate_rps:g} | {tpot_ms(push):.1f} ms | {tpot_ms(pull):.1f} ms | {ratios[0]:.2f} "
            f"| {tpot_ms(overlapped):.1f} ms | {ratios[1]:.2f} | {pull.summary['itl_p99_ms']:.0f} ms |"
        )


if __name__ == "__main__":
    print("\n".join(lines()))
