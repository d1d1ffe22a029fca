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
    """The kind of memory in which KV lies on its way."""

    BLOCKS = "the engine's KV blocks"
    RING = "a ring of pinned host memory"
    TENSORS = "gathered tensors on the GPU"
    BUFFER = "a GPU buffer that spills to a pinned host pool"
    STORE = "a GPU store with eviction"
    LOOKUP = "a lookup buffer"


class Hop(Enum):
    """One copy or transfer on a piece's way."""

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
    """The rules of one dialect of a method: what waits for what, what is sent early, and what is guarded against."""

    early: bool = False
    """Pieces are sent while what follows is computed. Otherwise when the prompt is."""
    prefill_waits: bool = False
    """P's next step waits until all that the last one computed has been sent."""
    decode_waits: bool = False
    """D's next step waits until the KV of every request that it has admitted is loaded."""
    sending_lanes: int | None = None
    """How many pieces a P rank has under way at most; None for any number."""
    receiving_lanes: int | None = None
    """How many pieces a D rank takes in at once: of READs it posts no more, of what it is sent it takes no more."""
    turns: Turns = Turns.OPERATION
    """The order in which operations' pieces take a rank's lanes. PIECE: the original has one queue of pieces."""
    guards: Guards = attrs.field(factory=Guards)
    """The guards against faults on the way of the pieces."""
    asks: bool = False
    """Each piece is announced by a message, and sent when that has been answered; `wire_profile` may name both."""
    wire_profile: WireProfile = attrs.field(factory=WireProfile)
    """The messages of the original where ours are others."""
    tensors: int = 1
    """A piece goes as so many tensors, one after the other."""
    in_stream: bool = False
    """P's copies to the host are queued on its GPU behind the step that runs."""
    pickles: bool = False
    """Bytes go through a Python thread of either host that pickles them, or takes them apart."""
    hidden_states: bool = False
    """Hidden states of the last layer go with the KV of every rank, whole: D computes nothing of a prompt."""
    answer_first: bool = False
    """D's leg begins when P's answer has come, as that names the prompt to D."""
    page_bytes: int = 0
    """What is contiguous on both sides is posted in descriptors of so many bytes; 0 for a single one."""
    fails_whole_batches: bool = False
    """A prompt whose KV cannot be had takes all with it that came to D's step with it."""
    heartbeat_s: float | None = None
    """Engines report to the router so often, which knows of them by nothing else, unless a scenario says otherwise."""
    salts_keys: bool = False
    """Each process hashes content in its own way: what one has stored no other finds."""


@attrs.frozen(kw_only=True)
class Method:
    """A transfer method; see the module. Texts are for `pdflow methods` and the documentation."""

    name: str
    summary: str
    source: str
    pulls: bool = False
    """D reads, when P's answer has named what there is. Otherwise P writes what D has registered for."""
    stores: bool = False
    """KV rests between the two at a node of its own, which P writes to and D reads from."""
    names_decode: bool = False
    """P knows for which D it computes, so that both legs start at once, whatever the router's order."""
    initiator: str
    grain: Grain = Grain.WHOLE
    p_memory: MemoryKind = MemoryKind.BLOCKS
    """Where P sends from."""
    d_memory: MemoryKind = MemoryKind.BLOCKS
    """Where it lands at D. Other memory than the engine's blocks is asked for before the engine is."""
    staging: Hop | None = None
    """How KV gets where P sends from, unless it is there already."""
    hops: Hops = (Hop.WIRE,)
    """The way of each piece, one after the other."""
    loading: Hop | None = None
    """How KV gets from where it landed into D's blocks, unless it is there already."""
    groups: bool = False
    """Each P rank shares an NCCL group of two with each D rank that it sends to: `nccl/groups.py`."""
    has_workers: bool = False
    """`num_workers` of a scenario is what a P rank has under way at most."""
    back_pressure: str
    on_loss: str
    limits: str
    strict: PipelinePolicy = PipelinePolicy()
    published: PipelinePolicy = PipelinePolicy()
    other_dialects: tuple[str, ...] = ()
    """Dialects besides `strict`; the last of them is the original, faults included, by its own name."""

    @property
    def dialects(self) -> tuple[str, ...]:
        """The names of dialects that a scenario may give."""
        return ("strict", AS_PUBLISHED, *self.other_dialects)

    def pipeline_policy(self, dialect: str) -> PipelinePolicy:
        """Return the rules by which the engines behave in the dialect of that name."""
        return self.published if dialect in (AS_PUBLISHED, *self.other_dialects[-1:]) else self.strict

    def dialect(self, name: str) -> Dialect:
        """Return the protocol's rules in the dialect of that name. Only NIXL's has others than ours."""
        if name == AS_PUBLISHED and self.other_dialects:
            name = self.other_dialects[-1]
        return DIALECTS.get(name, STRICT)

    def adapted(self, progressive: bool, through_host: bool, workers: int | None = None) -> Method:
        """Return this method with what a scenario asks for besides; where it does not apply, nothing changes.

        `progressive`: P writes its blocks layer by layer while it computes the next (vLLM #55589). `through_host`:
        blocks go through host memory on both sides (`kv_buffer_device = "cpu"`). `workers`: of each P rank.
        """
        method = self
        if progressive and not self.pulls and not self.staged_at_p:
            early = attrs.evolve(self.strict, early=True)
            method = attrs.evolve(
                method, grain=Grain.LAYER_CHUNK, strict=early, published=attrs.evolve(self.published, early=True)
            )
        if through_host and self.hops == (Hop.WIRE,) and not self.staged_at_p and not self.staged_at_d:
            method = attrs.evolve(method, hops=(Hop.D2H, Hop.WIRE, Hop.H2D))
        if method.has_workers and workers is not None:
            method = attrs.evolve(
                method,
                strict=attrs.evolve(method.strict, sending_lanes=workers),
                published=attrs.evolve(method.published, sending_lanes=workers),
            )
        return method

    def is_carried(self, pipeline_policy: PipelinePolicy) -> bool:
        """Whether its operations are more than one flow from NIC to NIC, posted at once."""
        lanes = pipeline_policy.sending_lanes is not None or pipeline_policy.receiving_lanes is not None
        return lanes or pipeline_policy.asks or self.in_pieces or self.hops != (Hop.WIRE,) or self.staging is not None

    def takes_in_pieces(self, pipeline_policy: PipelinePolicy) -> bool:
        """Whether D finds room for a prompt piece by piece, as they are announced."""
        return self.staged_at_d and not pipeline_policy.guards.reserves_whole

    @property
    def in_pieces(self) -> bool:
        return self.grain is not Grain.WHOLE

    @property
    def staged_at_p(self) -> bool:
        return self.p_memory is not MemoryKind.BLOCKS

    @property
    def staged_at_d(self) -> bool:
        return self.d_memory is not MemoryKind.BLOCKS
