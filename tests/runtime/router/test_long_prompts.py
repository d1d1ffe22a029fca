"""Prompts that cannot fit are refused before they are tokenized, and long ones leave the threads to short ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.chat import read_chat
from pdflow_runtime.router.body_reader import BodyReader
from pdflow_runtime.router.prompts import LEAST_BODY_BYTES, MOST_BODY_BYTES, TOKENS_AT_ONCE, Prompts
from pdflow_runtime.router.tokenizer_pool import INLINE_BYTES, LONG_BYTES, TokenizerPool

CONTEXT = 1000
LONGEST = 8


class CountingTokens:
    """A tokenizer of two letters a token, that counts what it is given."""

    def __init__(self) -> None:
        self.encoded = 0
        """Characters."""
        self.templates = 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.encoded += len(text)
        return [1] * (len(text) // 2)

    def exceeds(self, text: str, most: int) -> bool:
        self.encoded += min(len(text), 4 * most)
        return len(text) // 2 > 2 * most

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        return ["aa"] * len(tokens)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return "aa" * len(tokens)

    def chat(self, messages: Sequence[dict[str, str]], **more: Any) -> str:
        self.templates += 1
        return "".join(message["content"] for message in messages)


@pytest.fixture
def tokens() -> CountingTokens:
    return CountingTokens()


@pytest.fixture
def prompts(tokens: CountingTokens) -> Prompts:
    return Prompts("counting", tokens, 512, CONTEXT, token_bytes=LONGEST)


def chat(*contents: str) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": content} for content in contents]})


def test_bytes_alone_refuse_a_prompt(prompts: Prompts, tokens: CountingTokens) -> None:
    with pytest.raises(OpenAIError, match=rf"context length is {CONTEXT} tokens.*at least 1001 tokens") as refused:
        prompts.of_prompt("é" * (CONTEXT * LONGEST // 2 + 1))
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert tokens.encoded == 0


def test_a_prompt_that_bytes_do_not_refuse_is_counted_no_further_than_needed(
    prompts: Prompts, tokens: CountingTokens
) -> None:
    with pytest.raises(OpenAIError, match="at least 1000 tokens"):
        prompts.of_prompt("a" * (CONTEXT - 1) * LONGEST)
    assert tokens.encoded <= 4 * CONTEXT
    assert len(prompts.of_prompt("a" * 2 * CONTEXT)) == CONTEXT


def test_a_chat_is_refused_before_its_template(prompts: Prompts, tokens: CountingTokens) -> None:
    with pytest.raises(OpenAIError, match="at least 1002 tokens"):
        prompts.of_chat(read_chat(chat(*["a" * (CONTEXT * LONGEST // 2 + 1)] * 2)))
    assert (tokens.encoded, tokens.templates) == (0, 0)
    assert len(prompts.of_chat(read_chat(chat("a" * 100, "a" * 100)))) == 100


def test_the_prompts_of_a_request_are_bounded_together(prompts: Prompts, tokens: CountingTokens) -> None:
    count = TOKENS_AT_ONCE // (CONTEXT - 1)
    assert len(prompts.of_prompts(["a" * 2] * 1024)) == 1024
    assert len(prompts.of_prompts([[1] * (CONTEXT - 1)] * count)) == count
    with pytest.raises(OpenAIError, match=r"together.*in several requests"):
        prompts.of_prompts([[1] * (CONTEXT - 1)] * (count + 1))
    tokens.encoded = 0
    text = "a" * (CONTEXT - 1) * LONGEST
    with pytest.raises(OpenAIError, match="together"):
        prompts.of_prompts([text] * (count + 1))
    assert tokens.encoded == 0
    with pytest.raises(OpenAIError, match="together"):
        prompts.of_prompts(["a" * 2 * (CONTEXT - 1)] * (count + 1))


def test_without_a_bound_prompts_are_counted(tokens: CountingTokens) -> None:
    prompts = Prompts("counting", tokens, 512, CONTEXT)
    with pytest.raises(OpenAIError, match="at least 1000 tokens"):
        prompts.of_prompt("a" * 1_000_000)
    assert tokens.encoded <= 4 * CONTEXT
    assert prompts.body_bytes == MOST_BODY_BYTES


def test_a_prompt_that_no_transfer_can_move_is_refused_for_that(tokens: CountingTokens) -> None:
    with pytest.raises(OpenAIError, match="prompts of at most 10 tokens"):
        Prompts("counting", tokens, 512, CONTEXT, prompt_tokens=10, token_bytes=LONGEST).of_prompt("a" * 88)
    assert tokens.encoded == 0


@pytest.mark.parametrize(
    ("context", "expected"), [(1000, LEAST_BODY_BYTES), (131_072, 131_072 * 48), (1_000_000, MOST_BODY_BYTES)]
)
def test_the_body_limit_follows_from_the_context(tokens: CountingTokens, context: int, expected: int) -> None:
    assert Prompts("counting", tokens, 512, context, token_bytes=LONGEST).body_bytes == expected


@pytest.mark.trio
async def test_one_long_body_is_read_in_a_turn_of_the_event_loop(prompts: Prompts) -> None:
    turns: list[int] = []
    turn = 0

    async def count() -> None:
        nonlocal turn
        while True:
            await trio.lowlevel.checkpoint()
            turn += 1

    async def ask(nursery: trio.Nursery, bodies: BodyReader, body: bytes) -> None:
        await bodies.read(body, lambda _: turns.append(turn))
        if len(turns) == 6:
            nursery.cancel_scope.cancel()

    bodies = BodyReader(prompts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for body in (b"l" * (LONG_BYTES + 1),) * 3 + (b"s" * LONG_BYTES,) * 3:
            nursery.start_soon(ask, nursery, bodies, body)
    short, long = turns[:3], turns[3:]
    assert len({*short}) == 1
    assert len({*long}) == 3


@pytest.mark.trio
async def test_long_prompts_leave_a_thread_to_short_ones() -> None:
    pool = TokenizerPool(threads=2)
    go_on = threading.Event()
    done: list[str] = []

    async def ask(nbytes: int, name: str, wait: bool) -> None:
        await pool.run(nbytes, lambda: wait and go_on.wait(10))
        done.append(name)

    try:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, LONG_BYTES + 1, f"long {number}", True)
            await wait_all_tasks_blocked()
            await ask(INLINE_BYTES + 1, "short", False)
            await ask(INLINE_BYTES, "inline", False)
            assert done == ["short", "inline"]
            go_on.set()
    finally:
        go_on.set()
    assert len(done) == 7


@pytest.mark.trio
async def test_what_waits_is_bounded_by_its_bytes() -> None:
    pool = TokenizerPool(threads=2, waiting_bytes=3 * LONG_BYTES)
    go_on = threading.Event()
    refused: list[OpenAIError] = []

    async def ask() -> None:
        try:
            await pool.run(LONG_BYTES + 1, lambda: go_on.wait(10))
        except OpenAIError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert [error.status for error in refused] == [429, 429]
        go_on.set()
    await ask()
    assert len(refused) == 2, "there is space again"
