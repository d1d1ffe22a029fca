"""Right tokens, live: python -m benchmarks.live_tokens [--requests N] [--only WORDS] [--quick]

KV goes from a prefill engine to a decode engine over a real transport, and each case is judged by four things:

- differ: answers that are not those of one engine alone, asked the same at the same concurrency (float32 where both
  cut their KV alike, float64 where not; bfloat16 beside what one engine differs from itself);
- digests: blocks of which a layer was not the same, byte for byte, in D's pool at commit as P had computed it;
- bytes: what the transport was given, over what the prompts' KV weighs;
- local: tokens of prompts that D computed beyond the last of each.

Exits with 1 if any of the first two and the last is not 0, or bytes is not 1, but for bfloat16's tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import trio

from pdflow.layout.shapes import heads_of_rank
from pdflow.protocol.effects import Commit
from pdflow.protocol.events import DecodeAdmitted, PrefillFinished
from pdflow.protocol.messages import Code
from runtime.engine_node import EngineNode
from runtime.engines.job import Sampling
from runtime.models import TorchModel
from tests.runtime.support.house import Answer, House, cluster, house

CONCURRENCY = 16
LONGEST = 4000
OUTPUT = 16


class Case(NamedTuple):
    method: str
    transport: str
    p_tp: int = 1
    d_tp: int = 1
    p_block: int = 16
    d_block: int = 16
    dtype: str = "fp32"

    def overrides(self) -> tuple[str, ...]:
        return (
            f"transfer.method={self.method}",
            f"pool.prefill.tp={self.p_tp}",
            f"pool.decode.tp={self.d_tp}",
            f"pool.prefill.block_size={self.p_block}",
            f"pool.decode.block_size={self.d_block}",
            f"model.kv_dtype={self.dtype}",
            f"model.weight_dtype={self.dtype}",
            "pool.prefill.kv_tokens=98304",
            "pool.decode.kv_tokens=98304",
            "pool.prefill.max_num_batched_tokens=2048",
            "pool.decode.max_num_batched_tokens=2048",
            "pool.decode.enable_prefix_caching=false",
        )

    def __str__(self) -> str:
        cut = f"tp {self.p_tp}->{self.d_tp} block {self.p_block}->{self.d_block}"
        return f"{self.method:10} {self.transport:5} {cut:22} {self.dtype}"


def cases() -> list[tuple[Case, int]]:
    """Each with its share of the requests: the main pair gets all of them."""
    found = []
    for method, transport in itertools.product(("nixl-push", "nixl-pull"), ("shm", "tcp")):
        main = method == "nixl-push" and transport == "shm"
        found.append((Case(method, transport), 1 if main else 10))
        found.append((Case(method, transport, 2, 1, dtype="fp64"), 20))
        found.append((Case(method, transport, 1, 2, 16, 32, "fp64"), 20))
        found.append((Case(method, transport, 2, 2, 32, 16, "fp64"), 20))
        found.append((Case(method, transport, dtype="bf16"), 10))
    return found


class Watch:
    """Digests of each request's KV, by token block of D: as P computed it, and as D commits to it."""

    def __init__(self, home: House) -> None:
        self.home = home
        self.computed: dict[str, Any] = {}
        self.admitted: dict[str, DecodeAdmitted] = {}
        self.wrong = self.blocks = 0
        home.p.observe = self.of_p
        home.d.observe = self.of_d

    def of_p(self, address: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        self.home.observe(address, event, effects, now)
        if type(event) is PrefillFinished:
            self.computed[event.xid] = kv(self.home.p, event.allocation.blocks, event.num_tokens)

    def of_d(self, address: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        self.home.observe(address, event, effects, now)
        if type(event) is DecodeAdmitted:
            self.admitted[event.request_id] = event
        for effect in effects:
            if type(effect) is Commit:
                self.compare(self.admitted.pop(effect.request_id))

    def compare(self, admitted: DecodeAdmitted) -> None:
        theirs = self.computed.pop(f"x-{admitted.request_id}")
        ours = kv(self.home.d, admitted.allocation.blocks, admitted.num_tokens)
        theirs = theirs[:, :, :, admitted.token_start : admitted.token_start + admitted.num_tokens]
        size = self.home.d.place.shape.block_size
        for start in range(0, admitted.num_tokens, size):
            self.blocks += 1
            pair = [digests(whole[:, :, :, start : start + size]) for whole in (theirs, ours)]
            self.wrong += pair[0] != pair[1]


def digests(part: Any) -> list[bytes]:
    """One for each layer of `[layers, 2, heads, tokens, bytes]`."""
    return [blake2b(np.ascontiguousarray(layer).tobytes(), digest_size=16).digest() for layer in part]


def kv(node: EngineNode, blocks: tuple[int, ...], tokens: int) -> Any:
    """`[layers, 2, heads, tokens, cell_bytes]`: a copy, in whatever way the engine cuts it."""
    shape = node.place.shape
    found = np.empty((shape.num_layers, 2, shape.stored_heads, tokens, shape.cell_bytes), np.uint8)
    for number, rank in enumerate(node.ranks.values()):
        memory = rank.memory
        view = np.frombuffer(rank.view, np.uint8, rank.kv_bytes).reshape(
            memory.num_layers, 2, memory.num_blocks, memory.num_heads, memory.block_size, memory.cell_bytes
        )
        mine = view[:, :, list(blocks)].transpose(0, 1, 3, 2, 4, 5)
        flat = mine.reshape(memory.num_layers, 2, memory.num_heads, -1, memory.cell_bytes)
        heads = heads_of_rank(shape.stored_heads, len(node.ranks), number)
        found[:, :, heads.start : heads.stop] = flat[:, :, :, :tokens]
    return found


def prompt(number: int) -> list[int]:
    """Lengths from 1 to 4,000 tokens, most of them short."""
    length = 1 + int((number * 0.6180339887 % 1) ** 3 * LONGEST) if number else LONGEST
    return [(number * 7919 + at * 31 + (at * at) % 97) % 500 + 5 for at in range(length)]


async def answers(count: int, ask: Any) -> list[Answer]:
    """Of so many prompts, so many at a time."""
    found: dict[int, Answer] = {}
    left = iter(range(count))

    async def work() -> None:
        for number in left:
            found[number] = await ask(str(number), prompt(number), Sampling(max_tokens=OUTPUT, ignore_eos=True))

    async with trio.open_nursery() as nursery:
        for _ in range(CONCURRENCY):
            nursery.start_soon(work)
    return [found[number] for number in range(count)]


def differing(one: list[Answer], other: list[Answer]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


async def measure(case: Case, count: int) -> bool:
    scenario = cluster(*case.overrides())
    async with house(scenario, TorchModel(scenario), case.transport) as home:
        watch = Watch(home)
        alone = await answers(count, home.ask_alone)
        handed = await answers(count, home.ask)
        assert all(answer.code is Code.NONE for answer in handed), handed
        differ = differing(alone, handed)
        itself = differing(alone, await answers(count, named(home.ask_alone))) if case.dtype == "bf16" else 0
        shape = home.d.place.shape
        expected = sum(len(prompt(number)) for number in range(count)) * shape.bytes_per_token
        posted = sum(rank.bytes_posted for node in (home.p, home.d) for rank in node.ranks.values())
        local = home.d.engine.prompt_tokens_computed - count
        beside = f" (itself {itself})" if case.dtype == "bf16" else ""
        sys.stdout.write(
            f"{case}  {count:5} requests  differ {differ}{beside}  digests {watch.wrong} of {watch.blocks:,} blocks  "
            f"bytes {posted / expected:.3f} of {expected / 1e6:,.0f} MB  local {local}\n"
        )
        sys.stdout.flush()
        return not watch.wrong and posted == expected and not local and (case.dtype == "bf16" or not differ)


def named(ask: Any) -> Any:
    return lambda name, tokens, sampling: ask(f"again {name}", tokens, sampling)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="of the main pair; the others get a part of it")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with these words in their names")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    asked = parser.parse_args()
    right = True
    for case, part in cases():
        if all(word in str(case).split() for word in asked.only.split()):
            count = max(CONCURRENCY, asked.requests // part // (10 if asked.quick else 1))
            right &= trio.run(measure, case, count)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
