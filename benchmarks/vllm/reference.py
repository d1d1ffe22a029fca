"""What one vLLM alone answers to a prompt: the measure of right tokens. Kept on disk, as it never changes.

An answer may differ where the two likeliest tokens are as good as equal, as rounding then decides; it depends on which
other requests are in the batch. The instance is started only when an answer is missing, and runs until `stop`: it is
idle meanwhile.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm.instances import Instance, Options

TIE: Final = 1e-3
"""The gap of two log probabilities, float32, below which either token is right."""


class Reference:
    """Answers of vLLM alone, float32, by prompt and number of tokens."""

    def __init__(self, work: Path) -> None:
        self._file = work / "reference-2.json"
        self._instance = Instance("reference", "alone", Options(core="1"), work)
        self._running = False
        self._kept: dict[str, Any] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    async def agrees(self, given: tuple[int, ...], tokens: list[int], max_tokens: int) -> bool:
        """Return whether these are the tokens that vLLM alone answers, up to the first tie."""
        kept = await self._answer(tokens, max_tokens)
        for mine, theirs, gap in zip(given, kept["tokens"], kept["gaps"], strict=False):
            if mine != theirs:
                return bool(gap < TIE)
        return len(given) == len(kept["tokens"])

    async def _answer(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        key = blake2b(json.dumps([tokens, max_tokens]).encode(), digest_size=12).hexdigest()
        if key not in self._kept:
            if not self._running:
                self._running = True
                self._instance.start()
                await self._instance.ready()
            reply = await self._instance.client.complete(tokens, max_tokens)
            assert reply.ok, f"vLLM alone answered {reply}"
            self._kept[key] = {"tokens": reply.tokens, "gaps": [round(gap, 5) for gap in reply.gaps]}
            self._file.write_text(json.dumps(self._kept))
        return dict(self._kept[key])

    async def stop(self) -> None:
        await self._instance.stop()
        self._running = False
