"""Both halves of the connector with real ranks: threads, streams and transports over torch tensors, and no vLLM.

P's engine writes a pattern into its tensors instead of computing. What lands at D must be that pattern, block by block,
for every transport, method, layout and parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import trustme

torch = pytest.importorskip("torch", reason="KV tensors are torch's")

from pdflow.layout.shapes import KvShape, MlaDims  # noqa: E402
from pdflow.protocol.ids import EngineInfo, Shards  # noqa: E402
from pdflow.protocol.values import NO_BLOCK, BlockTables, blocks_of  # noqa: E402
from pdflow_runtime.security.tls import KEYS  # noqa: E402
from pdflow_runtime.transports.at_host import AtHost  # noqa: E402
from pdflow_runtime.transports.nixl import NixlTransport, require  # noqa: E402
from pdflow_runtime.transports.tcp import TcpTransport  # noqa: E402
from pdflow_runtime.vllm.instance import Instance, KvGroup, Role, protocol_of  # noqa: E402
from pdflow_runtime.vllm.options import Options, UnsupportedError  # noqa: E402
from pdflow_runtime.vllm.scheduler.decode_side import DecodeSide  # noqa: E402
from pdflow_runtime.vllm.scheduler.guard import GuardedSide  # noqa: E402
from pdflow_runtime.vllm.scheduler.prefill_side import PrefillSide  # noqa: E402
from pdflow_runtime.vllm.security import shared_tls  # noqa: E402
from pdflow_runtime.vllm.worker.kv_memory import adopted_memory, layer_groups  # noqa: E402
from pdflow_runtime.vllm.worker.worker_side import WorkerSide  # noqa: E402
from tests.runtime.support.certificates import certify  # noqa: E402
from tests.runtime.support.obligations import exposed_words  # noqa: E402
from tests.runtime.vllm.support.fake_engine import Request, Status, VllmEngine  # noqa: E402
from tests.runtime.vllm.support.pair import must_not_break  # noqa: E402

LAYERS = ("layers.0", "layers.1", "layers.2")
BLOCKS = 12
BLOCK = 16
HEADS = 4
DIM = 8
TIMEOUT_S = 20.0
"""Seconds in which a request must end: on a busy machine, and for no other reason."""


def _nixl() -> Any:
    require()
    return NixlTransport


TRANSPORTS = [
    pytest.param(lambda: TcpTransport, id="tcp"),
    pytest.param(_nixl, id="nixl", marks=pytest.mark.nixl),
]


class Case(NamedTuple):
    """A model and how its KV lies. `permutation`: of [layer, block, head, token, value] in memory, as vLLM has it.
    `grouped`: the second layer is in a group of its own, with this `window`, and has the tensor of the first one, as
    layers of unlike groups do in vLLM."""

    backend: str
    permutation: tuple[int, ...] = (0, 1, 2, 3, 4)
    mla: bool = False
    grouped: bool = False
    window: int | None = None

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        if not self.grouped:
            return (KvGroup(LAYERS),)
        return KvGroup((LAYERS[0], LAYERS[2])), KvGroup((LAYERS[1],), self.window)

    def group_of(self, layer: str) -> int:
        return next(number for number, group in enumerate(self.groups) if layer in group.layers)

    def shape(self) -> KvShape:
        if self.mla:
            return KvShape(len(LAYERS), 1, DIM, 4, BLOCK, mla=MlaDims(DIM, 0))
        return KvShape(len(LAYERS), HEADS, DIM, 4, BLOCK, packed=True)


CASES = {
    "whole heads": Case("CPU_ATTN"),
    "LBHNC": Case("FLASH_ATTN"),
    "LBNHC": Case("FLASH_ATTN", (0, 1, 3, 2, 4)),
    "BLHNC": Case("FLASHINFER", (1, 0, 2, 3, 4)),
    "MLA": Case("FLASHMLA", mla=True),
    "whole heads, sliding": Case("CPU_ATTN", grouped=True, window=20),
    "LBHNC, two groups": Case("FLASH_ATTN", grouped=True),
    "LBHNC, sliding": Case("FLASH_ATTN", grouped=True, window=20),
    "BLHNC, sliding": Case("FLASHINFER", (1, 0, 2, 3, 4), grouped=True, window=20),
}


def caches(case: Case, tp: int) -> dict[str, Any]:
    """The tensors of one rank: [block, head, token, content] for each layer; layer-compact ones in allocations of their
    own."""
    found = _caches(case, tp)
    if case.grouped:
        found[LAYERS[1]] = found[LAYERS[0]]
    return found


def _caches(case: Case, tp: int) -> dict[str, Any]:
    heads, content = (1, DIM) if case.mla else (HEADS // tp, 2 * DIM)
    logical = (len(LAYERS), BLOCKS, heads, BLOCK, content)
    if case.permutation[0] == 0:
        one = tuple(axis - 1 for axis in case.permutation[1:])
        inverse = [one.index(axis) for axis in range(4)]
        physical = [logical[1:][axis] for axis in one]
        return {layer: torch.zeros(physical).permute(inverse) for layer in LAYERS}
    inverse = [case.permutation.index(axis) for axis in range(5)]
    whole = torch.zeros([logical[axis] for axis in case.permutation]).permute(inverse)
    return {layer: whole[number] for number, layer in enumerate(LAYERS)}


class Side:
    """One instance: its scheduler's half and its workers' halves around a fake engine."""

    def __init__(
        self, role: Role, tp: int, case: Case, transport: Any, options: Options, numbers: Iterator[int]
    ) -> None:
        shape = case.shape()
        info = EngineInfo(f"{role}-{next(numbers)}", Shards(tp, 1, BLOCK))
        protocol = protocol_of(shape, options)
        groups, windows = case.groups, tuple([group.window for group in case.groups])
        instance = Instance(role=role, info=info, protocol=protocol, num_blocks=BLOCKS, options=options, groups=groups)
        incarnation, tls = next(numbers), shared_tls(options)
        self.case, self.tp = case, tp
        self.tensors = [caches(case, tp) for _ in range(tp)]
        self.workers = [WorkerSide(instance, rank, incarnation) for rank in range(tp)]
        for worker, tensors in zip(self.workers, self.tensors, strict=True):
            memory = adopted_memory(tensors, shape, tp, case.backend, "", BLOCKS, layer_groups(LAYERS, groups))
            worker.start(memory, AtHost(transport, "127.0.0.1", tls), LAYERS, tls)
        ranks = tuple([worker.address for worker in self.workers if worker.address])
        side: Any
        if role == "prefill":
            side = PrefillSide(instance, incarnation, 7, ranks, time.monotonic_ns)
        else:
            side = DecodeSide(instance, incarnation, 7, time.monotonic_ns)
        self.side = side
        guarded = GuardedSide(side, must_not_break)
        self.engine = VllmEngine(
            guarded,
            list(self.workers),
            num_blocks=BLOCKS,
            block_size=BLOCK,
            layers=LAYERS,
            windows=windows,
            compute=self.compute,
        )
        side.bind(self.engine.pool, lambda request_id: self.engine.requests[request_id].tables)
        self.named: list[tuple[tuple[int, ...], ...]] = []
        """The block tables of each allocation that the protocol was told of."""
        allocation_of = side.allocation

        def recorded(tables: Any) -> Any:
            allocation = allocation_of(tables)
            self.named.append(allocation.tables)
            return allocation

        side.allocation = recorded

    def compute(self, worker: WorkerSide, layer: str) -> None:
        """Write what no other head, token or layer has, into the blocks of P's requests."""
        if self.side.instance.role == "prefill":
            computed = pattern(self.case, self.tp, worker.rank, LAYERS.index(layer))
            for request in self.engine.requests.values():
                blocks = list(blocks_of([request.tables[self.case.group_of(layer)]]))
                self.tensors[worker.rank][layer][blocks] = computed[blocks]

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()


