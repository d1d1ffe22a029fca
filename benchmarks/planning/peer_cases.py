"""The cases that peers are asked about: a model, GPUs, the lengths of requests and bounds on TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from pdflow.scenario.reading.editable import Scenario

SPREAD: Final = 0.2
"""Lengths vary by so much of the stated one to either side: with equal lengths all clients of a closed loop stay in
step, which no peer assumes."""


@attrs.frozen(kw_only=True)
class Case:
    """One question. `model` is of the peers and `preset` of pdflow; `start_rate` is the first rate that is tried."""

    name: str
    title: str
    model: str
    system: str
    preset: Mapping[str, Any]
    gpu: str
    gpus: int
    input_tokens: int
    output_tokens: int
    ttft_ms: int
    tpot_ms: int
    start_rate: float
    asked_of_aisimulate: bool = False

    @property
    def mean_level(self) -> str:
        """The bounds on means."""
        return f"ttft={self.ttft_ms}ms@mean,tpot={self.tpot_ms}ms@mean"

    @property
    def tail_level(self) -> str:
        """The same bounds for 95 % of requests."""
        return f"ttft={self.ttft_ms}ms@p95,tpot={self.tpot_ms}ms@p95"

    def scenario(self, requests: int) -> Scenario:
        """Return the traffic and the model, on one prefill and one decode engine of half of the GPUs each."""
        pools = [
            {
                "name": role,
                "role": role,
                "replicas": 1,
                "gpu": self.gpu,
                "tp": min(8, self.gpus // 2),
                "cost": {"model": "aiconfigurator"},
            }
            for role in ("prefill", "decode")
        ]
        return Scenario.from_dict(
            {
                "scenario": {"name": self.name, "seed": 1},
                "workload": {
                    "requests": requests,
                    "arrival": {"process": "poisson", "rate_rps": self.start_rate},
                    "input_tokens": _around(self.input_tokens),
                    "output_tokens": _around(self.output_tokens),
                },
                "model": dict(self.preset),
                "pool": pools,
                "transfer": {"method": "nixl-push"},
                "network": {"preset": "rdma-400g"},
                "router": {"policy": "least-loaded", "dispatch": "concurrent"},
            }
        )


def _around(tokens: int) -> dict[str, Any]:
    return {"dist": "uniform", "low": round(tokens * (1 - SPREAD)), "high": round(tokens * (1 + SPREAD))}


_DENSE_32B: Final[Mapping[str, Any]] = {
    "model": "Qwen/Qwen3-32B",
    "system": "h200_sxm",
    "preset": {"preset": "qwen3-32b"},
    "gpu": "h200",
    "input_tokens": 4000,
    "output_tokens": 500,
    "ttft_ms": 1000,
    "tpot_ms": 20,
}
CASES: Final = (
    Case(name="32b-16", title="Qwen3-32B on 16 H200", gpus=16, start_rate=8.0, **_DENSE_32B),
    Case(name="32b-32", title="Qwen3-32B on 32 H200", gpus=32, start_rate=16.0, **_DENSE_32B),
    Case(
        name="70b-8",
        title="Llama-3.1-70B fp8 on 8 H100",
        model="nvidia/Llama-3.1-70B-Instruct-FP8",
        system="h100_sxm",
        preset={"preset": "llama-3.1-70b", "weight_dtype": "fp8", "activation_dtype": "fp8"},
        gpu="h100-sxm",
        gpus=8,
        input_tokens=1200,
        output_tokens=200,
        ttft_ms=500,
        tpot_ms=50,
        start_rate=12.0,
        asked_of_aisimulate=True,
    ),
)
