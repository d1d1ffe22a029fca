"""The content of simulated prompts: no tokens, but names of the prefix blocks that they share, and a digest."""

from __future__ import annotations

from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request


class PromptContent:
    """The content of the prompts of requests that have not ended. Args: `block_tokens`: tokens that one name of a
    prefix block stands for.
    """

    def __init__(self, block_tokens: int = PREFIX_BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self.cached = False
        """True if any engine or store remembers prefixes; otherwise no names are kept."""
        self.prefixes: dict[int, tuple[int, ...]] = {}
        """The names of full prefix blocks, of the prompt's and, where these have names, of the answer's."""
        self.given: dict[int, int] = {}
        """How many tokens of the answer are at the end of the prompt, of answers that are resumed."""

    def add(self, index: int, request: Request) -> None:
        """Add the prompt of a request that has arrived."""
        if self.cached and request.prefix:
            # The KV of an answer's last token is computed only where it is part of a prompt.
            tokens = request.input_tokens + (request.output_tokens - 1 if request.answer_named else 0)
            self.prefixes[index] = request.prefix[: tokens // self.block_tokens]

    def remove(self, index: int) -> None:
        """Remove the prompt of a request that has ended."""
        self.prefixes.pop(index, None)

    def digest(self, index: int) -> int:
        """Return the digest that stands for a prompt's content: every simulated prompt is different."""
        return index + 1 + (self.given.get(index, 0) << 40)
