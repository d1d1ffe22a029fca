"""The JSON of kv_transfer_params between router and engines, to and from the parameters that the endpoints use.

The fields are NIXL's, so that the same router can serve other engines, and under "pdflow" what strict needs besides
(`pdflow/methods/params`). The router knows an engine's coordinates before P has answered; a pull needs the answer.

For KV in a store, D gets the parameters that it would get from a P that it pulls from: the store's node is that P. Keys
are not sent; they are made from the prompt's token ids.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

import attrs
from msgspec import UNSET, UnsetType

from pdflow.methods.catalogue import METHODS
from pdflow.methods.mooncake import MOONCAKE_V1
from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.extras import Extras
from pdflow.methods.params.mooncake import MooncakeV1Decode, MooncakeV1Prefill
from pdflow.methods.params.nixl import NixlPrefill, NixlPullDecode, NixlPushDecode
from pdflow.methods.params.parse import parse, to_json
from pdflow.protocol.ids import EngineInfo, KvParams, LeaseWord, Shards, rank_address
from pdflow.protocol.values import Address, EngineId, Xid, blocks_of

_OWN: Final = ("nixl-push", "nixl-pull", MOONCAKE_V1.name)
_OTHERS: Final = {name: method for name, method in METHODS.items() if name not in _OWN}
_AS: Final = {name: "nixl-pull" if method.pulls else "nixl-push" for name, method in _OTHERS.items()}
"""The NIXL method in whose fields each of the other methods' parameters are written: the fields of their originals have
no room for an engine's coordinates, or are parts of a request's id."""


@attrs.frozen
class Coordinates:
    """The address at which an engine's ranks listen. `ranks`: that of each, if they are processes of their own."""

    host: str
    port: int
    ranks: tuple[tuple[str, int], ...] = ()

    def by_name(self, engine: EngineInfo) -> dict[EngineId | Address, tuple[str, int]]:
        """Return the addresses by whose they are: the engine's, or each rank's."""
        if not self.ranks:
            return {engine.engine: (self.host, self.port)}
        return {rank_address(engine.engine, rank): at for rank, at in enumerate(self.ranks)}


def prefill_json(xid: Xid, method: str, stores: tuple[Coordinates, ...] = ()) -> dict[str, Any]:
    """Return the mapping for a prefill leg whose KV will be fetched or sent. `stores`: where the nodes of a store take
    requests."""
    if method == MOONCAKE_V1.name:
        return to_json(MooncakeV1Prefill(transfer_id=xid, pdflow=Extras(xid=xid)))
    store_addresses = tuple((at.host, at.port) for at in stores)
    return to_json(NixlPrefill(pdflow=Extras(xid=xid, stores=store_addresses or None)))


@attrs.frozen
class PrefillParams:
    """The contents of a prefill leg's kv_transfer_params."""

    xid: Xid
    stores: tuple[Coordinates, ...]
    """The addresses at which the nodes of a store take requests."""


def read_prefill(method: str, mapping: object) -> PrefillParams:
    """Parse a prefill leg's kv_transfer_params. ParamsError."""
    params = parse(_AS.get(method, method), "prefill", mapping)
    if params.pdflow is None:
        raise ParamsError("pdflow", "is missing", "the object that pdflow's router sends")
    stores = tuple(Coordinates(host, port) for host, port in params.pdflow.stores or ())
    return PrefillParams(params.pdflow.xid, stores)


def decode_json(params: KvParams, at: Coordinates, method: str) -> dict[str, Any]:
    """Return the mapping for a decode leg, which is also what P answers."""
    engine, shards = params.prefill.engine, params.prefill.shards
    if method == MOONCAKE_V1.name:
        known = Extras(
            xid=params.xid,
            block_size=shards.block_size,
            tp=shards.tp,
            pp=shards.pp,
            incarnation=None if params.incarnation is UNSET else params.incarnation,
        )
        bootstrap = f"http://{at.host}:{at.port}"
        return to_json(
            MooncakeV1Decode(
                transfer_id=params.xid, remote_engine_id=engine, remote_bootstrap_addr=bootstrap, pdflow=known
            )
        )
    extras = Extras(
        xid=params.xid,
        block_size=shards.block_size,
        digest=params.digest,
        weights=params.weights,
        incarnation=None if params.incarnation is UNSET else params.incarnation,
        lease=tuple((lease_word.index, lease_word.value) for lease_word in params.rank_words),
        groups=params.groups or None if METHODS[method].pulls else None,
        ranks=at.ranks or None,
    )
    common: dict[str, Any] = {
        "remote_engine_id": engine,
        "remote_request_id": params.request_id,
        "remote_host": at.host,
        "remote_port": at.port,
        "tp_size": shards.tp,
        "pp_size": shards.pp,
        "pdflow": extras,
    }
    if METHODS[method].pulls:
        return to_json(
            NixlPullDecode(remote_block_ids=params.blocks, remote_num_tokens=params.num_tokens or None, **common)
        )
    return to_json(NixlPushDecode(remote_num_tokens=params.num_tokens or None, **common))


def read_decode(method: str, mapping: object) -> tuple[KvParams, Coordinates]:
    """Parse a decode leg's kv_transfer_params. ParamsError."""
    parsed = parse(_AS.get(method, method), "decode", mapping)
    extras = parsed.pdflow
    if extras is None or extras.block_size is None:
        raise ParamsError("pdflow", "is missing", "the object that pdflow's router sends, with block_size")
    if isinstance(parsed, MooncakeV1Decode):
        try:
            where = urlsplit(parsed.remote_bootstrap_addr)
            at = Coordinates(where.hostname or "", where.port or 0)
        except ValueError:
            raise ParamsError("remote_bootstrap_addr", "has no port", "http://HOST:PORT") from None
        shards = Shards(extras.tp or 1, extras.pp or 1, extras.block_size)
        info = EngineInfo(parsed.remote_engine_id, shards)
        known = KvParams(info, extras.xid, "", 0, incarnation=_incarnation(extras))
        return known, at
    assert isinstance(parsed, NixlPullDecode | NixlPushDecode)
    info = EngineInfo(parsed.remote_engine_id, Shards(parsed.tp_size, parsed.pp_size, extras.block_size))
    blocks, groups = tuple(parsed.remote_block_ids or ()), extras.groups or ()
    if groups and blocks_of(groups) != blocks:
        raise ParamsError("pdflow.groups", "differ from remote_block_ids", "the block tables of P's groups")
    params = KvParams(
        info,
        extras.xid,
        parsed.remote_request_id,
        parsed.remote_num_tokens or 0,
        blocks,
        tuple(LeaseWord(index, value) for index, value in extras.lease),
        extras.digest,
        extras.weights,
        groups or UNSET,
        _incarnation(extras),
    )
    ranks = extras.ranks or ()
    if ranks and len(ranks) != info.shards.ranks:
        raise ParamsError("pdflow.ranks", f"has {len(ranks)} entries", f"one for each of {info.shards.ranks} ranks")
    return params, Coordinates(parsed.remote_host, parsed.remote_port, ranks)


def _incarnation(extras: Extras) -> int | UnsetType:
    return UNSET if extras.incarnation is None else extras.incarnation
