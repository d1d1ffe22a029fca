"""Which GPUs of which host each engine of a cluster gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from pdflow.scenario.schema.scenario import Pool

GPUS_PER_HOST: Final = 8
"""As all GPU presets have them."""


@attrs.frozen
class PlacedEngine:
    """One engine, and its GPUs."""

    name: str
    pool: int
    """The index of its pool."""
    host: int
    first_gpu: int
    gpus: int
    port_offset: int
    """The number of data-parallel ranks of the engines before it: each rank may need a port of its own."""

    @property
    def devices(self) -> str:
        """The numbers of its GPUs, as CUDA_VISIBLE_DEVICES has them."""
        return ",".join(map(str, range(self.first_gpu, self.first_gpu + self.gpus)))


def placed_engines(pools: Sequence[Pool], gpus_per_host: int = GPUS_PER_HOST) -> list[PlacedEngine]:
    """Return all engines, host by host. A host has GPUs of one type. An engine with more GPUs than a host has the next
    hosts for itself; `host` is the first of them."""
    found: list[PlacedEngine] = []
    host, used, offset, gpu_type = 0, 0, 0, pools[0].gpu.name
    for index, pool in enumerate(pools):
        for number in range(pool.replicas):
            gpus = pool.gpus_per_engine
            if used and (used + gpus > gpus_per_host or pool.gpu.name != gpu_type):
                host, used = host + 1, 0
            gpu_type = pool.gpu.name
            found.append(PlacedEngine(f"{pool.name}-{number}", index, host, used, gpus, offset))
            whole, used = divmod(used + gpus, gpus_per_host)
            host, offset = host + whole, offset + pool.attention_replicas
    return found
