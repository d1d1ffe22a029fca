"""CPU time of the connector's hooks, counted by `measuring.TimingConnector`: what it adds to each step of vLLM's.

`python -m benchmarks.vllm.step_cost` runs it. Each process writes a file of its own in the folder that BENCH_TIMING
names, anew every WRITE_EVERY steps: by hook, calls and nanoseconds of CPU time of vLLM's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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


def timed_hook(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def timed(self: Any, *args: Any, **named: Any) -> Any:
        before = time.thread_time_ns()
        try:
            return hook(self, *args, **named)
        finally:
            self.record(name, time.thread_time_ns() - before)

    return timed
