"""Tabulates aiconfigurator-core for common combinations: python benchmarks/bake_costs.py

Writes pdflow/scenario/presets/costs/aiconfigurator/MODEL_GPU_tpN.json, or MODEL-fp8_GPU_tpN.json for 8-bit weights, and
prints how far each is from the tables that it was made of. It needs `pip install 'pdflow[aiconfigurator]'`; the package
is (c) NVIDIA, Apache-2.0, and of its data nothing is stored but the coefficients. What is refused it says, and writes
no file.
"""

from __future__ import annotations

from pathlib import Path

from pdflow.scenario.costs.aiconfigurator import tabulated
from pdflow.scenario.costs.cost_file import written

FOLDER = Path(__file__).resolve().parents[1] / "pdflow/scenario/presets/costs/aiconfigurator"
NEWER = ("b200", "h100-sxm", "h200")
"""GPUs with 8-bit arithmetic whose links are NVLink."""
PUBLISHED = (
    *(("llama-3.1-8b", gpu, 1) for gpu in ("a100-80g", "b200", "h100-sxm", "h200", "l40s", "rtx-pro-6000")),
    *(("llama-3.1-70b", gpu, tp) for gpu in ("a100-80g", "b200", "h100-sxm", "h200") for tp in (4, 8)),
    ("llama-3.1-70b", "l40s", 8),
    *(("qwen3-32b", gpu, 2) for gpu in ("a100-80g", "b200", "h100-sxm", "h200", "rtx-pro-6000")),
    *(("qwen3-32b", gpu, tp) for gpu in NEWER for tp in (1, 4, 8)),
    *(("qwen3-30b-a3b", gpu, 1) for gpu in ("b200", "h100-sxm", "h200", "rtx-pro-6000")),
    *(("deepseek-v3", gpu, 8) for gpu in ("b200", "h200")),
)
IN_8_BITS = (
    *(("llama-3.1-8b", gpu, 1) for gpu in NEWER),
    *(("llama-3.1-70b", gpu, tp) for gpu in NEWER for tp in (1, 2, 4, 8)),
    *(("qwen3-32b", gpu, tp) for gpu in NEWER for tp in (1, 2, 4)),
    *(("qwen3-30b-a3b", gpu, 1) for gpu in NEWER),
    *(("qwen3-235b-a22b", gpu, 4) for gpu in NEWER),
)
COMBINATIONS: tuple[tuple[str, str, int, float | None], ...] = (
    *((*each, None) for each in PUBLISHED),
    *((*each, 1.0) for each in IN_8_BITS),
)
"""(model, GPU, tp, bytes per parameter; None: as published)"""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model, gpu, tp, weight_bytes in COMBINATIONS:
        name = f"{model}{'-fp8' if weight_bytes == 1 else ''}_{gpu}_tp{tp}"
        try:
            file = tabulated(gpu, model, tp, weight_bytes)
        except ValueError as refused:
            print(f"{name:32} none: {refused}")
            continue
        (FOLDER / f"{name}.json").write_text(written(file), encoding="utf-8")
        rows = (f"{row.of} {row.median:.1%} (p95 {row.p95:.1%}, max {row.max:.1%})" for row in file.errors)
        print(f"{name:32} {'; '.join(rows)}")


if __name__ == "__main__":
    main()
