"""Where a script is played: a method, a role, and the endpoints that the scenario of that method wires."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from pdflow.layout.shapes import KvShape
from pdflow.methods.catalogue import METHODS
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow.protocol.ids import EngineInfo, KvParams, LeaseWord, Shards
from pdflow.scenario import ResolvedScenario, load
from pdflow.scenario.schema.scenario import Pool
from pdflow.wiring.engines import EngineWiring
from pdflow.wiring.stores import StoreWiring, get_name, load_name, load_xid, node_name, put_name
from pdflow_runtime.nodes.content import digest_of
from tests.serving.script import Lengths

Role: TypeAlias = Literal["decode", "prefill", "aggregated", "store"]

HERE: Final = Path(__file__).parent
STORE: Final = node_name(0)
WEIGHTS: Final = 1
"""The weight version that simulated engines have."""
BLOCK: Final = 4
LAYERS: Final = 3
SHAPE: Final = KvShape(num_layers=LAYERS, num_kv_heads=2, head_dim=2, bytes_per_value=2, block_size=BLOCK)
BLOCKS: Final = 8
STORE_BLOCKS: Final = 5
"""Of a store's node: no two prompts have room there at once, unless they share what they begin with."""
INCARNATION: Final = 7
PEER_INCARNATION: Final = 40
REQUESTS: Final = (Lengths(6, 4), Lengths(8, 3), Lengths(11, 5), Lengths(40, 2))
"""The last one fits no engine."""


class Ends(NamedTuple):
    """A name of the node, and the engine whose ranks speak to its ranks. `produces`: that engine is P towards it.
    `pulls`: D reads."""

    side: str
    me: str
    peer: str
    produces: bool
    pulls: bool


class Setting(NamedTuple):
    """One method with one of its roles. `ranks`: of the engine that is looked at, and of its peer."""

    method: str
    role: Role
    progressive: bool = False
    ranks: int = 1
    first_token: str = "decode"

    def __str__(self) -> str:
        terms = [self.method, self.role]
        terms += ["progressive"] * self.progressive + [f"{self.ranks} ranks"] * (self.ranks > 1)
        terms += [f"first token of {self.first_token}"] * (self.first_token != "decode")
        return "-".join(terms)

    @property
    def scenario(self) -> ResolvedScenario:
        key = tuple(self)
        if key not in _scenarios:
            overrides = {
                "transfer.method": self.method,
                "transfer.progressive": str(self.progressive).lower(),
                "router.first_token": self.first_token,
                "transfer.store_granularity": "block",
                "pool.p.tp": self.ranks,
                "pool.d.tp": self.ranks,
            }
            _scenarios[key] = load(HERE / "setting.toml", overrides=[f"{k}={v}" for k, v in overrides.items()])
        return _scenarios[key]

    def wiring(self) -> EngineWiring:
        return EngineWiring(self.scenario, {pool.name: SHAPE for pool in self.scenario.pools})

    @property
    def pool(self) -> Pool:
        return self.scenario.pools[0 if self.role == "prefill" else 1]

    @property
    def info(self) -> EngineInfo:
        """The engine that is looked at."""
        return EngineInfo("d-0" if self.role == "decode" else "p-0", self.shards)

    @property
    def prefill(self) -> EngineInfo:
        """P, whose answer a decode leg brings."""
        return EngineInfo("p-0", self.shards)

    def ends(self) -> list[Ends]:
        """Under which names its ranks speak, and to whom."""
        pulls = METHODS[self.method].pulls
        if self.role == "aggregated":
            return []
        if self.role == "store":
            return [
                Ends("put", put_name(STORE), "p-0", True, False),
                Ends("get", get_name(STORE), "d-0", False, True),
            ]
        if self.role == "decode":
            return [Ends("", "d-0", "p-0", True, pulls)]
        if METHODS[self.method].stores:
            return [
                Ends("", "p-0", put_name(STORE), False, False),
                Ends("load", load_name("p-0"), get_name(STORE), True, True),
            ]
        return [Ends("", "p-0", "d-0", False, pulls)]

    @property
    def shards(self) -> Shards:
        return Shards(self.ranks, 1, BLOCK)


_scenarios: dict[tuple[object, ...], ResolvedScenario] = {}


def prompt_of(r: int) -> list[int]:
    """Its tokens: the first says whose they are."""
    return [r, *range(100, 99 + REQUESTS[r].prompt)]


def request_id_of(r: int) -> str:
    return f"r{r}.0"


def xid_of(r: int) -> str:
    return f"x{r}"


def digest(r: int) -> int:
    return digest_of(prompt_of(r), WEIGHTS)


def params_of(setting: Setting, r: int, pulls: bool) -> KvParams:
    """What a decode leg of this request is told of the prefill leg."""
    count = REQUESTS[r].prompt
    if not pulls:
        return KvParams(setting.prefill, xid_of(r), request_id_of(r), count)
    blocks = tuple(range(20 * r, 20 * r + -(-count // BLOCK)))
    rank_words = tuple(LeaseWord(5 + r, word_of(r, rank)) for rank in range(setting.ranks))
    return KvParams(setting.prefill, xid_of(r), request_id_of(r), count, blocks, rank_words, digest(r), WEIGHTS)


def word_of(r: int, rank: int) -> int:
    """P's lease word of this request."""
    return 900 + 10 * r + rank


def items_of(r: int) -> tuple[Item, ...]:
    """The objects of a prompt at a store: all begin with the same block."""
    return (Item("shared", 1), Item(f"own {r}", -(-REQUESTS[r].prompt // BLOCK) - 1))


def put_params(setting: Setting, r: int) -> KvParams:
    """What P says of a prompt that it puts."""
    count = REQUESTS[r].prompt
    return KvParams(setting.prefill, xid_of(r), request_id_of(r), count, digest=digest(r), weights=WEIGHTS)


def found_params(setting: Setting, r: int) -> KvParams:
    """What a store says of the beginning of a prompt that it has."""
    rank_words = tuple(LeaseWord(5 + r, word_of(r, rank)) for rank in range(setting.ranks))
    info = EngineInfo(get_name(STORE), setting.shards)
    return KvParams(info, load_xid(xid_of(r)), request_id_of(r), BLOCK, (3,), rank_words, digest(r), WEIGHTS)


def store_wiring(wiring: EngineWiring) -> StoreWiring:
    """Of a store whose nodes are smaller than an engine."""
    made = StoreWiring(wiring, wiring.scenario.pools[1])
    made.blocks = STORE_BLOCKS
    return made


def store_memory() -> StoreMemory:
    return StoreMemory(STORE_BLOCKS, keeps=True)
