"""The plugin of vLLM's that registers the connector, so that `"kv_connector": "PdflowConnector"` needs no module path.

vLLM calls `register` in each of its processes (API server, EngineCore, workers, and the one that looks at the model),
in some more than once, and whether or not the connector is used. So it imports no module of pdflow's, and never raises:
a plugin that raises ends vLLM.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

log = logging.getLogger(__name__)

NAME: Final = "PdflowConnector"
MODULE: Final = "pdflow_runtime.vllm.connector"


def register() -> None:
    """Register the connector with vLLM, unless it is."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        log.warning("%s is not registered: this version of vLLM has no KVConnectorFactory (%s)", NAME, error)
        return
    with suppress(ValueError):  # It is registered already.
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
