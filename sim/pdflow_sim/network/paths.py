"""Routes between ranks: the links that bytes pass, their latency, and what posting a transfer costs.

Each rank has one NIC or several, transmit and receive apart; of several each meets the one of its number at the other
side. The scenario's explicit links lie between the pools that name them. Each rank's GPU has a lane to host memory,
each direction apart, and its own memory, for copies that stay on its host. All is worked out at first use, so that 400
engines cost only what they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pdflow.cost.step import to_ps
from pdflow.layout.descriptors import DescriptorCounter, joints
from pdflow.layout.ranks import Initiator, Rule
from pdflow.layout.shapes import KvShape
from pdflow.methods.posting import Connector
from pdflow.network.network import FlowNetwork, PathId, ResourceId
from pdflow.network.slices import queue_bytes_per_s, shares
from pdflow.protocol.ids import engine_of, rank_address, rank_of
from pdflow.protocol.messages import Register
from pdflow.protocol.values import Address, EngineId
from pdflow.scenario.costs.transfer_time import counters, latency_ns, links_between, posting_ns
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.scenario import Pool

Nic: TypeAlias = tuple[Address, int]
"""A rank, and the number of a NIC near its GPU."""

Direction: TypeAlias = Literal["d2h", "h2d"]
"""GPU to host memory, or back."""


class Rails:
    """The paths between the NICs of two ranks. Each operation begins with the path after the last one's."""

    __slots__ = ("first", "paths", "slice_bytes")

    def __init__(self, paths: list[PathId], slice_bytes: int) -> None:
        self.paths = paths
        self.slice_bytes = slice_bytes
        self.first = 0

    def deal(self, nbytes: int) -> list[tuple[PathId, int]]:
        """Split so many bytes into shares, and return each with the path that it takes."""
        count, first = len(self.paths), self.first
        dealt = [
            (self.paths[(first + index) % count], share)
            for index, share in enumerate(shares(nbytes, self.slice_bytes, count))
        ]
        self.first = (first + len(dealt)) % count
        return dealt


