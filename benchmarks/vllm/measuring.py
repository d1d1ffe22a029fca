"""pdflow's connector with measurements, for `kv_connector_module_path`. Only processes of vLLM import this module."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.vllm import digesting, timing
from pdflow_runtime.vllm.connector import PdflowConnector
from pdflow_runtime.vllm.seams import attention_of
from pdflow_runtime.vllm.worker.kv_memory import INTERIORS, in_model_order, layer_groups


class DigestingConnector(PdflowConnector):
    """Also writes digests of KV blocks, to the folder that BENCH_DIGESTS names."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        kv_caches = in_model_order(kv_caches)
        instance, rank = self._instance, self._rank
        caches = [tensor if tensor.dim() == 4 else tensor.unsqueeze(1) for tensor in kv_caches.values()]
        groups = list(layer_groups(kv_caches, instance.groups)) or [0] * len(caches)
        opaque = INTERIORS[attention_of(self._vllm_config)[0]] == "whole heads"
        first = 0 if instance.shape.stored_heads == 1 else rank.rank * caches[0].shape[1]
        file = Path(os.environ[digesting.FOLDER]) / f"{instance.role}-{rank.rank}-{os.getpid()}.jsonl"
        recorder = digesting.Recorder(file, instance.role, caches, first, groups, opaque)
        rank._node.observe = lambda _, event, effects, __: recorder.observe(event, effects)


class TimingConnector(PdflowConnector):
    """Also counts the CPU time of its hooks, and writes it to the folder that BENCH_TIMING names."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        side, kind = role.name, vllm_config.kv_transfer_config.kv_role
        self.spent: dict[str, list[int]] = {}
        self._step_hook = timing.STEP[side]
        self._file = Path(os.environ[timing.FOLDER]) / f"{kind}-{side}-{os.getpid()}.json"

    def record(self, hook: str, ns: int) -> None:
        counted = self.spent.setdefault(hook, [0, 0])
        counted[0] += 1
        counted[1] += ns
        if hook == self._step_hook and counted[0] % timing.WRITE_EVERY == 0:
            self._file.write_text(json.dumps({"steps": counted[0], "hooks": self.spent}))


for _name in (*timing.SCHEDULER, *timing.WORKER, *timing.REQUEST):
    setattr(TimingConnector, _name, timing.timed_hook(_name, getattr(PdflowConnector, _name)))
