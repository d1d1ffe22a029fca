"""What the connector takes from vLLM is there, in whatever version is installed, and called as we take it.

Run with `pytest -m vllm tests/vllm/test_seams.py`: on 0.32.0, which is served; on any other, to learn what has moved.
`pdflow_runtime/vllm/seams.py` has the table by version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cached_property
from typing import Any

import pytest

from tests.vllm.support.required import importing_any_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

with importing_any_vllm():
    import vllm
    from vllm import config as vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector import utils
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus

    from pdflow_runtime.vllm.connector import PdflowConnector
    from pdflow_runtime.vllm.scheduler.requests import WELL
    from pdflow_runtime.vllm.seams import SERVED, UNUSED, VERSIONS

BASES = (base.KVConnectorBase_V1, base.SupportsHMA)


def hooks(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


def inherited() -> dict[str, Any]:
    return {name: value for kind in BASES for name, value in hooks(kind).items()}


def function(value: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = value.__func__ if isinstance(value, classmethod) else value
    return found


def incompatible(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Iterator[str]:
    """Yield what vLLM, which calls `theirs`, could pass that `ours` does not take."""
    mine, parameters = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    positional = [each.name for each in mine.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    for index, (name, each) in enumerate(parameters.items()):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            if not any(one.kind is each.kind for one in mine.values()):
                yield f"takes no {each}"
        elif index >= len(positional) or positional[index] != name:
            yield f"takes {positional[index : index + 1]} where vLLM passes {name}"
        elif each.default is not each.empty and mine[name].default is each.empty:
            yield f"needs {name}, which vLLM may leave out"
    for name, one in mine.items():
        if name not in parameters and one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD:
            yield f"needs {name}, which vLLM does not pass"


def test_this_version_is_in_the_table() -> None:
    assert vllm.__version__ in VERSIONS, f"vLLM {vllm.__version__} has not been looked at: {', '.join(VERSIONS)} have"
    assert set(SERVED) <= set(VERSIONS)


def test_every_hook_of_ours_is_one_of_vllms() -> None:
    theirs = inherited()
    later = UNUSED | VERSIONS["0.33.0"]
    ours = {name for name in hooks(PdflowConnector) if name not in later}
    assert ours <= set(theirs), "vLLM would call none of these"
    assert not PdflowConnector.__abstractmethods__


@pytest.mark.parametrize("name", sorted(set(hooks(PdflowConnector)) & set(inherited())))
def test_a_hook_takes_what_vllm_passes(name: str) -> None:
    ours, theirs = hooks(PdflowConnector)[name], inherited()[name]
    for kind in (classmethod, property):
        assert isinstance(ours, kind) == isinstance(theirs, kind)
    assert isinstance(ours, property) or not list(incompatible(function(ours), function(theirs)))


def test_no_hook_of_vllms_is_overlooked() -> None:
    """A hook is ours, or named as one whose default will do: what a new version adds shows here."""
    known = set(hooks(PdflowConnector)) | UNUSED
    new = set(inherited()) - known
    assert new == set(VERSIONS.get(vllm.__version__, frozenset())) - known, "hooks that have not been looked at"


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (KVConnectorFactory.register_connector, ["name", "module_path", "class_name"]),
        (KVConnectorFactory.get_connector_class_by_name, ["connector_name"]),
        (utils.get_current_attn_backends, ["vllm_config"]),
        (parallel_state.get_tensor_model_parallel_rank, []),
        (parallel_state.get_tp_group, []),
        (parallel_state.GroupCoordinator.broadcast_object, ["self", "obj", "src"]),
        (cpu_attn._get_attn_isa, ["dtype", "block_size", "head_size", "kv_cache_dtype"]),
        (BlockPool.touch, ["self", "blocks"]),
        (BlockPool.free_blocks, ["self", "ordered_blocks"]),
        (KVCacheManager.get_block_ids, ["self", "request_id"]),
        (KVCacheBlocks.get_block_ids, ["self", "allow_none"]),
        (NixlKVConnectorStats.record_transfer, ["self", "res"]),
        (NixlKVConnectorStats.record_failed_transfer, ["self"]),
        (NixlKVConnectorStats.record_failed_notification, ["self"]),
        (NixlKVConnectorStats.record_failed_handshake, ["self"]),
        (NixlKVConnectorStats.record_kv_expired_req, ["self"]),
        (NixlPromMetrics.observe, ["self", "transfer_stats_data", "engine_idx"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_function_of_vllms_is_called_as_it_is(function: Callable[..., Any], names: list[str]) -> None:
    assert list(inspect.signature(function).parameters)[: len(names)] == names


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (base.KVConnectorTransferResults, {"finished_sending", "finished_recving", "failed_recving"}),
        (KVConnectorOutput, {"finished_recving", "failed_recving", "kv_connector_worker_meta", "kv_connector_stats"}),
        (KVCacheConfig, {"num_blocks", "kv_cache_groups"}),
        (KVCacheGroupSpec, {"layer_names", "kv_cache_spec"}),
        (FullAttentionSpec, {"block_size", "num_kv_heads", "head_size", "head_size_v", "dtype"}),
        (MLAAttentionSpec, {"block_size", "num_kv_heads", "head_size", "dtype"}),
        (SlidingWindowSpec, {"block_size", "num_kv_heads", "head_size", "dtype", "sliding_window"}),
        (SchedulerOutput, {"num_scheduled_tokens"}),
        (vllm_config.ParallelConfig, {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_index"}),
        (vllm_config.ParallelConfig, {"prefill_context_parallel_size", "decode_context_parallel_size"}),
        (vllm_config.KVTransferConfig, {"kv_role", "engine_id", "kv_connector_extra_config"}),
        (vllm_config.ModelConfig, {"model", "revision", "dtype", "quantization", "enable_sleep_mode"}),
        (vllm_config.CacheConfig, {"block_size", "cache_dtype"}),
        (vllm_config.VllmConfig, {"model_config", "cache_config", "parallel_config", "speculative_config"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_value_of_vllms_has_the_fields_that_we_read(kind: Any, names: set[str]) -> None:
    assert names <= {field.name for field in fields(kind)}


def test_a_request_has_what_we_ask_it() -> None:
    """Its attributes are set in its constructor."""
    source = inspect.getsource(Request.__init__)
    for name in (
        *("request_id", "status", "kv_transfer_params", "prompt_token_ids", "num_prompt_tokens", "prompt_embeds"),
        *("lora_request", "cache_salt", "mm_features"),
    ):
        assert f"self.{name}" in source, name
    names = {status.name for status in RequestStatus}
    assert names >= WELL | {"FINISHED_ABORTED", "WAITING_FOR_REMOTE_KVS"}


def test_the_block_pool_is_the_cache_managers_and_has_a_null_block() -> None:
    assert isinstance(inspect.getattr_static(KVCacheConfig, "transfer_group_ids"), property | cached_property)
    assert "null_block" in inspect.getsource(BlockPool.__init__)
    assert "block_pool" in inspect.getsource(KVCacheManager.__init__)