class Route:
    """The route from one P rank to one D rank: over one path, over rails, or over neither if nothing bounds it."""

    __slots__ = ("block_size", "counter", "latency_ns", "path", "per_descriptor_ps", "per_message_ps", "rails")

    def __init__(
        self,
        path: PathId | None,
        rails: Rails | None,
        latency_ns: int,
        counter: DescriptorCounter | None,
        block_size: int,
        network: Network,
        merges: bool,
    ) -> None:
        self.path = path
        self.rails = rails
        self.latency_ns = latency_ns
        self.counter = counter
        self.block_size = block_size if merges and counter is not None and counter.per_joint else 0
        """The block size of both sides, if blocks that follow each other are one descriptor; otherwise 0."""
        self.per_message_ps = to_ps(network.per_message_s)
        self.per_descriptor_ps = to_ps(network.per_descriptor_s)

    def joints(self, source_blocks: Sequence[int], registration: Register) -> int:
        """Return how many of a transfer's blocks need no descriptor of their own."""
        if not self.block_size:
            return 0
        first = registration.token_start // self.block_size
        last = -(-(registration.token_start + registration.num_tokens) // self.block_size)
        return joints(source_blocks[first:last], registration.target.blocks)

    def post_ns(self, num_tokens: int, joints: int = 0) -> int:
        """Return how long the posting lane is busy with a transfer of that many tokens, in ns, rounded up."""
        count = 0
        if self.per_descriptor_ps and self.counter is not None:
            count = self.counter.count(num_tokens, joints)
        return posting_ns(self.per_message_ps, self.per_descriptor_ps, count)


class Paths:
    """Every rank's NIC and its lane to host memory as two resources each, and the routes between ranks."""

    def __init__(
        self,
        network: FlowNetwork,
        table: Network,
        pool_of: dict[EngineId, Pool],
        shapes: dict[str, KvShape],
        initiator: Initiator,
        rule: Rule,
        connector: Connector,
    ) -> None:
        self.network = network
        self.table = table
        self.pool_of = pool_of
        self.shapes = shapes
        self.initiator: Initiator = initiator
        self.rule: Rule = rule
        self.extent = connector.extent
        self.merges = connector.merges if table.coalesce is None else table.coalesce
        self.queue_rate = queue_bytes_per_s(table.slice_bytes, table.per_slice_s)
        self.links: dict[str, ResourceId] = {}
        for link in table.links:
            self.links[link.name] = network.add_resource(link.name, link.bandwidth_bytes_per_s)
        self.via = {(path.from_pool, path.to_pool): path.via for path in table.paths}
        self.nics: dict[tuple[Address, str, int], ResourceId] = {}
        self.lanes: dict[tuple[Address, str], PathId] = {}
        self.names: list[tuple[str, ResourceId, int | None]] = [
            (link.name, self.links[link.name], link.bandwidth_bytes_per_s) for link in table.links
        ]
        self.routes: dict[tuple[Address, Address], Route] = {}
        self.down: dict[Nic, int] = {}
        """NICs that have failed, and how often since they last worked."""
        self.over: dict[Nic, set[PathId]] = {}
        """The paths that cross each NIC, where ranks have several."""
        self.counters: dict[tuple[str, str], dict[tuple[int, int], DescriptorCounter]] = {}
        """By two pools, then by P rank and D rank."""

    def nic(self, rank: Address, direction: str, number: int = 0) -> ResourceId:
        """Return the resource of one direction of a NIC: "tx" or "rx"; or "queue", its rate of sending slices."""
        key = (rank, direction, number)
        resource = self.nics.get(key)
        if resource is None:
            which = f" {number}" if self.nics_of(rank) > 1 else ""
            rate = self.queue_rate if direction == "queue" else self.table.bandwidth_bytes_per_s
            name = f"{rank} nic{which} {direction}"
            resource = self.nics[key] = self.network.add_resource(name, rate)
            self.names.append((name, resource, rate))
        return resource

    def replicas_of(self, rank: Address) -> int:
        """Return the GPUs behind a rank: one for each replica of its engine's attention."""
        return self.pool_of[engine_of(rank)].attention_replicas

    def nics_of(self, rank: Address) -> int:
        """Return the NICs near a rank's GPUs."""
        return self.table.nics_per_rank * self.replicas_of(rank)

    def lane(self, rank: Address, direction: Direction) -> PathId:
        """Return the PCIe link of a rank's GPU, one way: shared by all copies between its memory and the host's."""
        return self._local(rank, direction, self.pool_of[engine_of(rank)].gpu.pcie_bytes_per_s * self.replicas_of(rank))

    def copy(self, rank: Address) -> PathId:
        """Return the path from one place of a GPU's memory to another: each byte is read and written."""
        return self._local(rank, "d2d", self.pool_of[engine_of(rank)].gpu.hbm_bytes_per_s / 2 * self.replicas_of(rank))

    def thread(self, rank: Address, name: str, bytes_per_s: int) -> PathId:
        """Return a thread of a rank's host through which bytes go one after the other."""
        return self._local(rank, name, bytes_per_s)

    def copy_ns(self, rank: Address) -> int:
        """Return how long a copy on `lane` or `copy` waits before its first byte, in ns."""
        return seconds_to_ns(self.pool_of[engine_of(rank)].gpu.copy_latency_s)

    def _local(self, rank: Address, direction: str, rate: float) -> PathId:
        path = self.lanes.get((rank, direction))
        if path is None:
            name = f"{rank} {direction}"
            resource = self.network.add_resource(name, int(rate))
            path = self.lanes[rank, direction] = self.network.path((resource,))
            self.names.append((name, resource, int(rate)))
        return path

    def keep(self, before: Address, now: Address) -> None:
        """Give a rank's hardware to another name of the same rank."""
        for (rank, direction, number), resource in list(self.nics.items()):
            if rank == before:
                self.nics[now, direction, number] = resource
        for (rank, number), count in list(self.down.items()):
            if rank == before:
                self.down[now, number] = count
        for (rank, direction), path in list(self.lanes.items()):
            if rank == before:
                self.lanes[now, direction] = path

    def latency_ns(self, source: Address, target: Address) -> int:
        return self.route(source, target).latency_ns

    def route(self, source: Address, target: Address) -> Route:
        """Return the route that KV takes from P rank `source` to D rank `target`."""
        route = self.routes.get((source, target))
        if route is None:
            route = self.routes[source, target] = self._lay(source, target)
        return route

    def _lay(self, source: Address, target: Address) -> Route:
        p_pool = self.pool_of[engine_of(source)]
        d_pool = self.pool_of[engine_of(target)]
        via = self.via.get((p_pool.name, d_pool.name), ())
        paths = self._between(source, target)
        several = self._has_several_nics(source, target)
        rails = Rails(paths, self.table.slice_bytes) if several and self._bounded(via) else None
        latency = latency_ns(self.table, links_between(self.table, p_pool, d_pool))
        counter = self._counter(p_pool, d_pool, rank_of(source), rank_of(target))
        path = paths[0] if paths and rails is None else None
        return Route(path, rails, latency, counter, d_pool.block_size, self.table, self.merges)

    def _between(self, source: Address, target: Address) -> list[PathId]:
        """Return a path for each NIC that works, with the one of its place at the other side at its end."""
        pools = (self.pool_of[engine_of(source)].name, self.pool_of[engine_of(target)].name)
        links = [self.links[name] for name in self.via.get(pools, ())]
        p_nics, d_nics = self.working(source), self.working(target)
        paths = []
        for index in range(max(len(p_nics), len(d_nics)) if p_nics and d_nics else 0):
            p_nic, d_nic = p_nics[index % len(p_nics)], d_nics[index % len(d_nics)]
            crossed = links + self._crossed(p_nic, d_nic)
            if crossed:
                paths.append(path := self.network.path(crossed))
                if self._has_several_nics(source, target):
                    self.over.setdefault(p_nic, set()).add(path)
                    self.over.setdefault(d_nic, set()).add(path)
        return paths

    def _has_several_nics(self, source: Address, target: Address) -> bool:
        """True if either rank has several NICs, whether they work or not."""
        return max(self.nics_of(source), self.nics_of(target)) > 1

    def _bounded(self, via: Sequence[str]) -> bool:
        return bool(via) or self.table.bandwidth_bytes_per_s is not None or self.queue_rate is not None

    def _crossed(self, p_nic: Nic, d_nic: Nic) -> list[ResourceId]:
        """Return both NICs, and the queue of the one that moves the bytes."""
        bandwidth = self.table.bandwidth_bytes_per_s
        found = [] if bandwidth is None else [self.nic(p_nic[0], "tx", p_nic[1]), self.nic(d_nic[0], "rx", d_nic[1])]
        if self.queue_rate is not None and (bandwidth is None or self.queue_rate < bandwidth):
            rank, number = d_nic if self.initiator == "pull" else p_nic
            found.append(self.nic(rank, "queue", number))
        return found

    def working(self, rank: Address) -> list[Nic]:
        """Return the working NICs near a rank's GPU; if none is left, those near its engine's other GPUs."""
        own = [(rank, number) for number in range(self.nics_of(rank))]
        left = [nic for nic in own if nic not in self.down] if self.down else own
        if left:
            return left
        engine = engine_of(rank)
        pool = self.pool_of[engine]
        ranks = [rank_address(engine, other) for other in range(pool.tp * pool.pp)]
        return [(other, number) for other in ranks for _, number in own if (other, number) not in self.down]

    def fail(self, nic: Nic, times: int) -> None:
        """Note that a NIC has failed once more, or, with -1, that one of its failures is over: routes use those that
        work.
        """
        self.down[nic] = self.down.get(nic, 0) + times
        if not self.down[nic]:
            del self.down[nic]
        engine = engine_of(nic[0])
        for (source, target), route in self.routes.items():
            if route.rails is not None and engine in (engine_of(source), engine_of(target)):
                route.rails.paths, route.rails.first = self._between(source, target), 0

    def _counter(self, p_pool: Pool, d_pool: Pool, p_rank: int, d_rank: int) -> DescriptorCounter | None:
        pools = (p_pool.name, d_pool.name)
        found = self.counters.get(pools)
        if found is None:
            source, target = ((pool, self.shapes[pool.name]) for pool in (p_pool, d_pool))
            found = self.counters[pools] = counters(source, target, self.initiator, self.rule, self.extent)
        return found.get((p_rank, d_rank))
