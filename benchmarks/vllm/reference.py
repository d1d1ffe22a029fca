"""What one vLLM alone answers to a prompt: the measure of right tokens. Kept on disk, as it never changes.

The instance is started only when an answer is missing, and runs until `stop`: it is idle meanwhile.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from benchmarks.vllm.instances import Instance, Options


class Reference:
    """Answers of vLLM alone, float32, by prompt and number of tokens."""

    def __init__(self, work: Path) -> None:
        self._file = work / "reference.json"
        self._instance = Instance("reference", "alone", Options(core="1"), work)
        self._running = False
        self._kept: dict[str, list[int]] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    async def answer(self, tokens: list[int], max_tokens: int) -> tuple[int, ...]:
        """Return the tokens that vLLM alone answers."""
        key = blake2b(json.dumps([tokens, max_tokens]).encode(), digest_size=12).hexdigest()
        if key not in self._kept:
            if not self._running:
                self._running = True
                self._instance.start()
                await self._instance.ready()
            reply = await self._instance.client.complete(tokens, max_tokens)
            assert reply.ok, f"vLLM alone answered {reply}"
            self._kept[key] = list(reply.tokens)
            self._file.write_text(json.dumps(self._kept))
        return tuple(self._kept[key])

    async def stop(self) -> None:
        await self._instance.stop()
        self._running = False
