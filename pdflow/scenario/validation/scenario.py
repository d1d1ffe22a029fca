"""The rules between the parts of a scenario; each rule gives complaints and knows nothing of files.

A rule looks only at parts that are sound by themselves, so one wrong key never hides or invents another complaint.
Sources of the protocol's rules: spec 1.4 (TP), spec 1.5 and C12 (block sizes).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from pdflow.cost.specs import ModelSpec
from pdflow.layout.ranks import check_tp
from pdflow.layout.shapes import LayoutError
from pdflow.methods.catalogue import METHODS
from pdflow.scenario.reading.convert import Complaint, did_you_mean
from pdflow.scenario.reading.document import ScenarioTables
from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.scenario import Pool
from pdflow.scenario.schema.transfer import Transfer
from pdflow.scenario.validation.faults import check_faults
from pdflow.scenario.validation.fit import kv_shape_of, kv_tokens_of, moves_groups
from pdflow.scenario.validation.memory import check_memory, check_store
from pdflow.scenario.validation.router import check_router, check_scales
from pdflow.scenario.validation.serve import check_serve
from pdflow.scenario.validation.workload import check_longest_request, check_workload

NAME: Final = re.compile(r"[\w.+-]+")
"""The form of a pool's name, which becomes part of addresses, track names and lines of text."""

PlacedPool: TypeAlias = tuple[KeyPath, Pool]


def check(tables: ScenarioTables) -> Iterator[Complaint]:
    """Yield everything that is wrong between parts that are sound by themselves."""
    pools: list[PlacedPool] = [(("pool", index), pool) for index, pool in enumerate(tables.pools) if pool is not None]
    complete = bool(tables.pools) and None not in tables.pools
    yield from check_workload(tables)
    if complete:
        yield from _roles(pools)
    yield from _names(pools)
    yield from _devices(pools)
    yield from _scheduling(tables.transfer, pools)
    if tables.transfer is not None:
        yield from _timers(tables.transfer)
        yield from _dialect(tables.transfer)
        yield from _limits(tables.transfer, pools)
        yield from _blocks(tables.transfer, pools)
        yield from check_memory(tables.transfer, pools, [scale for scale in tables.scales if scale is not None])
    if tables.model is not None:
        fitting = []
        for path, pool in pools:
            complaints = list(_model_fits(tables.model, path, pool))
            yield from complaints
            if not complaints:
                fitting.append((path, pool))
        if tables.transfer is not None:
            yield from _pairs(tables.model, tables.transfer, fitting)
            yield from _states(tables.model, tables.transfer, fitting)
            yield from check_store(tables.transfer, tables.model, fitting)
        if tables.workload is not None:
            yield from check_longest_request(tables.model, tables.workload, [pool for _, pool in fitting])
    if tables.network is not None:
        yield from _network(tables.network, pools, complete)
    if tables.router is not None:
        yield from check_router(tables.router, tables.transfer, [pool for _, pool in pools] if complete else None)
    yield from check_scales(tables.scales, [pool for _, pool in pools] if complete else None)
    if tables.serve is not None:
        yield from check_serve(tables.serve, tables.transfer)
    yield from check_faults(tables, [pool for _, pool in pools] if complete else None)


def _roles(pools: list[PlacedPool]) -> Iterator[Complaint]:
    roles = {pool.role for _, pool in pools}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role not in roles and (other in roles or "aggregated" not in roles):
            yield Complaint(("pool",), f'no pool has role = "{role}", expected at least one')
    for path, pool in pools:
        if pool.role != "prefill" and pool.pp > 1:
            yield Complaint((*path, "pp"), f"is {pool.pp}, expected 1: only prefill engines can have pipeline stages")


def _names(pools: list[PlacedPool]) -> Iterator[Complaint]:
    seen: set[str] = set()
    for path, pool in pools:
        if not NAME.fullmatch(pool.name):
            what = 'expected letters, digits, ".", "_", "+" and "-" only: addresses and files contain it'
            yield Complaint((*path, "name"), f"is {pool.name!r}, {what}")
        if pool.name in seen:
            yield Complaint((*path, "name"), f'is "{pool.name}", the name of an earlier pool; choose another')
        seen.add(pool.name)


def _devices(pools: list[PlacedPool]) -> Iterator[Complaint]:
    for path, pool in pools:
        if pool.device == "cuda" and pool.engine == "synthetic":
            yield Complaint(
                (*path, "device"), 'is "cuda", expected "cpu", or engine = "torch": a synthetic engine computes nothing'
            )
        if pool.devices and pool.device == "cpu":
            yield Complaint((*path, "devices"), 'is set, expected it only with device = "cuda": it numbers GPUs')


