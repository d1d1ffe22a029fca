"""Every option that `vllm.sh` gives an engine exists in vLLM, and means what the scenario says."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow_sim.plan.launch.flags import Connector, connectors_for, engine_flags, transfer_config
from tests.sim.plan.launch.test_vllm_script import PAIR, SCRIPTS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture(scope="module")
def parser() -> Any:
    """The parser of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("name", SCRIPTS)
def test_vllm_takes_the_options(name: str, parser: Any) -> None:
    scenario = SCRIPTS[name].with_({"model.kv_dtype": "fp8"}).resolved
    for pool in scenario.pools:
        flags = shlex.split(" ".join(engine_flags(pool, scenario)))
        found = parser.parse_args(["MODEL", "--host", "127.0.0.1", "--port", "1", *flags])
        assert found.tensor_parallel_size == pool.tp
        assert found.pipeline_parallel_size == pool.pp
        assert found.data_parallel_size == pool.attention_replicas
        assert found.enable_expert_parallel is (pool.ep > 1)
        assert found.max_num_seqs == pool.max_num_seqs
        assert found.max_num_batched_tokens == pool.step_tokens
        assert found.block_size == pool.block_size
        assert found.gpu_memory_utilization == pool.gpu_memory_utilization
        assert found.enable_prefix_caching is pool.enable_prefix_caching
        assert found.async_scheduling is pool.async_scheduling
        assert found.kv_cache_dtype == "fp8"


@pytest.mark.parametrize("method", METHODS)
def test_vllm_has_the_connectors(method: str, parser: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    scenario = PAIR.with_({"transfer.method": method}).resolved
    names: tuple[Connector, ...] = connectors_for(scenario)
    for name in names:
        text = transfer_config(name, scenario.transfer)
        text = re.sub("@HOST@", "127.0.0.1", text.replace("@ROLE@", "kv_producer").replace("@TRANSPORT@", "tcp"))
        found = parser.parse_args(["MODEL", "--kv-transfer-config", text]).kv_transfer_config
        config = found if isinstance(found, KVTransferConfig) else KVTransferConfig(**found)
        assert config.kv_load_failure_policy == "recompute"
        if name == "pdflow":
            assert config.kv_connector_module_path
        else:
            assert config.kv_connector in KVConnectorFactory._registry
