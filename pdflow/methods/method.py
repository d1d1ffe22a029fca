"""The description of a transfer method: which side initiates, in what pieces, through which memories, and what waits
for what.

A method is one value of `Method`, in its own file in this package. It says how bytes move. The protocol decides which
side may have them, for how long, and how a request ends whose bytes are lost: it is the same for all methods. Where a
method as published is slower or weaker than with pdflow's rules, there are two values of `PipelinePolicy`, one for each
dialect; no code compares dialect names.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

import attrs

from pdflow.methods.guards import Guards
from pdflow.methods.posting import ConnectorName
from pdflow.methods.wire_profile import WireProfile
from pdflow.protocol.dialect import DIALECTS, STRICT, Dialect

AS_PUBLISHED: Final = "as-published"
"""The dialect in which every method behaves as its original."""


class Grain(Enum):
    """The extent of one piece of a WRITE or READ."""

    WHOLE = "all layers of the prompt"
    LAYER = "a layer of the prompt"
    LAYER_CHUNK = "a layer of a chunk"


class MemoryKind(Enum):
    """The kind of memory that KV is in during a transfer."""

    BLOCKS = "the engine's KV blocks"
    RING = "a ring of pinned host memory"
    TENSORS = "gathered tensors on the GPU"
    BUFFER = "a GPU buffer that spills to a pinned host pool"
    STORE = "a GPU store with eviction"
    LOOKUP = "a lookup buffer"


class Hop(Enum):
    """One copy or transfer of a piece."""

    D2H = "GPU to host"
    H2D = "host to GPU"
    D2D = "within the GPU"
    WIRE = "NIC to NIC"


Hops: TypeAlias = tuple[Hop, ...]


class Turns(Enum):
    """The order in which pieces take the next free lane of a rank: `lanes.py`."""

    OPERATION = "the pieces of the operation that came first"
    PIECE = "the piece that could be posted first"


@attrs.frozen(kw_only=True)
class PipelinePolicy:
    """The rules of one dialect of a method: what waits for what, what is sent early, and which guards it has."""

    equal_tp: bool = False
    """A prefill engine serves only decode engines of its own tensor-parallel size."""
    pipelined: bool = True
    """Prefill engines may have pipeline stages."""
    one_pair: bool = False
    """There is one prefill engine and one decode engine."""
    early: bool = False
    """P sends pieces while it computes the next. Otherwise it sends when the prompt is computed."""
    prefill_waits: bool = False
    """P's next step waits until all that the last one computed has been sent."""
    decode_waits: bool = False
    """D's next step waits until the KV of every request that it has admitted is loaded."""
    loads_by_layer: bool = False
    """A prompt's first step at D begins with the copies into its blocks, and waits for each layer before it computes
    that layer: `engine/layered.py`."""
    sending_lanes: int | None = None
    """The most pieces that a P rank has in flight; None for any number."""
    receiving_lanes: int | None = None
    """The most pieces that a D rank receives at once: it posts no more READs, and accepts no more pieces from P."""
    turns: Turns = Turns.OPERATION
    """The order in which the pieces of operations get a rank's lanes. PIECE: the original has one queue of pieces."""
    guards: Guards = attrs.field(factory=Guards)
    """The guards against faults in the transfer of pieces."""
    asks: bool = False
    """A message announces each piece, which is sent after its answer; `wire_profile` may name both."""
    wire_profile: WireProfile = attrs.field(factory=WireProfile)
    """The messages of the original where they differ from pdflow's."""
    tensors: int = 1
    """The number of tensors that a piece is sent as, one after the other."""
    in_stream: bool = False
    """P's copies to the host are queued on its GPU after the step that runs."""
    pickles: bool = False
    """A Python thread on each host pickles or unpickles the bytes."""
    hidden_states: bool = False
    """All hidden states of the last layer are sent with the KV of every rank: D computes nothing of a prompt."""
    prompts_first: bool = False
    """The original's engines are vLLM V0's: a step computes prompts or decodes, prompts first."""
    answer_first: bool = False
    """D's leg begins after P's answer, which names the prompt to D."""
    page_bytes: int = 0
    """Contiguous memory is posted in descriptors of this many bytes; 0: in one descriptor."""
    fails_whole_batches: bool = False
    """If D cannot get the KV of one prompt, all prompts that entered D's step with it fail."""
    heartbeat_s: float | None = None
    """Seconds between reports of an engine to the router, which learns of engines by them. A scenario may set it."""
    salts_keys: bool = False
    """Each process hashes content with its own salt: no process finds what another has stored."""


