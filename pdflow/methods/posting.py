"""What posting a transfer means for each connector: the extent of a descriptor, whether neighbours become one, and the
thread of D that posts READs.

A transfer method says how bytes move; the same method has several originals, which lay out KV and post transfers
differently. What a descriptor costs is a property of the link and its transport (`per_descriptor_s` of the link
presets), and of no connector.

vLLM's block pool hands out blocks in the order in which they were freed, and frees a request's blocks in reverse. So
NIXL, which merges neighbours whose addresses ascend, finds few in a pool that has been in use: 9.7 % of the descriptors
in vLLM PR #55841, none of 18,880 in PR #35264. The simulator's pool keeps neighbours together, so for vLLM's connectors
no merges are counted.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, TypeAlias

import attrs

ConnectorName: TypeAlias = Literal[
    "vllm-nixl",
    "vllm-nixl-0.28",
    "vllm-nixl-packed",
    "vllm-mooncake",
    "moriio",
    "sglang",
    "trtllm",
    "pdflow",
    "per-tensor",
]
ReadThread: TypeAlias = Literal["engine", "overlapped", "background"]
"""The thread of D that posts READs. engine: the one that launches steps, before it launches the next one, so that the
step is longer by the posting. overlapped: the same thread, once it has launched the step, so that no step ends before
its postings. background: another thread."""


class Extent(Enum):
    """The extent of one descriptor, before neighbours are merged."""

    TENSOR = "K or V of a layer of a block"
    LAYER = "a layer of a block, K and V together"
    BLOCK = "all layers of a block"
    TRANSFER = "the whole transfer"


@attrs.frozen(kw_only=True)
class Connector:
    """How one implementation posts transfers; see the module. Texts are for the documentation."""

    name: ConnectorName
    summary: str
    source: str
    extent: Extent
    merges: bool
    """Whether blocks that are adjacent at P and at D are counted as one descriptor."""
    reads_on: ReadThread
    """P's WRITEs are posted by a background thread in all of them."""


CONNECTORS: Final[dict[str, Connector]] = {
    connector.name: connector
    for connector in (
        Connector(
            name="vllm-nixl",
            summary="vLLM's NixlConnector and NixlPushConnector, since 0.29",
            source="vLLM 0.32 registers a region per layer with K and V together (layout LBHNC), calls start_load_kv "
            "after the launch of the forward pass (PR #53333), and has a thread that writes (PR #35264)",
            extent=Extent.LAYER,
            merges=False,
            reads_on="overlapped",
        ),
        Connector(
            name="vllm-nixl-0.28",
            summary="the same connectors before: K and V apart, and READs posted before the forward pass",
            source="vLLM PR #35264 (80 layers x 2 x 118 blocks are 18,880 descriptors; postXfer is in decode's "
            "critical path) and PR #53333",
            extent=Extent.TENSOR,
            merges=False,
            reads_on="engine",
        ),
        Connector(
            name="vllm-nixl-packed",
            summary="all layers of a block together: layout BLHNC, before 0.29 enable_cross_layers_blocks",
            source="vLLM PR #30207: 28 layers, 1,024 tokens: 3,528 descriptors without, 1 with, in a fresh pool",
            extent=Extent.BLOCK,
            merges=False,
            reads_on="overlapped",
        ),
        Connector(
            name="vllm-mooncake",
            summary="vLLM's MooncakeConnector",
            source="vLLM 0.32: worker threads call batch_transfer_sync_write with a range per layer and run of blocks; "
            "issue #53237",
            extent=Extent.LAYER,
            merges=False,
            reads_on="background",
        ),
        Connector(
            name="moriio",
            summary="vLLM's MoRIIOConnector",
            source="vLLM 0.32 (PR #29304): merge_contiguous_blocks sorts and merges the blocks of each layer; "
            "READs are posted in start_load_kv, WRITEs by a write worker",
            extent=Extent.LAYER,
            merges=True,
            reads_on="overlapped",
        ),
        Connector(
            name="sglang",
            summary="SGLang over Mooncake or NIXL; its pages have 1 token by default: block_size = 1",
            source="SGLang: group_concurrent_contiguous, a buffer each for K and V of a layer, transfer worker threads "
            "of P (PRs #7236, #26406)",
            extent=Extent.TENSOR,
            merges=True,
            reads_on="background",
        ),
        Connector(
            name="trtllm",
            summary="TensorRT-LLM's C++ cache transceiver: each transfer is gathered in one buffer",
            source="TensorRT-LLM: CacheFormatter::format copies blocks to a staging buffer (PRs #12907, #15519); what "
            "the copies within the GPU take is left out",
            extent=Extent.TRANSFER,
            merges=False,
            reads_on="background",
        ),
        Connector(
            name="pdflow",
            summary="pdflow's own engines and its connector for vLLM",
            source="pdflow/layout/groups.py merges descriptors; the rank's task posts",
            extent=Extent.TENSOR,
            merges=True,
            reads_on="background",
        ),
        Connector(
            name="per-tensor",
            summary="K and V of each layer and block, for methods whose original has no such descriptors",
            source="by definition",
            extent=Extent.TENSOR,
            merges=False,
            reads_on="background",
        ),
    )
}