def pattern(case: Case, tp: int, rank: int, layer: int) -> Any:
    """[block, head, token, content] of one rank and layer: numbers that name where they belong."""
    heads, content = (1, DIM) if case.mla else (HEADS // tp, 2 * DIM)
    first = 0 if case.mla else rank * heads
    block, head, token, value = (
        torch.arange(size).reshape([-1 if axis == at else 1 for axis in range(4)])
        for at, size in enumerate((BLOCKS, heads, BLOCK, content))
    )
    return (((layer * BLOCKS + block) * HEADS + head + first) * BLOCK + token) * 2 * DIM + value + 1.0


@contextmanager
def sides(
    transport: Any,
    case: Case,
    mode: Literal["push", "pull"] = "push",
    tps: tuple[int, int] = (1, 1),
    progressive: bool = False,
    certificates: Mapping[str, str] | None = None,
) -> Iterator[tuple[Side, Side]]:
    options = Options(transfer_mode=mode, transport="tcp", progressive=progressive, **(certificates or {}))
    numbers = count(1)
    opened: list[Side] = []
    try:
        for role, tp in zip(("prefill", "decode"), tps, strict=True):
            opened.append(Side(role, tp, case, transport, options, numbers))  # type: ignore[arg-type]
        yield opened[0], opened[1]
    finally:
        for each in opened:
            each.close()


def until(those: tuple[Side, Side], condition: Callable[[], bool]) -> None:
    """Step both engines until the condition holds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "nothing comes of it"
        for each in those:
            each.engine.step()
        time.sleep(0.001)


def hand_over(p: Side, d: Side, name: str, tokens: int) -> tuple[Request, BlockTables]:
    """A prompt from P to D, whose KV has landed there. Returns D's request and P's blocks."""
    p.engine.add_request(Request(f"p-{name}", tokens, 1, {"do_remote_decode": True}))
    until((p, d), lambda: f"p-{name}" in p.engine.answers)
    status, answer = p.engine.answers[f"p-{name}"]
    assert status is Status.FINISHED_LENGTH_CAPPED
    request = Request(f"d-{name}", tokens, 2, answer)
    d.engine.add_request(request)
    until((p, d), lambda: request.status in (Status.RUNNING, Status.FINISHED_LENGTH_CAPPED))
    return request, p.named[-1]


def assert_landed(case: Case, d: Side, source: BlockTables, target: BlockTables, tokens: int) -> None:
    """Every token that D keeps of the prompt is what P's pattern has for its block at P."""
    tokens = d.side.instance.exchanged(tokens)
    for rank, tensors in enumerate(d.tensors):
        for number, layer in enumerate(LAYERS):
            expected = pattern(case, d.tp, rank, number)
            group = case.group_of(layer)
            for index, (at, to) in enumerate(zip(source[group], target[group], strict=True)):
                if to == NO_BLOCK:
                    continue
                assert at != NO_BLOCK
                stop = BLOCK if case.backend == "CPU_ATTN" else min(BLOCK, tokens - index * BLOCK)
                assert torch.equal(tensors[layer][to][:, :stop], expected[at][:, :stop]), (rank, layer, index)


@pytest.mark.slow
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_land_where_they_belong(
    transport: Any, mode: Literal["push", "pull"], case: str, tps: tuple[int, int]
) -> None:
    model = CASES[case]
    with sides(transport(), model, mode, tps) as (p, d):
        for name, tokens in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 5)):
            _, source = hand_over(p, d, str(name), tokens)
            assert_landed(model, d, source, d.named[-1], tokens)
            until((p, d), lambda: not p.engine.has_work() and not d.engine.has_work())
            assert not any(exposed_words(worker._node.rank) for worker in p.workers), "a word outlives its lease"
            holes = [table.count(NO_BLOCK) for table in d.named[-1]]
            skipped = 0 if model.window is None else max(0, tokens - model.window) // BLOCK
            assert holes == [0, skipped][: len(model.groups)]
        assert not any(p.engine.pool.references)
        assert not any(d.engine.pool.references)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["whole heads", "LBHNC", "whole heads, sliding", "LBHNC, sliding"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_layers_leave_while_the_prompt_is_computed(transport: Any, case: str) -> None:
    model = CASES[case]
    with sides(transport(), model, progressive=True) as (p, d):
        _, source = hand_over(p, d, "x", 3 * BLOCK - 5)
        assert_landed(model, d, source, d.named[-1], 3 * BLOCK - 5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_with_certificates_of_one_authority_are_peers(
    transport: Any, mode: Literal["push", "pull"], tmp_path: Path
) -> None:
    certify(tmp_path, trustme.CA())
    files = {key: str(tmp_path / key) for key in KEYS}
    with sides(transport(), CASES["LBHNC"], mode, certificates=files) as (p, d):
        _, source = hand_over(p, d, "x", 20)
        assert_landed(CASES["LBHNC"], d, source, d.named[-1], 20)


@pytest.mark.slow
def test_a_rank_of_another_authority_gets_no_kv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The prompt is computed at D."""
    opened, numbers = [], count(1)
    for role in ("prefill", "decode"):
        (folder := tmp_path / role).mkdir()
        certify(folder, trustme.CA())
        options = Options(transport="tcp", **{key: str(folder / key) for key in KEYS})
        opened.append(Side(role, 1, CASES["LBHNC"], TcpTransport, options, numbers))  # type: ignore[arg-type]
    p, d = opened
    try:
        request, _ = hand_over(p, d, "x", 20)
        assert request.num_computed_tokens
        assert not any(tensor.any() for tensor in d.tensors[0].values())
        assert "certificate" in caplog.text
    finally:
        p.close()
        d.close()


def test_certificates_are_given_whole(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tls_key: is missing: TLS needs tls_cert, tls_key and tls_ca"):
        shared_tls(Options(tls_cert="host.crt", tls_ca="ca.crt"))
    with pytest.raises(UnsupportedError, match=r"tls_cert: .*No such file"):
        shared_tls(Options(**{key: str(tmp_path / key) for key in KEYS}))
    with pytest.raises(UnsupportedError, match=r"tls_key: is empty; it must be a file"):
        shared_tls(Options(tls_cert="host.crt", tls_key="", tls_ca="ca.crt"))
    assert shared_tls(Options()) is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    ("cases", "found"),
    [
        (("LBHNC", "whole heads"), ("FLASH_ATTN", "CPU_ATTN")),
        (("LBHNC", "LBHNC, two groups"), ("different KV cache groups",)),
    ],
    ids=str,
)
def test_ranks_of_other_layouts_refuse_each_other(
    mode: Literal["push", "pull"], cases: tuple[str, str], found: tuple[str, ...], caplog: Any
) -> None:
    """The prompt is computed at D."""
    numbers = count(1)
    options = Options(transfer_mode=mode, transport="tcp")
    p = Side("prefill", 1, CASES[cases[0]], TcpTransport, options, numbers)
    d = Side("decode", 1, CASES[cases[1]], TcpTransport, options, numbers)
    try:
        request, _ = hand_over(p, d, "x", 20)
        assert request.num_computed_tokens
        assert not any(tensor.any() for tensor in d.tensors[0].values())
        assert all(name in caplog.text for name in found)
    finally:
        p.close()
        d.close()