def _scheduling(transfer: Transfer | None, pools: list[PlacedPool]) -> Iterator[Complaint]:
    """Check that engines with vLLM V0's scheduling are asked for nothing that came after it."""
    by_layer = transfer is not None and transfer.method == "cpu-staged" and transfer.load_by_layer is not False
    for path, pool in pools:
        if pool.scheduling != "v0":
            continue
        where = (*path, "scheduling")
        if pool.attention_replicas > 1:
            yield Complaint(where, 'is "v0", expected "v1" with dp_attention')
        if pool.role != "decode" or not by_layer or transfer is None:
            continue
        if transfer.load_by_layer or transfer.dialect != "strict":
            loads = "transfer.load_by_layer, by default as-published, loads prompts in steps that decode"
            yield Complaint(where, f'is "v0", expected "v1": {loads}; or set it to false')


def _timers(transfer: Transfer) -> Iterator[Complaint]:
    for shorter, longer in (
        ("suspect_s", "dead_s"),
        ("cancel_first_s", "cancel_last_s"),
        ("backoff_first_s", "backoff_last_s"),
    ):
        low, high = getattr(transfer, shorter), getattr(transfer, longer)
        if low > high:
            yield Complaint(("transfer", longer), f"is {high:g}, expected at least {shorter}, which is {low:g}")


def _dialect(transfer: Transfer) -> Iterator[Complaint]:
    spoken = METHODS[transfer.method].dialects
    if transfer.dialect not in spoken:
        expected = f"expected {' or '.join(spoken)}: {transfer.method} has no other"
        yield Complaint(("transfer", "dialect"), f'is "{transfer.dialect}", {expected}')
    elif transfer.progressive and not METHODS[transfer.method].dialect(transfer.dialect).control_frames:
        expected = 'expected false, or dialect = "strict": vLLM 0.32 writes a prompt only after all of it is computed'
        yield Complaint(("transfer", "progressive"), f"is true, {expected}")


def _limits(transfer: Transfer, pools: list[PlacedPool]) -> Iterator[Complaint]:
    """Yield what the original of a method does not support."""
    policy = METHODS[transfer.method].pipeline_policy(transfer.dialect)
    senders, receivers = _of_role(pools, "prefill"), _of_role(pools, "decode")
    of = f"{transfer.method} as published"
    for path, pool in senders:
        if not policy.pipelined and pool.pp > 1:
            yield Complaint((*path, "pp"), f"is {pool.pp}, expected 1: {of} has no pipeline parallelism")
    for path, decode in receivers if policy.equal_tp else ():
        for _, prefill in senders:
            if prefill.tp != decode.tp:
                where = f"expected {prefill.tp}, as pool {prefill.name} has: {of} needs equal tensor-parallel sizes"
                yield Complaint((*path, "tp"), f"is {decode.tp}, {where}")
    for those in (senders, receivers) if policy.one_pair else ():
        for path, pool in those[1:]:
            yield Complaint(path, f"is a second {pool.role} pool: {of} is one pair of engines")
        for path, pool in those[:1]:
            if pool.replicas > 1:
                yield Complaint((*path, "replicas"), f"is {pool.replicas}, expected 1: {of} is one pair of engines")


def _of_role(pools: Iterable[PlacedPool], role: str) -> list[PlacedPool]:
    return [(path, pool) for path, pool in pools if pool.role == role]


def _senders(transfer: Transfer, pools: list[PlacedPool]) -> list[PlacedPool]:
    """Return the pools that a decode pool gets KV from; a store has the shape of the first decode pool."""
    stores = METHODS[transfer.method].stores
    return _of_role(pools, "prefill") + (_of_role(pools, "decode")[:1] if stores else [])


def _blocks(transfer: Transfer, pools: list[PlacedPool]) -> Iterator[Complaint]:
    for _, prefill in _senders(transfer, pools):
        for path, decode in _of_role(pools, "decode"):
            p, d = prefill.block_size, decode.block_size
            expected = None
            if METHODS[transfer.method].dialect(transfer.dialect).unequal_blocks:
                if max(p, d) % min(p, d):
                    expected = f"a divisor or a multiple of {p}"
            elif not METHODS[transfer.method].pulls:
                if p != d:
                    expected = f"{p}: {transfer.dialect} pushes only between equal block sizes"
            elif d % p:
                expected = f"a multiple of {p}: {transfer.dialect} pulls only if P's block size divides D's"
            if expected is not None:
                where = f"expected {expected} (block_size of pool {prefill.name})"
                yield Complaint((*path, "block_size"), f"is {d}, {where}")


