"""The metrics of the whole cluster on one page: the router's, and those of each engine and store node, which the router
asks for when it is asked. A process that does not answer in time, or not with metrics, is reported as such."""

from __future__ import annotations

from typing import Final

import trio

from pdflow.protocol.values import S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.observe.merged_metrics import MalformedPageError, MergedMetrics
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.router.admin import Admin

PAGE_BYTES: Final = 2 << 20
"""The longest page of one process: vLLM's has about 200 kB."""
ALL_BYTES: Final = 64 << 20
"""Of all processes."""
FRESH_NS: Final = S
"""A page is given again for so long: many readers cost as much as one."""
UP: Final = "pdflow_cluster_scrape_up"
SECONDS: Final = "pdflow_cluster_scrape_seconds"


class ClusterMetrics:
    """The page of the cluster's metrics. Args: `admin` asks the engines."""

    def __init__(self, admin: Admin) -> None:
        self.admin: Final = admin
        self._one_at_a_time: Final = trio.Lock()
        self._page = b""
        self._made_ns = -FRESH_NS

    async def text(self) -> bytes:
        async with self._one_at_a_time:
            if now_ns() - self._made_ns >= FRESH_NS:
                self._page = await self._collect()
                self._made_ns = now_ns()
            return self._page

    async def _collect(self) -> bytes:
        addresses = self.admin.engine_addresses() | self.admin.members.stores
        asked = await self.admin.ask_all("/metrics", addresses, PAGE_BYTES)
        pages = {name: one.answer for name, one in asked.items() if one.answer is not None}
        merged = MergedMetrics()
        merged.add(ROUTER, self.admin.node.meter.text(), keeps_label=True)
        up = dict.fromkeys(asked, 0)
        for name, page in pages.items():
            await trio.lowlevel.checkpoint()
            if sum(len(pages[name]) for name, is_up in up.items() if is_up) + len(page) > ALL_BYTES:
                continue
            try:
                merged.add(name, page)
                up[name] = 1
            except MalformedPageError:
                pass
        return merged.text() + _scrapes(up, {name: one.seconds for name, one in asked.items()})


def _scrapes(up: dict[str, int], took_s: dict[str, float]) -> bytes:
    """Return the metrics of the page itself."""
    lines = [f"# HELP {UP} 1 if the process has answered with its metrics", f"# TYPE {UP} gauge"]
    lines += [f'{UP}{{engine="{name}"}} {value}' for name, value in up.items()]
    lines += [f"# HELP {SECONDS} Time that the process took to answer", f"# TYPE {SECONDS} gauge"]
    lines += [f'{SECONDS}{{engine="{name}"}} {value:.6f}' for name, value in took_s.items()]
    return "\n".join((*lines, "")).encode()
