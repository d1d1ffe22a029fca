"""pdflow's connector, which also counts the CPU time of its hooks: what it adds to each step of vLLM's.

`python -m benchmarks.vllm.step_cost` runs it. Each process writes a file of its own in the folder that BENCH_TIMING
names, anew every WRITE_EVERY steps: by hook, calls and nanoseconds of CPU time of vLLM's thread.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "BENCH_TIMING"
WRITE_EVERY: Final = 50
SCHEDULER: Final = (
    "build_connector_meta",
    "update_connector_output",
    "has_pending_push_work",
    "get_kv_connector_stats",
)
"""Hooks of each step in EngineCore. The last one is called in workers, too."""
WORKER: Final = (
    *("bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"),
    *("get_transfer_results", "build_connector_worker_meta", "clear_connector_metadata", "handle_preemptions"),
)
REQUEST: Final = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished_all_groups"),
)
STEP: Final = {"SCHEDULER": "build_connector_meta", "WORKER": "bind_connector_metadata"}
"""The hook that is called once a step, by the side."""


def _connector() -> type:
    """Return the class, which only a process of vLLM's can make."""
    from pdflow_runtime.vllm.connector import PdflowConnector

    class TimingConnector(PdflowConnector):
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            side, kind = role.name, vllm_config.kv_transfer_config.kv_role
            self.spent: dict[str, list[int]] = {}
            self._step_hook = STEP[side]
            self._file = Path(os.environ[FOLDER]) / f"{kind}-{side}-{os.getpid()}.json"

        def record(self, hook: str, ns: int) -> None:
            counted = self.spent.setdefault(hook, [0, 0])
            counted[0] += 1
            counted[1] += ns
            if hook == self._step_hook and counted[0] % WRITE_EVERY == 0:
                self._file.write_text(json.dumps({"steps": counted[0], "hooks": self.spent}))

    for name in (*SCHEDULER, *WORKER, *REQUEST):
        setattr(TimingConnector, name, _timed(name, getattr(PdflowConnector, name)))
    return TimingConnector


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def timed(self: Any, *args: Any, **named: Any) -> Any:
        before = time.thread_time_ns()
        try:
            return hook(self, *args, **named)
        finally:
            self.record(name, time.thread_time_ns() - before)

    return timed


def __getattr__(name: str) -> Any:
    if name != "TimingConnector":
        raise AttributeError(name)
    return globals().setdefault(name, _connector())
