"""Computes the bundled workload models from published traces: python benchmarks/fit_workload.py ../shared/data/traces

Writes pdflow/workload/models/*.toml, each with the source of its trace. `pdflow trace model` makes models of other
traces by the same code, pdflow/workload/fitting/fit.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdflow.scenario.schema.workload import Trace, TraceFormat
from pdflow.workload.fitting.fit import fit
from pdflow.workload.fitting.fit_arrivals import LEVELS
from pdflow.workload.model_file import model_toml
from pdflow.workload.traces.readers import read_trace

MODELS = Path(__file__).resolve().parents[1] / "pdflow" / "workload" / "models"

MOONCAKE = {
    "title": "Mooncake conversation trace, its first 2,000 requests",
    "url": "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces",
    "commit": "3b5a5941",
    "licence": "Apache-2.0",
    "cite": "Qin et al., Mooncake: Trading More Storage for Less Computation, FAST '25",
}
AZURE = {
    "url": "https://github.com/Azure/AzurePublicDataset",
    "commit": "b469a113",
    "licence": "CC-BY 4.0",
    "cite": "Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA '24",
}
TRACES: dict[str, tuple[str, TraceFormat, dict[str, str]]] = {
    "mooncake-conversation": ("mooncake_conversation_first2000.jsonl", "mooncake", MOONCAKE),
    "azure-code": ("azure2023_code_full.csv", "azure", {"title": "Azure LLM inference trace 2023, code", **AZURE}),
    "azure-conv": (
        "azure2023_conv_full.csv",
        "azure",
        {"title": "Azure LLM inference trace 2023, conversation", **AZURE},
    ),
}


def main(folder: Path) -> None:
    """Fit and write all models."""
    for name in TRACES:
        (MODELS / f"{name}.toml").write_text(model(name, folder), encoding="utf-8")
        print(name)


def model(name: str, folder: Path) -> str:
    """One of the bundled models, as its file."""
    file, form, source = TRACES[name]
    requests = list(read_trace(Trace(path=file, format=form), folder))
    made_by = f"Computed by benchmarks/fit_workload.py from {file}."
    return model_toml(name, made_by, source, fit(requests), LEVELS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