def _spread(model: ModelSpec, path: KeyPath, pool: Pool) -> Iterator[Complaint]:
    """Check expert parallelism and data-parallel attention."""
    replicas, gpus = pool.attention_replicas, pool.tp * pool.attention_replicas
    for key, value in (("ep", pool.ep), ("dp_attention", replicas)):
        if value > 1 and model.moe is None:
            why = "has no experts" + ("; use replicas, which are engines of their own" if key == "dp_attention" else "")
            yield Complaint((*path, key), f"is {value}, expected 1: {model.name} {why}")
            return
        if value > 1 and pool.pp > 1:
            yield Complaint((*path, key), f"is {value}, expected 1 with pipeline stages (pp is {pool.pp})")
            return
    if pool.ep not in (1, gpus):
        of = f"tp {pool.tp} x dp_attention {replicas}"
        yield Complaint((*path, "ep"), f"is {pool.ep}, expected 1 or {gpus}, the GPUs of an engine ({of})")


def _model_fits(model: ModelSpec, path: KeyPath, pool: Pool) -> Iterator[Complaint]:
    spread = list(_spread(model, path, pool))
    if spread:
        yield from spread
        return
    try:
        model.check_parallel(pool.tp, pool.pp)
    except ValueError as error:
        key = "pp" if pool.pp > model.num_layers and not _tp_is_wrong(model, pool.tp) else "tp"
        yield Complaint((*path, key), str(error))
        if pool.kv_tokens is None:
            return
    try:
        kv_tokens_of(model, pool)
    except ValueError as error:
        yield Complaint((*path, "gpu" if pool.kv_tokens is None else "kv_tokens"), str(error))


def _states(model: ModelSpec, transfer: Transfer, pools: list[PlacedPool]) -> Iterator[Complaint]:
    """Check that the method moves the states of linear attention; without, vLLM's engines do not start."""
    if model.linear_attention is None or moves_groups(transfer):
        return
    if any(pool.role != "aggregated" for _, pool in pools):
        if METHODS[transfer.method].hybrid:
            key = "progressive" if transfer.progressive else "kv_buffer_device"
            yield Complaint(
                ("transfer", key), "moves one KV cache group only, and a model with linear_attention has two; remove it"
            )
            return
        yield Complaint(
            ("transfer", "method"),
            f'is "{transfer.method}", which moves one KV cache group only; expected nixl-push or nixl-pull with '
            "linear_attention",
        )


def _tp_is_wrong(model: ModelSpec, tp: int) -> bool:
    try:
        model.check_parallel(tp)
    except ValueError:
        return True
    return False


def _pairs(model: ModelSpec, transfer: Transfer, pools: list[PlacedPool]) -> Iterator[Complaint]:
    dialect = METHODS[transfer.method].dialect(transfer.dialect)
    for _, prefill in _senders(transfer, pools):
        for path, decode in _of_role(pools, "decode"):
            try:
                check_tp(
                    kv_shape_of(model, prefill),
                    prefill.tp,
                    decode.tp,
                    initiator="pull" if METHODS[transfer.method].pulls else "push",
                    rule="exactly-once" if dialect.control_frames else "vllm",
                )
            except LayoutError as error:
                yield Complaint((*path, "tp"), f"{error} (pools {prefill.name} and {decode.name})")


def _network(network: Network, pools: list[PlacedPool], complete: bool) -> Iterator[Complaint]:
    counts = Counter(link.name for link in network.links)
    for index, link in enumerate(network.links):
        if counts[link.name] > 1 and link.name in [earlier.name for earlier in network.links[:index]]:
            yield Complaint(
                ("network", "links", index, "name"), f'is "{link.name}", the name of an earlier link; choose another'
            )
    roles = {pool.name: pool.role for _, pool in pools}
    pairs: set[tuple[str, str]] = set()
    for index, path in enumerate(network.paths):
        at: KeyPath = ("network", "paths", index)
        for key, name, role in (("from", path.from_pool, "prefill"), ("to", path.to_pool, "decode")):
            if name not in roles:
                if complete:
                    known = ", ".join(roles)
                    hint = did_you_mean(name, roles)
                    yield Complaint((*at, key), f'is "{name}", expected the name of a pool: {known}{hint}')
            elif roles[name] != role:
                yield Complaint((*at, key), f"is a {roles[name]} pool; KV flows from prefill to decode pools")
        if (path.from_pool, path.to_pool) in pairs:
            yield Complaint(at, f"an earlier path has the same pools, {path.from_pool} to {path.to_pool}; remove one")
        pairs.add((path.from_pool, path.to_pool))
        for step, name in enumerate(path.via):
            if name not in counts:
                known = ", ".join(counts) or "none is defined"
                hint = did_you_mean(name, counts)
                yield Complaint((*at, "via", step), f'is "{name}", expected the name of a link: {known}{hint}')
            elif name in path.via[:step]:
                yield Complaint((*at, "via", step), f'is "{name}" again; a path crosses each link once')
