"""--kv-transfer-config, as vLLM takes it, of every connector that pdflow knows.

The outer keys and their defaults are vLLM's KVTransferConfig of the connectors' day. One name is two connectors: a
`MooncakeConnector` with a kv_rank is V0's, which needs one to know its side; without, it is 0.32.0's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import attrs

from pdflow.methods.params.connectors import (
    CpuExtra,
    MooncakeStoreExtra,
    MooncakeV0Extra,
    MooncakeV1Extra,
    NixlExtra,
    P2pNcclExtra,
)
from pdflow.methods.params.errors import ParamsError, shown
from pdflow.methods.params.fields import UNREAD, Kind, mapping, param, structure, unread_keys
from pdflow.methods.params.settings import TEXT, choice, loaded, size, whole

Extra: TypeAlias = P2pNcclExtra | CpuExtra | NixlExtra | MooncakeV0Extra | MooncakeV1Extra | MooncakeStoreExtra

LOCATION: Final = "kv_transfer_config"
EXTRA: Final = "kv_connector_extra_config"

CONNECTORS: Final[Mapping[str, tuple[type[Extra], ...]]] = {
    "P2pNcclConnector": (P2pNcclExtra,),
    "CPUConnector": (CpuExtra,),
    "MooncakeStoreConnector": (MooncakeStoreExtra,),
    "NixlConnector": (NixlExtra,),
    "NixlPullConnector": (NixlExtra,),
    "NixlPushConnector": (NixlExtra,),
    "MooncakeConnector": (MooncakeV0Extra, MooncakeV1Extra),
}
"""The classes of the inner object of each connector; of two, V0's first."""

SEND_TYPES: Final = {"PUT": "p2p-nccl-put", "PUT_ASYNC": "p2p-nccl-put-async", "GET": "p2p-nccl-get"}

_INNER: Final = Kind(expected="an object", problem=lambda value: "" if attrs.has(type(value)) else f"is {shown(value)}")


@attrs.frozen(kw_only=True)
class KvTransferConfig:
    """The --kv-transfer-config of one engine."""

    kv_connector: str = param(choice(*CONNECTORS), "name of the connector")
    kv_role: str = param(choice("kv_producer", "kv_consumer", "kv_both"), "P, D or both")
    engine_id: str | None = param(TEXT, "the engine's name; vLLM makes a random one", default=None)
    kv_rank: int | None = param(whole(0, 1), "Mooncake V0: 0 is P, 1 is D", default=None)
    kv_parallel_size: int = param(whole(1, 1 << 20), "number of engines; 2 for Mooncake V0", default=1)
    kv_ip: str = param(TEXT, "address of the connector", default="127.0.0.1")
    kv_port: int = param(whole(0, 65_535), "P2P NCCL: ZMQ port of rank 0; rank r adds r", default=14_579)
    kv_buffer_size: int = param(size(1), "bytes of the GPU buffer", default=1_000_000_000)
    kv_buffer_device: str | None = param(
        choice("cuda", "cpu"),
        "memory of that buffer; cpu: through the host; if absent, the platform's",
        default=None,
    )
    kv_load_failure_policy: str = param(choice("fail", "recompute"), "for blocks that D could not load", default="fail")
    kv_connector_extra_config: Extra = param(_INNER, "the connector's own keys")  # noqa: RUF009 (a field)
    unread: tuple[str, ...] = param(UNREAD, "keys that pdflow does not read", default=())

    def __attrs_post_init__(self) -> None:
        extra = self.kv_connector_extra_config
        if not isinstance(extra, CONNECTORS[self.kv_connector]):
            raise ParamsError(EXTRA, f"is a {type(extra).__name__}", f"what {self.kv_connector} reads")
        if isinstance(extra, (P2pNcclExtra, CpuExtra, MooncakeV0Extra)) and self.kv_role == "kv_both":
            raise ParamsError(
                "kv_role", 'is "kv_both"', f"kv_producer or kv_consumer, the roles of {self.kv_connector}"
            )
        if isinstance(extra, P2pNcclExtra) and self.kv_port == 0:
            raise ParamsError("kv_port", "is 0", "an integer of 1 to 65,535, which the request ids name")
        if isinstance(extra, MooncakeV0Extra):
            self._check_v0()
        if self.kv_connector == "NixlPushConnector" and isinstance(extra, NixlExtra) and extra.bidirectional_kv_xfer:
            raise ParamsError(f"{EXTRA}.bidirectional_kv_xfer", "is true", "false, or NixlPullConnector")

    def _check_v0(self) -> None:
        """Check that the engines are a pair whose producer is rank 0 of 2, and that the lookup buffer is on the GPU."""
        rank = 0 if self.kv_role == "kv_producer" else 1
        if self.kv_rank != rank:
            raise ParamsError("kv_rank", f"is {shown(self.kv_rank)}", f"{rank}, as {self.kv_role} of MooncakeConnector")
        if self.kv_parallel_size != 2:
            raise ParamsError("kv_parallel_size", f"is {self.kv_parallel_size}", "2: one P and one D")
        if self.kv_buffer_device == "cpu":
            raise ParamsError("kv_buffer_device", 'is "cpu"', '"cuda", the only place for the lookup buffer')

    @property
    def method(self) -> str:
        """The name of pdflow's method that moves KV as this connector does."""
        extra = self.kv_connector_extra_config
        if isinstance(extra, P2pNcclExtra):
            return SEND_TYPES[extra.send_type]
        if isinstance(extra, NixlExtra):
            return "nixl-push" if self.kv_connector == "NixlPushConnector" else "nixl-pull"
        if isinstance(extra, CpuExtra):
            return "cpu-staged"
        if isinstance(extra, MooncakeStoreExtra):
            return "kv-store"
        return "mooncake-v0" if isinstance(extra, MooncakeV0Extra) else "mooncake-v1"


def read_kv_transfer_config(source: object) -> KvTransferConfig:
    """Read the configuration from a JSON text, or from the object that it holds. ParamsError for the first thing
    wrong."""
    found = loaded(source, LOCATION)
    name = found.get("kv_connector")
    if not isinstance(name, str) or name not in CONNECTORS:
        wrong = "is missing" if name is None else f"is {shown(name)}"
        raise ParamsError("kv_connector", wrong, f"one of {', '.join(CONNECTORS)}")
    inner = mapping(found.get(EXTRA, {}), EXTRA)
    extra = _extra(CONNECTORS[name], found.get("kv_rank"), inner)
    unread = (*unread_keys(found, KvTransferConfig), *(f"{EXTRA}.{key}" for key in unread_keys(inner, type(extra))))
    return structure(KvTransferConfig, {**found, EXTRA: extra, "unread": unread}, location=LOCATION)


def _extra(kinds: tuple[type[Extra], ...], rank: object, inner: Mapping[Any, Any]) -> Extra:
    kind = kinds[0] if rank is not None else kinds[-1]
    try:
        return structure(kind, inner, location=EXTRA)
    except ParamsError as error:
        raise error.under(EXTRA) from None
