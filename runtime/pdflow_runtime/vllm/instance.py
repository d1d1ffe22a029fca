"""What one vLLM instance is to pdflow: its role, its name, its ranks and the shape of its KV, or why it is not served.

Read from vLLM's configuration, the same in EngineCore and in each worker. What the connector does not serve is refused
here, at the start, in one sentence.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, TypeAlias

import attrs

from pdflow.layout.shapes import KvShape, MlaDims
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.wiring.endpoints import ProtocolConfig
from pdflow_runtime.vllm.options import Options, UnsupportedError, read_options

Role: TypeAlias = Literal["prefill", "decode"]

ROLES: Final[dict[str, Role]] = {"kv_producer": "prefill", "kv_consumer": "decode"}
FRESH_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(_dp[0-9]+)?")
"""The form of the engine_id that vLLM draws at each start, with what it appends for a data-parallel rank."""
ALONE: Final = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""The classes of KV cache whose blocks hold tokens by their position. A sliding window keeps those of the last ones."""
TOGETHER: Final = ("FullAttentionSpec", "SlidingWindowSpec")
"""Those that the groups of one model may be of."""
ALIKE: Final = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype")
"""What groups must have in common: their layers then have one layout, and any block may be any group's."""


@attrs.frozen
class KvGroup:
    """Layers of one block table."""

    layers: tuple[str, ...]
    window: int | None = None
    """Tokens that are kept; None: all."""


@attrs.frozen(kw_only=True)
class Instance:
    """One vLLM instance, or one data-parallel rank of one."""

    role: Role
    info: EngineInfo
    protocol: ProtocolConfig
    num_blocks: int
    options: Options
    dp_rank: int = 0
    in_lockstep: bool = False
    """Data-parallel engines step together: one that has nothing to compute holds the others up."""
    groups: tuple[KvGroup, ...] = (KvGroup(()),)

    def exchanged(self, prompt_tokens: int) -> int:
        """Return of how many tokens of a prompt the KV is exchanged: of all, or, with sliding windows, of all but the
        last. vLLM computes that one anew, but lays out D's windows for the token behind those that are loaded: after a
        load of the whole prompt, the window of its last token may begin in a block that D does not keep."""
        slides = any(group.window is not None for group in self.groups)
        return prompt_tokens - 1 if slides and prompt_tokens > 1 else prompt_tokens

    @property
    def shape(self) -> KvShape:
        return self.protocol.shape

    @property
    def offered_layers(self) -> int:
        """How many pieces P offers a prompt in: one for each layer, or one for all layers."""
        return self.shape.num_layers if self.options.progressive else 1


