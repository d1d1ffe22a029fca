"""What the benchmarks of vLLM conclude from what they measure: digests of KV blocks, latencies, CPU of hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.digesting import Recorder, compare
from benchmarks.vllm.latency import CELLS, Column, Sample, remains, report
from benchmarks.vllm.stages import PUSH, Event, requests
from benchmarks.vllm.step_cost import table
from pdflow.protocol.effects import SendLocal
from pdflow.protocol.events import FrameOrdered, PairLanded, Source, SourceCompleted, SourceReady
from pdflow.protocol.ids import Op, Reg, Shards
from pdflow.protocol.messages import Register
from pdflow.protocol.values import Allocation

BLOCK = 4


class Side:
    """The KV of one rank, [block, head, token, content] a layer, and what it writes down."""

    def __init__(
        self, folder: Path, role: str, heads: int, rank: int = 0, opaque: bool = False, dtype: str = "float32"
    ) -> None:
        torch = pytest.importorskip("torch", reason="KV tensors are torch's")
        self.caches = [torch.zeros(6, heads, BLOCK, 2, dtype=getattr(torch, dtype)) for _ in range(2)]
        file = folder / f"{role}-{rank}.jsonl"
        self.recorder = Recorder(file, role, self.caches, rank * heads, [0, 0], opaque)

    def fill(self, blocks: tuple[int, ...], first_head: int = 0) -> None:
        """Write other values for each layer, head and position in a prompt."""
        for layer, cache in enumerate(self.caches):
            for at, block in enumerate(blocks):
                for head in range(cache.shape[1]):
                    for token in range(BLOCK):
                        cache[block, head, token] = 1000 * layer + 100 * (first_head + head) + BLOCK * at + token

    def computed(self, blocks: tuple[int, ...], tokens: int) -> None:
        self.recorder.observe(SourceReady("x", "r", Source(Allocation(1, blocks), tokens, 0, 0, None, False)), ())
        self.recorder.observe(SourceCompleted("x"), ())

    def landed(self, blocks: tuple[int, ...], start: int, tokens: int) -> None:
        reg = Reg("d", 7, 1, "r")
        register = Register(reg, "x", 0, Shards(1, 1, BLOCK), Allocation(1, blocks), start, tokens, 0, 0, 0)
        self.recorder.observe(FrameOrdered(("p.r0",), register), ())
        self.recorder.observe(None, (SendLocal("d", PairLanded(Op(reg, 0, 0), "p.r0")),))


def test_blocks_that_have_landed_are_held_against_those_that_were_computed(tmp_path: Path) -> None:
    p, d = Side(tmp_path, "prefill", 2), Side(tmp_path, "decode", 2)
    p.fill((0, 1, 2))
    d.fill((5, 4, 3))
    p.computed((0, 1, 2), 10)
    d.caches[0][3, 0, 2:] = 99.0  # behind the last token of the prompt, of which nothing is sent
    d.landed((4, 3), BLOCK, 6)
    found = compare(tmp_path)
    assert (found.prompts, found.blocks, found.differ) == (1, 2 * 2 * 2, ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("opaque", [False, True])
def test_a_byte_that_differs_is_found(tmp_path: Path, opaque: bool, dtype: str) -> None:
    p, d = (Side(tmp_path, role, 1, opaque=opaque, dtype=dtype) for role in ("prefill", "decode"))
    for side in (p, d):
        side.fill((0, 1))
    token = 3 if opaque else 1  # whole blocks are compared to their end
    d.caches[1][1, 0, token, 1] = -1
    p.computed((0, 1), 6)
    d.landed((0, 1), 0, 6)
    assert compare(tmp_path).differ == ("x: layer 1, head 0, block 1",)


def test_heads_are_counted_through_ranks(tmp_path: Path) -> None:
    d = Side(tmp_path, "decode", 2)
    for rank in range(2):
        p = Side(tmp_path, "prefill", 1, rank)
        p.fill((0,), first_head=rank)
        p.computed((0,), 4)
    d.fill((2,))
    d.landed((2,), 0, 4)
    found = compare(tmp_path)
    assert (found.blocks, found.differ) == (4, ())


def test_what_remains_is_taken_turn_by_turn() -> None:
    alone, pair = Column("none"), Column("pdflow-push")
    for cell in CELLS:
        alone.cells[cell] = [Sample(0.1, 0.0), Sample(0.2, 0.0), None]
        pair.cells[cell] = [Sample(0.15, 0.02, 0.1, 0.05, 0.14), None, Sample(1.0, 0.02)]
    assert remains(pair, alone, CELLS[0]) == pytest.approx([0.03])
    lines = report([alone, pair]).splitlines()
    (line,) = [each for each in lines if each.startswith("| pdflow-push: what remains")]
    assert line.count("30.0 / 30.0") == len(CELLS)
    assert any(each.startswith("| pdflow-push |") and each.endswith("| 4 |") for each in lines), (
        "one failed in each cell"
    )


def test_cpu_of_hooks_is_by_step_or_by_request() -> None:
    hooks: dict[str, Any] = {"build_connector_meta": [100, 2_000_000], "on_new_request": [10, 1_000_000]}
    lines = table("kv_producer-SCHEDULER", json.loads(json.dumps({"steps": 100, "hooks": hooks})), 10).splitlines()
    assert lines[0] == "kv_producer-SCHEDULER: 100 steps, 20 us a step"
    assert [line.split()[1:] for line in lines[1:]] == [["20.0", "us", "a", "step"], ["100.0", "us", "a", "request"]]


def test_stages_of_requests_that_went_through_all_of_them() -> None:
    def whole(start: int) -> list[Event]:
        kinds = [
            *(("decode", True, "DecodeQueued", ""), ("decode", True, "DecodeAdmitted", "")),
            *(("decode", False, "FrameOrdered", "Register"), ("prefill", False, "Received", "Register")),
            *(("decode", False, "Received", "RegisterAck"), ("decode", False, "Received", "Done")),
            ("decode", True, "PairLanded", ""),
        ]
        return [Event(start + at, *kind) for at, kind in enumerate(kinds)]

    cut_short = whole(100)[:4]
    assert list(requests([*whole(0), *cut_short, *whole(200)], PUSH)) == [
        [0, 1, 2, 3, 5, 6],
        [200, 201, 202, 203, 205, 206],
    ]
