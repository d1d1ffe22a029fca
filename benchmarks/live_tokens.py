"""Right tokens, live: python -m benchmarks.live_tokens [--requests N] [--only WORDS] [--transports NAMES] [--quick]

KV goes from a prefill engine to a decode engine by every method that is served, over real transports, and each case is
judged by four things:

- differ: answers that are not those of one engine alone, asked the same at the same concurrency (float32 where both
  cut their KV alike, float64 where not; bfloat16 beside what one engine differs from itself);
- digests: blocks of which a layer was not the same, byte for byte, in D's blocks when it decodes as P had computed it;
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

from pdflow.engine.sequence import Sequence
from pdflow.methods.catalogue import METHODS
from pdflow.protocol.events import PrefillFinished
from pdflow.protocol.messages import Code
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.engine_node import LiveEngineNode
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg
from tests.runtime.support.kv import kv
from tests.runtime.support.live_pair import Answer, LivePair, cluster, live_pair

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
        layout = f"tp {self.p_tp}->{self.d_tp} block {self.p_block}->{self.d_block}"
        return f"{self.method:18} {self.transport:5} {layout:22} {self.dtype}"


def cases(transports: list[str]) -> list[tuple[Case, int]]:
    """Each with its share of the requests: the main pair gets all of them."""
    found = []
    for method, transport in itertools.product(METHODS, transports):
        main = (method, transport) == ("nixl-push", "shm")
        found.append((Case(method, transport), 1 if main else 10))
        found.append((Case(method, transport, 2, 1, dtype="fp64"), 20))
        found.append((Case(method, transport, 1, 2, 16, 32, "fp64"), 20))
        found.append((Case(method, transport, 2, 2, 32, 16, "fp64"), 20))
        found.append((Case(method, transport, dtype="bf16"), 10))
    return found


class Watch:
    """Digests of each request's KV, by token block of D: as P has computed it, and as D decodes from it. Whichever is
    known first waits for the other: a prompt may be there before P has said that it is whole."""

    def __init__(self, home: LivePair) -> None:
        self.home = home
        self.computed: dict[str, list[list[bytes]]] = {}
        self.loaded: dict[str, list[list[bytes]]] = {}
        self.wrong = self.blocks = 0
        home.p.observe = self.of_p
        self.legs: dict[str, LivePrefillLeg] = {}
        self.begin = home.p.begin
        home.p.begin = self.begun  # type: ignore[method-assign]
        self.load = home.d.engine.loaded
        home.d.engine.loaded = self.of_d  # type: ignore[method-assign]

    def of_p(self, address: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        self.home.observe(address, event, effects, now)
        if type(event) is PrefillFinished:
            leg = self.legs.pop(event.xid)
            self.computed[leg.request_id] = self.of(self.home.p, leg.job.seq)
            self.compare()

    def begun(self, request_id: str, xid: str, tokens: list[int]) -> LivePrefillLeg:
        leg = self.legs[xid] = self.begin(request_id, xid, tokens)
        return leg

    def of_d(self, seq: Sequence) -> None:
        self.loaded[seq.handle] = self.of(self.home.d, seq)
        self.compare()
        self.load(seq)

    def of(self, node: LiveEngineNode, seq: Sequence) -> list[list[bytes]]:
        assert seq.allocation is not None
        whole = kv(node, node.table(seq.allocation).blocks, seq.prompt_tokens)
        size = self.home.d.config.shape.block_size
        return [digests(whole[:, :, :, at : at + size]) for at in range(0, seq.prompt_tokens, size)]

    def compare(self) -> None:
        for name in self.computed.keys() & self.loaded.keys():
            one, other = self.computed.pop(name), self.loaded.pop(name)
            self.blocks += len(one)
            self.wrong += sum(a != b for a, b in zip(one, other, strict=True))


def digests(shard_kv: Any) -> list[bytes]:
    """One for each layer of `[layers, 2, heads, tokens, bytes]`."""
    return [blake2b(np.ascontiguousarray(layer).tobytes(), digest_size=16).digest() for layer in shard_kv]


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
    async with live_pair(scenario, TorchModel(scenario), case.transport) as home:
        watch = Watch(home)
        alone = await answers(count, home.ask_alone)
        handed = await answers(count, home.ask)
        assert all(answer.code is Code.NONE for answer in handed), handed
        differ = differing(alone, handed)
        itself = differing(alone, await answers(count, named(home.ask_alone))) if case.dtype == "bf16" else 0
        shape = home.d.config.shape
        assert not watch.computed, "there are prompts that D has not loaded"
        expected = sum(len(prompt(number)) for number in range(count)) * shape.bytes_per_token
        expected *= 1 if home.store is None else 2  # to the store, and from there
        posted = sum(rank.transfers.bytes_posted for node in (home.p, home.d) for rank in node.ranks.values())
        local = home.d.engine.prompt_tokens_computed - count
        suffix = f" (itself {itself})" if case.dtype == "bf16" else ""
        sys.stdout.write(
            f"{case}  {count:5} requests  differ {differ}{suffix}  digests {watch.wrong} of {watch.blocks:,} blocks  "
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
    parser.add_argument("--transports", default="shm,tcp,nixl", metavar="NAMES")
    asked = parser.parse_args()
    right = True
    for case, divisor in cases(asked.transports.split(",")):
        if all(term in str(case).split() for term in asked.only.split()):
            count = max(CONCURRENCY, asked.requests // divisor // (10 if asked.quick else 1))
            right &= trio.run(measure, case, count)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
