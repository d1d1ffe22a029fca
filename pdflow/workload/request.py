"""The requests that a workload consists of, in order of arrival."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from pdflow.protocol.values import Instant

PREFIX_BLOCK_TOKENS: Final = 512
"""Tokens that one prefix hash stands for, as in the Mooncake traces."""

SESSION_BLOCK_TOKENS: Final = 64
"""Tokens that one name in a session stands for. In examples/sessions.toml P finds 71.0 % of all prompt tokens with 512,
78.5 % with 64, and 79.9 % with 16, vLLM's own blocks, at two thirds of the speed."""

WHEN_ONE_ENDS: Final = -1
"""The `arrival_ns` of a request of a closed loop: its client sends it when its last one has ended."""

NEVER: Final = -1
"""The `leaves_ns` of a request whose client does not go away by itself."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request: the lengths and the shared prefix of its prompt, and the number of tokens that answer it.

    `prefix` names the prompt's leading blocks of PREFIX_BLOCK_TOKENS, or in a session of SESSION_BLOCK_TOKENS: equal
    ids at equal places are equal content. The last block may be partly filled; tokens beyond the named blocks are
    shared with nobody. Empty: nothing is shared. With `answer_named` it goes on to name blocks that the answer fills.
    `class_` names what [slo.class] may speak of.

    After `leaves_ns` its client hangs up by itself, if it has no whole answer before. Of a session's turn, `index`
    is its place in the session, and `arrival_ns` is when the session begins.
    """

    index: int
    arrival_ns: Instant
    input_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    class_: str = ""
    answer_named: bool = False
    leaves_ns: int = NEVER


Row: TypeAlias = tuple[int, int, int, tuple[int, ...], str]
"""The content of a line of a trace: ns on the trace's own clock, input and output tokens, prefix, class."""
