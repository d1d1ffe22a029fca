"""A transport whose ranks listen at a given address of this machine, where peers on other machines reach them, by TLS
where the cluster has certificates."""

from __future__ import annotations

from typing import Any

import attrs

from pdflow.protocol.values import Address
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports.base import DoneMeans, EventSink, Fences, Transport


@attrs.frozen
class AtHost:
    """A factory of such transports."""

    _make: Any
    """A transport's class, which takes `host` and `tls`."""
    _host: str
    _tls: Tls | None = None

    @property
    def done_means(self) -> DoneMeans:
        means: DoneMeans = self._make.done_means
        return means

    @property
    def fences(self) -> Fences:
        fences: Fences = self._make.fences
        return fences

    def __call__(self, me: Address, on_event: EventSink, /) -> Transport:
        made: Transport = self._make(me, on_event, host=self._host, tls=self._tls)
        return made