def instance_of(vllm_config: Any, kv_cache_config: Any) -> Instance:
    """Return what this configuration says. UnsupportedError for what is not served."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    options = read_options(transfer.kv_connector_extra_config or {})
    role = _role(transfer.kv_role)
    _check_parallel(parallel)
    if options.progressive and getattr(parallel, "use_ubatching", False):
        raise UnsupportedError(
            "progressive is not supported with dual batch overlap, which computes a layer in two parts: remove one of "
            "kv_connector_extra_config.progressive and --enable-dbo"
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise UnsupportedError(
            "sleep mode is not supported: peers may still write into KV memory that it frees; turn it off"
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedError("speculative decoding is not supported: its draft layers have their own KV; turn it off")
    groups = _groups(kv_cache_config)
    spec, layers = groups[0].kv_cache_spec, sum(len(group.layer_names) for group in groups)
    shape = _shape(vllm_config.model_config, spec, layers)
    return Instance(
        role=role,
        info=EngineInfo(
            _engine_id(transfer.engine_id, options), Shards(parallel.tensor_parallel_size, 1, spec.block_size)
        ),
        protocol=protocol_of(shape, options),
        num_blocks=kv_cache_config.num_blocks,
        options=options,
        dp_rank=parallel.data_parallel_index,
        in_lockstep=parallel.data_parallel_size > 1,
        groups=tuple(KvGroup(tuple(group.layer_names), _window(group.kv_cache_spec)) for group in groups),
    )


def protocol_of(shape: KvShape, options: Options) -> ProtocolConfig:
    """Return what the endpoints of an instance are configured by. What is pushed is offered piece by piece."""
    pulls = options.transfer_mode == "pull"
    return ProtocolConfig(shape=shape, pulls=pulls, timers=options.timers(), in_pieces=not pulls)


def _role(kv_role: str) -> Role:
    role = ROLES.get(kv_role)
    if role is None:
        raise UnsupportedError(
            f"kv_role {kv_role} is not supported: give prefill instances kv_producer and decode instances kv_consumer"
        )
    return role


def _check_parallel(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError("pipeline parallelism is not supported: set --pipeline-parallel-size 1")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"context parallelism is not supported: set {name} to 1")


def _engine_id(engine_id: str, options: Options) -> str:
    if not FRESH_ID.fullmatch(engine_id) and not options.allow_static_engine_id:
        raise UnsupportedError(
            f"engine_id {engine_id!r} would be the same after a restart: remove it, or set "
            "kv_connector_extra_config.allow_static_engine_id"
        )
    if not engine_id.isprintable() or ".r" in engine_id or not 0 < len(engine_id.encode()) <= 200:
        raise UnsupportedError(f"engine_id {engine_id!r} must be 1 to 200 printable bytes without '.r'")
    return engine_id


def _groups(kv_cache_config: Any) -> list[Any]:
    """Return the groups of KV cache that the layers of the model are in, if they can be served."""
    groups: list[Any] = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    kinds = [type(spec).__name__ for spec in specs]
    if len(groups) == 1 and not _is_served(groups[0], ALONE):
        raise UnsupportedError(f"KV caches of {kinds[0]} are not supported; those of {', '.join(ALONE)} are")
    if len(groups) != 1 and not (groups and all(_is_served(group, TOGETHER) for group in groups)):
        raise UnsupportedError(
            f"models with {len(groups)} KV cache groups ({', '.join(kinds)}) are not supported; groups that are all "
            f"{' or '.join(TOGETHER)} are, and --disable-hybrid-kv-cache-manager makes one group of attention layers"
        )
    for name in ALIKE if len(groups) > 1 else ():
        found = [getattr(spec, name) for spec in specs]
        if any(value != found[0] for value in found):
            raise UnsupportedError(
                f"KV cache groups with {name} {', '.join(map(str, found))} are not supported: {name} must be the same"
            )
    return groups


def _is_served(group: Any, kinds: tuple[str, ...]) -> bool:
    """Whether a group is of one of these kinds, one state for each token, and moved as a whole."""
    spec = group.kv_cache_spec
    special = getattr(group, "is_eagle_group", False) or not getattr(group, "enable_kv_transfer", True)
    return type(spec).__name__ in kinds and getattr(spec, "tokens_per_state", 1) == 1 and not special


def _window(spec: Any) -> int | None:
    window: int | None = spec.sliding_window if type(spec).__name__ == "SlidingWindowSpec" else None
    return window


def _shape(model: Any, spec: Any, layers: int) -> KvShape:
    """Return the shape of the whole model's KV."""
    itemsize = spec.dtype.itemsize
    if type(spec).__name__ == "MLAAttentionSpec":
        return KvShape(layers, 1, spec.head_size, itemsize, spec.block_size, mla=MlaDims(spec.head_size, 0))
    if spec.head_size_v != spec.head_size:
        raise UnsupportedError(
            f"K of {spec.head_size} and V of {spec.head_size_v} values a head are not supported: they must be equal"
        )
    heads = model.get_total_num_kv_heads()
    return KvShape(layers, heads, spec.head_size, itemsize, spec.block_size, packed=True)
