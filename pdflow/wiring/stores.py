"""Builds the nodes of a store: their names, their size, and their endpoints on either side.

A node is D under one name, towards the prefill engines that put, and P under another, towards those that get. A prefill
engine that loads what others have put is D under a second name of its own.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Final

import msgspec

from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.producer.cell import ProducerContext
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.validation.fit import store_block_bytes
from pdflow.wiring.endpoints import Consumer, Producer
from pdflow.wiring.engines import EngineWiring

if TYPE_CHECKING:
    from pdflow.protocol.values import EngineId, Xid
    from pdflow.scenario.schema.scenario import Pool, ResolvedScenario

_PUTS: Final = ".put"
_GETS: Final = ".get"
LOADS: Final = ".load"


def node_name(number: int) -> str:
    return f"store-{number}"


def put_name(node: str) -> EngineId:
    """Return the id of the engine that prefill engines write to."""
    return node + _PUTS


def get_name(node: str) -> EngineId:
    """Return the id of the engine that decode engines read from."""
    return node + _GETS


def node_of(engine: EngineId) -> str:
    """Return the node that decode engines read from under this id."""
    return engine.removesuffix(_GETS)


def load_name(engine: EngineId) -> EngineId:
    """Return the id under which a prefill engine loads from the store."""
    return engine + LOADS


def load_xid(xid: Xid) -> Xid:
    """Return the xid under which KV is loaded for the prompt of `xid`."""
    return f"{xid}/load"


def store_pool(scenario: ResolvedScenario) -> Pool | None:
    """Return the pool whose shape and network the nodes share: the first decode pool."""
    return next((pool for pool in scenario.pools if pool.role == "decode"), None)


class StoreWiring:
    """Builds the endpoints of a store's nodes, which share the shape of `pool`.

    `hidden_bytes` of one token are stored at each rank beside its KV."""

    def __init__(self, engines: EngineWiring, pool: Pool, hidden_bytes: int = 0) -> None:
        self.engines = engines
        self.transfer = transfer = engines.scenario.transfer
        self.shards = Shards(pool.tp, 1, pool.block_size)
        self.blocks = transfer.store_bytes // store_block_bytes(engines.scenario.model, pool, hidden_bytes)
        """KV blocks of one node."""

    def unit_tokens(self, name_tokens: int) -> int:
        """Return the tokens of an object within a prompt: it ends where a name and a block of every pool do."""
        return lcm(name_tokens, *(pool.block_size for pool in self.engines.scenario.pools))

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt whose KV fits a node."""
        return self.blocks * self.shards.block_size

    def put_to(self, node: str, incarnation: int) -> Consumer:
        """Create the endpoints of a node towards the engines that put."""
        return self.engines.consumer(EngineInfo(put_name(node), self.shards), incarnation, self.blocks, pulls=False)

    def got_from(self, node: str, incarnation: int) -> Producer:
        """Create the endpoints of a node towards the engines that get."""
        engines, info = self.engines, EngineInfo(get_name(node), self.shards)
        lease_ns = seconds_to_ns(self.transfer.store_lease_s)
        timers = msgspec.structs.replace(engines.timers, lease_ns=lease_ns)
        ranks = [
            ProducerRank(
                info.engine,
                incarnation,
                ProducerContext(
                    rank=rank,
                    shards=self.shards,
                    dialect=engines.dialect,
                    timers=timers,
                    geometry=engines.geometry,
                    done_is_remote=engines.done_is_remote,
                ),
            )
            for rank in range(self.shards.ranks)
        ]
        return Producer(ProducerScheduler(info, incarnation, engines.dialect, True), ranks)

    def loads(self, engine: EngineInfo, incarnation: int, blocks: int) -> Consumer | None:
        """Create the endpoints with which a prefill engine of so many blocks loads. None if it is pipelined: layouts
        have no such D."""
        if engine.shards.pp > 1:
            return None
        info = EngineInfo(load_name(engine.engine), engine.shards)
        return self.engines.consumer(info, incarnation, blocks, pulls=True)
