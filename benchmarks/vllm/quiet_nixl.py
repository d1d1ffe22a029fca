"""vLLM's own NIXL connectors without NIXL's progress thread, for `kv_connector_module_path`.

That thread polls UCX without a pause (50 to 95 % of a core, idle). On a machine with as many cores as instances it
takes the core of the forward pass, and vLLM 0.32 has no setting for it. NIXL then makes progress inside the calls that
vLLM makes in each step. These come from three threads of a worker, so that the agent is given a lock: without the
progress thread UCX's own is left out as well, and registrations were lost at a concurrency of 16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nixl._api import nixl_thread_sync_t

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector, NixlPushConnector


def _without_thread(make: Any, **settings: Any) -> Any:
    strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    return make(**settings | {"enable_prog_thread": False, "num_threads": 0, "sync_mode": strict})


base_worker.nixl_agent_config = partial(_without_thread, base_worker.nixl_agent_config)


class QuietNixlPushConnector(NixlPushConnector):  # type: ignore[misc]
    """NixlPushConnector, once this module has replaced the settings of its agent."""


class QuietNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """NixlConnector (pull), once this module has replaced the settings of its agent."""
