"""Prefix sharing: the blocks of a prompt that an engine has already, and its own blocks that others may share.

The consequences for a step are decided in `admission` and `scheduler`. As vLLM does, the blocks of a prompt are
remembered as soon as a step is to compute them, so that prompts of one step find each other; those that are
transferred, once they have arrived. The blocks that decoding has filled, where they have names, are remembered when the
answer is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdflow.engine.sequence import Sequence
    from pdflow.memory.caching import CachingPool


class PrefixSharing:
    """Shares the blocks of sequences whose prefixes have names, in `pool`."""

    __slots__ = ("_pool", "span_tokens")

    def __init__(self, pool: CachingPool, block_size: int) -> None:
        self._pool = pool
        self.span_tokens = pool.span * block_size
        """The number of tokens that one name of a prefix stands for."""

    def _most(self, seq: Sequence) -> int:
        """Return how many of its prefix blocks a prompt may find: its last token is computed in any case."""
        return (seq.target - 1) // self.span_tokens

    def found(self, seq: Sequence) -> int:
        """Return how many of a sequence's prefix blocks the pool has."""
        return self._pool.find(seq.prefix, self._most(seq))

    def held(self, seq: Sequence) -> int:
        """Return how many blocks the sequence needs that others hold."""
        return self._pool.held(seq.prefix, self._most(seq))

    def share(self, seq: Sequence, found: int, needed: int) -> None:
        """Give a sequence `needed` blocks, of which those of `found` names are shared and need not be computed."""
        seq.allocation = self._pool.share(seq.prefix, found, needed - found * self._pool.span)
        seq.computed = seq.cached_tokens = found * self.span_tokens

    def remember(self, seq: Sequence, new: int) -> None:
        """Let others share the prefix blocks that this step computes."""
        if seq.allocation is not None:
            count = (seq.computed + new) // self.span_tokens
            self._pool.remember(seq.allocation, min(count, len(seq.prefix)))

    def remember_loaded(self, seq: Sequence) -> None:
        """Let others share the prefix blocks that were transferred."""
        if seq.allocation is not None:
            tokens = seq.loaded_tokens or seq.target
            self._pool.remember(seq.allocation, min(len(seq.prefix), tokens // self.span_tokens))

    def remember_answer(self, seq: Sequence, grown: int) -> int:
        """Let others share the blocks of the answer, where they have names. Returns how many blocks are `grown`
        still."""
        span_tokens = self.span_tokens
        if seq.allocation is None or len(seq.prefix) * span_tokens <= seq.target:
            return grown
        # The KV of the last token was never computed.
        tokens = seq.prompt_tokens + seq.output_tokens - 1
        seq.allocation = self._pool.named(seq.allocation, grown)
        self._pool.remember(seq.allocation, min(tokens // span_tokens, len(seq.prefix)))
        return 0
