"""vLLM's configuration of an engine without a model: one VllmConfig, and cheap copies of it.

A VllmConfig takes 0.2 s to construct, a copy with other settings some microseconds. The model is the config.json of a
Llama: the Scheduler reads its maximum length, and that it is neither pooling nor multimodal.
"""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

LAYERS_PER_GROUP = 2
MAX_MODEL_LEN = 512
"""Tokens. No schedule comes near it."""

HEADS, HEAD_DIM = 2, 32


@attrs.frozen(kw_only=True)
class EngineSetting:
    """How an engine is started.

    Args:
        num_blocks: usable ones. vLLM has one more, its null block, whose id is 0.
        recompute: kv_load_failure_policy: a prompt whose load has failed is computed here, otherwise it fails.
        windows: the sliding window of each KV cache group in tokens, None for full attention.
        uniproc: one worker in EngineCore's process, as on one GPU. Its outputs are not aggregated: where a step has
            nothing to report, vLLM calls no `update_connector_output`. Otherwise workers are processes of their own,
            and what goes to and from them is pickled.
    """

    role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    num_blocks: int = 64
    block_size: int = 16
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 16
    recompute: bool = True
    async_scheduling: bool = False
    tp: int = 1
    windows: tuple[int | None, ...] = (None,)
    uniproc: bool = False
    engine_id: str | None = None
    """None: one that vLLM draws."""


@cache
def _base(connector: str, module: str) -> VllmConfig:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS_PER_GROUP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": 32_000,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(llama), "utf-8")
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN)
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
            ),
            parallel_config=ParallelConfig(),
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both"
            ),
        )


@cache
def structured_output_manager() -> StructuredOutputManager:
    """Unused: no request has a grammar."""
    return StructuredOutputManager(_base("HookedConnector", "tests.vllm.support.hooked_connector"))


def _changed(config: Any, **values: Any) -> Any:
    """A copy without validation, which would adapt it to this machine: no async scheduling on a CPU."""
    changed = copy.copy(config)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def vllm_config(setting: EngineSetting, connector: str, module: str, extra_config: dict[str, Any]) -> VllmConfig:
    """Args: `connector`: the class that vLLM's factory looks for in `module`, and hands `extra_config`."""
    base = _base(connector, module)
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=module,
        kv_role=setting.role,
        engine_id=setting.engine_id,
        kv_load_failure_policy="recompute" if setting.recompute else "fail",
        kv_connector_extra_config=extra_config,
    )
    cache_config = _changed(base.cache_config, block_size=setting.block_size, num_gpu_blocks=setting.num_blocks + 1)
    scheduler = _changed(
        base.scheduler_config,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_num_scheduled_tokens=setting.max_num_batched_tokens,
        async_scheduling=setting.async_scheduling,
    )
    config: VllmConfig = _changed(
        base,
        cache_config=cache_config,
        scheduler_config=scheduler,
        parallel_config=_changed(base.parallel_config, tensor_parallel_size=setting.tp, world_size=setting.tp),
        kv_transfer_config=transfer,
    )
    return config


def of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """What the process of this worker has."""
    ranked: VllmConfig = _changed(config, parallel_config=_changed(config.parallel_config, rank=rank))
    return ranked


@cache
def kv_cache_config(num_blocks: int, block_size: int, windows: tuple[int | None, ...]) -> KVCacheConfig:
    """Groups with two layers each, "layers.<group>.<layer>"."""
    shape = {"block_size": block_size, "num_kv_heads": HEADS, "head_size": HEAD_DIM, "dtype": torch.float32}

    def spec(window: int | None) -> AttentionSpec:
        if window is None:
            return FullAttentionSpec(**shape)
        return SlidingWindowSpec(**shape, sliding_window=window)

    groups = [
        KVCacheGroupSpec([f"layers.{group}.{layer}" for layer in range(LAYERS_PER_GROUP)], spec(window))
        for group, window in enumerate(windows)
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
