"""Digests of KV blocks, P's once computed and D's once landed, written by `measuring.DigestingConnector`.

A block's digest is over the bytes of one head of one layer of it: of the whole block where its inside is opaque, of the
prompt's tokens where it is a cell a token. Read through vLLM's tensors, and not through the addresses that a transfer
has been given. `compare` holds D's digests against P's.

Each process writes a file of its own in the folder that BENCH_DIGESTS names, a line for each prompt and rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from pdflow.protocol.effects import SendLocal
from pdflow.protocol.events import FrameOrdered, PairLanded, ReadOrdered, Source, SourceCompleted, SourceReady
from pdflow.protocol.messages import Register

FOLDER: Final = "BENCH_DIGESTS"

BlockKey: TypeAlias = tuple[int, int, int]
"""A layer, a head of the whole model, and a block's number in a prompt."""
Digests: TypeAlias = dict[BlockKey, str]


@attrs.frozen
class Comparison:
    """Of all blocks that have landed at a D: how many were compared with P's, and what differs."""

    prompts: int
    blocks: int
    """By layer and head."""
    differ: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.blocks:,} digests of blocks of {self.prompts} prompts at D, {len(self.differ)} differ from P's"


def compare(folder: Path) -> Comparison:
    """Compare what D's ranks have written in a folder with what P's have."""
    found: dict[str, dict[str, Digests]] = {"prefill": {}, "decode": {}}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            blocks = found[record["role"]].setdefault(record["xid"], {})
            blocks.update({(layer, head, block): digest for layer, head, block, digest in record["digests"]})
    compared, differ = 0, []
    for xid, landed in found["decode"].items():
        sent = found["prefill"].get(xid, {})
        for key, digest in landed.items():
            if key not in sent:
                continue  # outside of P's window: D keeps a block for it, and nothing was moved
            compared += 1
            if sent[key] != digest:
                differ.append(f"{xid}: layer {key[0]}, head {key[1]}, block {key[2]}")
    return Comparison(len(found["decode"]), compared, tuple(differ))


class Recorder:
    """Writes what one rank's blocks hold. Args: `caches`: its tensors by layer, [block, head, token, content]; `first`:
    the number of its first head; `groups`: the KV cache group of each layer; `opaque`: blocks are digested whole."""

    def __init__(self, file: Path, role: str, caches: list[Any], first: int, groups: list[int], opaque: bool) -> None:
        self._file: Final = file
        self._role, self._caches, self._first, self._groups, self._opaque = role, caches, first, groups, opaque
        self._sources: Final[dict[str, Source]] = {}
        self._registered: Final[dict[Any, Register]] = {}

    def observe(self, event: Any, effects: tuple[Any, ...]) -> None:
        """Take note of what an endpoint of this rank was given and what it has answered."""
        match event:
            case SourceReady():
                self._sources[event.xid] = event.source
            case SourceCompleted():
                source = self._sources.pop(event.xid)
                self._write(event.xid, source.allocation.tables, 0, source.num_tokens)
            case FrameOrdered(message=Register() as registration) | ReadOrdered(registration=registration):
                self._registered[registration.reg] = registration
        for effect in effects:
            if isinstance(effect, SendLocal) and isinstance(effect.event, PairLanded):
                # The last of several P ranks: by then all heads are there.
                registration = self._registered[effect.event.op.reg]
                stop = registration.token_start + registration.num_tokens
                self._write(registration.xid, registration.target.tables, registration.token_start, stop)

    def _write(self, xid: str, tables: Any, start: int, stop: int) -> None:
        digests = list(self._digests(tables, start, stop))
        with self._file.open("a") as file:
            file.write(json.dumps({"role": self._role, "xid": xid, "digests": digests}) + "\n")

    def _digests(self, tables: Any, start: int, stop: int) -> Iterator[tuple[int, int, int, str]]:
        import torch

        for layer, (cache, group) in enumerate(zip(self._caches, self._groups, strict=True)):
            size = cache.shape[2]
            for index, block in enumerate(tables[group], start // size):
                if block < 0:
                    continue
                first, last = max(start - index * size, 0), min(stop - index * size, size)
                tokens = slice(None) if self._opaque else slice(first, last)
                if first and not self._opaque:
                    continue  # P's digest is over all tokens of the block
                for head in range(cache.shape[1]):
                    data = cache[block, head, tokens].contiguous().view(torch.uint8).numpy().tobytes()
                    yield layer, self._first + head, index, blake2b(data, digest_size=8).hexdigest()
