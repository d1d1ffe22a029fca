"""The table of transfer methods, by name. A new method is a new file in this package, and a line here."""

from __future__ import annotations

from typing import Final

from pdflow.methods.cpu_staged import CPU_STAGED
from pdflow.methods.kv_store import KV_STORE
from pdflow.methods.method import Method
from pdflow.methods.mooncake import MOONCAKE_V0, MOONCAKE_V1
from pdflow.methods.nixl import NIXL_PULL, NIXL_PUSH
from pdflow.methods.p2p_nccl import P2P_NCCL_GET, P2P_NCCL_PUT, P2P_NCCL_PUT_ASYNC

METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        NIXL_PUSH,
        NIXL_PULL,
        CPU_STAGED,
        P2P_NCCL_PUT,
        P2P_NCCL_PUT_ASYNC,
        P2P_NCCL_GET,
        KV_STORE,
        MOONCAKE_V0,
        MOONCAKE_V1,
    )
}