@attrs.frozen(kw_only=True)
class Method:
    """A transfer method; see the module. Texts are for `pdflow methods` and the documentation."""

    name: str
    summary: str
    source: str
    pulls: bool = False
    """D reads, after P's answer has named the blocks. Otherwise P writes to the blocks that D has registered."""
    stores: bool = False
    """A separate node stores KV. P writes to it, and D reads from it."""
    names_decode: bool = False
    """P knows the D for which it computes, so both legs start at once, whatever the router's order."""
    hybrid: bool = False
    """It knows KV cache groups: in layers with a window, the window's blocks are moved, and engines keep no others.
    Otherwise they keep whole contexts: vLLM disables its hybrid KV cache manager for connectors without SupportsHMA (PR
    #41847)."""
    initiator: str
    grain: Grain = Grain.WHOLE
    p_memory: MemoryKind = MemoryKind.BLOCKS
    """The memory that P sends from."""
    d_memory: MemoryKind = MemoryKind.BLOCKS
    """The memory in which KV lands at D. If it is not the engine's blocks, D allocates it before it asks the engine."""
    staging: Hop | None = None
    """The copy from P's blocks to `p_memory`; None if that is P's blocks."""
    hops: Hops = (Hop.WIRE,)
    """The copies and transfers of each piece, in order."""
    loading: Hop | None = None
    """The copy from `d_memory` to D's blocks; None if that is D's blocks."""
    groups: bool = False
    """Each P rank shares an NCCL group of two with each D rank that it sends to: `nccl/groups.py`."""
    connector: ConnectorName = "per-tensor"
    """The connector whose posting is simulated, unless a scenario names another."""
    has_workers: bool = False
    """`num_workers` of a scenario is the most pieces that a P rank has in flight."""
    back_pressure: str
    on_loss: str
    limits: str
    strict: PipelinePolicy = PipelinePolicy()
    published: PipelinePolicy = PipelinePolicy()
    other_dialects: tuple[str, ...] = ()
    """More dialects than `strict`; the last of them is the original under its own name, with its faults."""

    @property
    def dialects(self) -> tuple[str, ...]:
        """The names of dialects that a scenario may give."""
        return ("strict", AS_PUBLISHED, *self.other_dialects)

    def is_published(self, dialect: str) -> bool:
        """True if the dialect of that name is that of the method's original."""
        return dialect in (AS_PUBLISHED, *self.other_dialects[-1:])

    def pipeline_policy(self, dialect: str) -> PipelinePolicy:
        """Return the rules of the engines in the dialect of that name."""
        return self.published if self.is_published(dialect) else self.strict

    def dialect(self, name: str) -> Dialect:
        """Return the protocol's rules in the dialect of that name. Only NIXL has dialects with other rules."""
        if name == AS_PUBLISHED and self.other_dialects:
            name = self.other_dialects[-1]
        return DIALECTS.get(name, STRICT)

    def adapted(
        self, progressive: bool, through_host: bool, workers: int | None = None, by_layer: bool | None = None
    ) -> Method:
        """Return this method with options of a scenario. An option that does not apply changes nothing.

        `progressive`: P writes its blocks layer by layer while it computes the next (vLLM #55589). `through_host`:
        blocks go through host memory on both sides (`kv_buffer_device = "cpu"`). `workers`: of each P rank. `by_layer`:
        D's first step of a prompt waits for each layer, or D copies all of them before; None: as the dialect has it.
        """
        method = self
        if progressive and self.writes_blocks:
            early = attrs.evolve(self.strict, early=True)
            method = attrs.evolve(
                method, grain=Grain.LAYER_CHUNK, strict=early, published=attrs.evolve(self.published, early=True)
            )
        if through_host and self.from_blocks_to_blocks:
            method = attrs.evolve(method, hops=(Hop.D2H, Hop.WIRE, Hop.H2D))
        if method.has_workers and workers is not None:
            method = attrs.evolve(
                method,
                strict=attrs.evolve(method.strict, sending_lanes=workers),
                published=attrs.evolve(method.published, sending_lanes=workers),
            )
        if by_layer is not None and method.loading is Hop.H2D:
            method = attrs.evolve(
                method,
                strict=attrs.evolve(method.strict, loads_by_layer=by_layer),
                published=attrs.evolve(method.published, loads_by_layer=by_layer),
            )
        return method

    def is_carried(self, pipeline_policy: PipelinePolicy) -> bool:
        """Whether an operation is more than one flow from NIC to NIC that is posted at once."""
        lanes = pipeline_policy.sending_lanes is not None or pipeline_policy.receiving_lanes is not None
        return lanes or pipeline_policy.asks or self.in_pieces or self.hops != (Hop.WIRE,) or self.staging is not None

    def takes_in_pieces(self, pipeline_policy: PipelinePolicy) -> bool:
        """Whether D allocates memory for a prompt piece by piece, as the pieces are announced."""
        return self.staged_at_d and not pipeline_policy.guards.reserves_whole

    @property
    def writes_blocks(self) -> bool:
        """Whether P writes from its blocks."""
        return not self.pulls and not self.staged_at_p

    @property
    def from_blocks_to_blocks(self) -> bool:
        """Whether KV goes from P's blocks to D's, or to a store's, through no other memory."""
        return self.hops == (Hop.WIRE,) and not self.staged_at_p and not self.staged_at_d

    @property
    def in_pieces(self) -> bool:
        return self.grain is not Grain.WHOLE

    @property
    def staged_at_p(self) -> bool:
        return self.p_memory is not MemoryKind.BLOCKS

    @property
    def staged_at_d(self) -> bool:
        return self.d_memory is not MemoryKind.BLOCKS
