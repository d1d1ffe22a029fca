"""Sequences, limits and outcomes: the inputs and the results of the engine's scheduler.

A sequence is one attempt of one request at one engine. Two flags distinguish three kinds:
`prefill_only` (P's part of a disaggregated request), `remote_kv` (D's part: the prompt's KV arrives by a transfer) and
neither (aggregated: local prefill, then decode).

Terms and limits are vLLM's (v1 scheduler, SchedulerConfig).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import attrs
import msgspec
from attrs import validators

from pdflow.cost.capacity import ExtraBlocks
from pdflow.protocol.values import Allocation, Value


class Phase(IntEnum):
    NEW = 0
    WAITING = 1
    """Queued for a seat and blocks, for the first time or after a preemption."""
    LOADING = 2
    """It has a seat and blocks; its KV is being transferred."""
    READY = 3
    """Its KV has arrived; joins the next step that may still take it."""
    RUNNING = 4
    """In every step: prefilling or decoding."""
    GONE = 5


class Dropped(IntEnum):
    """The result of a `drop` for the sequence's blocks."""

    NOT_HERE = 0
    """The sequence is not, or no longer, at this engine: nothing done. Blocks of a finished prefill are the
    protocol's."""
    AT_ONCE = 1
    """It held nothing, or the engine has freed all of it."""
    AFTER_STEP = 2
    """It is in the running step, which completes; the engine frees the blocks at that step's end."""
    BLOCKS_ARE_YOURS = 3
    """It was loading: a WRITE may still land. The engine forgets it, but the caller must release the allocation."""


@attrs.frozen(kw_only=True)
class Limits:
    """vLLM's limits of one engine's scheduler."""

    max_num_seqs: int = attrs.field(default=256, validator=validators.ge(1))
    max_num_batched_tokens: int = attrs.field(default=8192, validator=validators.ge(1))
    block_size: int = attrs.field(default=16, validator=validators.ge(1))
    async_scheduling: bool = False
    """Whether a step is composed while the one before it runs."""
    prompts_first: bool = False
    """vLLM V0's order, without chunked prefill: a step computes prompts, each as a whole, or it decodes, and it decodes
    only if no prompt can be admitted. A remote prompt's last token is computed in a step of prompts."""
    stands_for_loads: bool = False
    """With `prompts_first`: a step that admits remote sequences computes nothing; the host holds the engine until their
    KV has arrived."""
    replicas: int = attrs.field(default=1, validator=validators.ge(1))
    """Replicas of attention in lockstep. The limits above and the pool's blocks are of all together, but a step takes
    no more of one prompt than one replica's share. A sequence keeps the replica that it is given at its admission, in
    turn."""
    extra: ExtraBlocks | None = None
    """The blocks that each sequence takes in addition to those of its context; None: no others."""

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token per step"
            )
        if self.prompts_first and (self.async_scheduling or self.replicas > 1):
            raise ValueError("prompts_first is vLLM V0's, which has neither async_scheduling nor replicas of attention")
        if self.max_num_batched_tokens < self.replicas:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least replicas ({self.replicas})"
            )


class NeverFitsError(ValueError):
    """The sequence needs more KV blocks than the engine's pool has, so it could only wait for ever."""


class Sequence(msgspec.Struct, eq=False):
    """One attempt of a request at one engine. The caller sets the first ten fields; the engine owns the rest."""

    index: int
    prompt_tokens: int
    output_tokens: int = 1
    """Tokens to be generated in all, the first included. Without meaning for `prefill_only`."""
    remote_kv: bool = False
    prefill_only: bool = False
    remote_tokens: int = 0
    """With `remote_kv`: how many of the prompt's tokens are transferred, which admission takes blocks for. 0: all."""
    prefix: tuple[int, ...] = ()
    """Names of the prompt's full prefix blocks, for a pool that remembers them; each stands for all before it, too.
    They may go on with those of blocks that the answer fills."""
    loaded_tokens: int = 0
    """With `remote_kv` and `prefill_only`: how many of the prompt's tokens, from its start on, are transferred. What
    follows is computed."""
    handle: str = ""
    """The caller's own name of the sequence."""
    loads_in_step: bool = False
    """With `remote_kv`: it decodes in the very step that admits it, which waits for its KV layer by layer
    (`layered.py`)."""

    phase: Phase = Phase.NEW
    allocation: Allocation | None = None
    """Blocks for the prompt (after a preemption: for all tokens so far), as admission took them; without those that it
    shares."""
    extra_blocks: int = 0
    """Blocks that it takes at its admission in addition to those of its context, its last ones, which have a block
    table of their own."""
    blocks: int = 0
    """The number of blocks that admission took for the context, the shared ones included. Blocks that decoding added
    are counted by the batch, not here."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV the pool had already, as of the last admission."""
    generated: int = 0
    """Tokens generated, as of the last time that it joined or left the decode batch."""
    admitted_ns: int = -1
    """When it first got its seat and blocks."""
    start_ns: int = -1
    """When its first step here began."""
    first_token_ns: int = -1
    """End of the step that yields its first token; known, and perhaps in the future, once that step is planned."""
    finished_ns: int = -1
    """End of the step that yields its last token, once that has ended."""
    preemptions: int = 0
    token_runs: list[tuple[int, int]] = []
    """(first, last) engine step numbers, ends included, of the uninterrupted runs in which it got a token per step.
    Complete once it has finished. With the step log this gives the time of every token."""

    stamp: int = -1
    """Instant of the last event of the sequence from outside; it is known to steps that start strictly later."""
    local: bool = True
    """Whether its next tokens are computed at this engine: not remote, or recomputing."""
    target: int = 0
    """Tokens that prefilling must compute: the prompt and whatever was generated before a preemption."""
    computed: int = 0
    dropping: bool = False
    last_token_ps: int = -1
    """When the last token before a preemption was generated."""
    run_start: int = -1
    """Step number of the first token of the current run."""
    join_step: int = -1
    join_context: int = 0
    replica: int = 0
    """The replica of attention that computes it."""
    order: int = -1
    """Position in the decode batch's order of joining; -1 outside of it."""


class ChunkBegun(Value, frozen=True, gc=False):
    """A step has begun that computes the next `new` tokens of a prompt, after `computed`. Reported on request."""

    seq: Sequence
    computed: int
    new: int
    start_ns: int
    end_ns: int


class Prefilled(Value, frozen=True, gc=False):
    """A prefill-only sequence has its KV computed. Its seat is free again; its blocks are now the caller's."""

    seq: Sequence
    at_ns: int


class Admitted(Value, frozen=True, gc=False):
    """A remote sequence has its seat and its blocks (`seq.allocation`): the transfer may begin. With `loads_in_step`,
    the step that begins now waits for it."""

    seq: Sequence
    at_ns: int


class Finished(Value, frozen=True, gc=False):
    """A sequence has its last token generated; the engine has freed its blocks."""

    seq: Sequence
    at_ns: int


Outcome: TypeAlias = ChunkBegun | Prefilled | Admitted | Finished
