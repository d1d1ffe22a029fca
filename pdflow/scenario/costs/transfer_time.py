"""The time of a KV transfer between two pools without contention, and the prompt lengths that are not worth one.

Latency, the slowest link, posting and control are what a scenario says of them, the same for a simulation's routes
(`sim/pdflow_sim/network/paths.py`) and for a router's rule. How flows share links is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs
from msgspec.structs import replace

from pdflow.cost.crossover import EngineSteps, TransferRoute, thresholds
from pdflow.cost.layers import layers_per_block
from pdflow.cost.step import PS_PER_NS, StepCost, to_ps
from pdflow.layout.descriptors import DescriptorCounter, Nesting, descriptor_counter, rank_memory
from pdflow.layout.ranks import Initiator, Pair, Rule, writers
from pdflow.layout.shapes import KvShape
from pdflow.methods.posting import Extent
from pdflow.protocol.values import S
from pdflow.scenario.costs.step_costs import ApiServerTime, api_server_time
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.network import Link, Network
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.validation.fit import kv_tokens_of, moved_shape_of

MOST_TOKENS: Final = 1 << 62
"""More tokens than any transfer has."""


def links_between(network: Network, source: Pool, target: Pool) -> list[Link]:
    """Return the explicit links of the path from one pool to another."""
    names = next(
        (path.via for path in network.paths if (path.from_pool, path.to_pool) == (source.name, target.name)), ()
    )
    by_name = {link.name: link for link in network.links}
    return [by_name[name] for name in names]


def latency_ns(network: Network, links: Iterable[Link]) -> int:
    """Return the latency until the first byte arrives."""
    own = seconds_to_ns(network.latency_s)
    if network.slice_bytes:
        own += seconds_to_ns(network.per_slice_s)  # the wire waits for the queue's first slice
    return own + sum(seconds_to_ns(link.latency_s) for link in links)


def posting_ns(per_message_ps: int, per_descriptor_ps: int, descriptors: int) -> int:
    """Return how long the posting lane is busy with a transfer, rounded up."""
    return -(-(per_message_ps + per_descriptor_ps * descriptors) // PS_PER_NS)


def counters(
    source: tuple[Pool, KvShape], target: tuple[Pool, KvShape], initiator: Initiator, rule: Rule, extent: Extent
) -> dict[tuple[int, int], DescriptorCounter]:
    """Return, by (P rank, D rank), the counter of the descriptors of a transfer between them."""
    (p_pool, p_shape), (d_pool, _) = source, target
    pairs = writers(p_shape, p_pool.tp, p_pool.pp, d_pool.tp, initiator=initiator, rule=rule)
    return {(pair.p_rank, pair.d_rank): _counter(pair, source, target, extent) for pair in pairs}


def _counter(
    pair: Pair, source: tuple[Pool, KvShape], target: tuple[Pool, KvShape], extent: Extent
) -> DescriptorCounter:
    """Return the descriptor counter of a pair: heads before tokens, which is the order that NIXL demands of vLLM (spec
    3.3). Keys of indexers and states are tensors of their own."""
    if extent is Extent.TRANSFER:
        return DescriptorCounter(MOST_TOKENS, 1, 1, 0)
    (p_pool, p_shape), (d_pool, d_shape) = source, target
    packed = extent is not Extent.TENSOR
    nesting: Nesting = "block-major" if extent is Extent.BLOCK else "layer-major"
    p_stage = pair.p_rank // p_pool.tp
    p_memory = rank_memory(_laid_out(p_shape, packed), 1, p_pool.tp, p_pool.pp, p_stage, nesting=nesting)
    counter = descriptor_counter(pair, p_memory, rank_memory(_laid_out(d_shape, packed), 1, d_pool.tp, nesting=nesting))
    own = pair.num_layers / d_shape.num_layers
    keys = 0 if extent is Extent.BLOCK else round(own * d_shape.index_layers)
    windowed = d_shape.window_layers
    whole, of = d_shape.num_layers - windowed, d_shape.num_layers
    if extent is Extent.BLOCK and windowed:
        # Blocks of their own for each group of layers.
        group = layers_per_block((whole, windowed))
        whole, windowed, of = -(-whole // group), -(-windowed // group), 1
    return replace(
        counter,
        per_unit=counter.per_unit + keys,
        per_tail=counter.per_tail + keys,
        of=of,
        whole=whole,
        windowed=windowed,
        window_tokens=d_shape.window_tokens,
        states=round(own * d_shape.state_tensors),
    )


def _laid_out(shape: KvShape, packed: bool) -> KvShape:
    """Return the shape with K and V of a token together, if they are to be packed; MLA has neither."""
    return replace(shape, packed=True) if packed and shape.mla is None else shape


@attrs.frozen(kw_only=True)
class Crossover:
    """The prompt length from which a prefill engine is the faster choice: `thresholds` of each decode pool.
    `sequential`: decode legs wait for P's answer."""

    scenario: ResolvedScenario
    costs: Mapping[str, StepCost]
    """The step cost of each pool."""
    initiator: Initiator
    rule: Rule
    sequential: bool

    def thresholds(self, decode: Pool) -> tuple[int, ...]:
        """Return the longest prompts that an engine of that pool computes itself, by the number of legs open there."""
        routes = [self.route(pool, decode) for pool in self.scenario.pools if pool.role == "prefill"]
        most = kv_tokens_of(self.scenario.model, decode) // decode.block_size * decode.block_size
        return thresholds(self.stage(decode), routes, decode.max_num_seqs, most)

    def stage(self, pool: Pool) -> EngineSteps:
        return EngineSteps(self.costs[pool.name], pool.step_tokens)

    def route(self, p: Pool, d: Pool) -> TransferRoute:
        """Return the route through a prefill engine: its steps, and the transfer of its KV from its first rank."""
        scenario, network = self.scenario, self.scenario.network
        lanes = min(p.tp * p.pp, d.tp) * network.nics_per_rank
        links = links_between(network, p, d)
        nic = network.bandwidth_bytes_per_s
        rates = [] if nic is None else [nic * lanes]
        rates += [link.bandwidth_bytes_per_s for link in links if link.bandwidth_bytes_per_s]
        fixed_ns = latency_ns(network, links) + seconds_to_ns(network.control_latency_s)
        if self.sequential:
            # P's answer to the router, and the decode leg to D, which D's own prompts do not wait for.
            fixed_ns += 2 * seconds_to_ns(network.http_latency_s)
        api_server = api_server_time(d) if self.sequential else ApiServerTime(0, 0)
        shapes = [(pool, moved_shape_of(scenario.model, pool)) for pool in (p, d)]
        extent = scenario.transfer.posting().extent
        counter = counters(shapes[0], shapes[1], self.initiator, self.rule, extent).get((0, 0))
        per_message, per_descriptor = to_ps(network.per_message_s), to_ps(network.per_descriptor_s)

        def transfer_ns(tokens: int) -> int:
            nbytes = scenario.model.kv_bytes_of(tokens)
            flow_ns = -(-nbytes * S // min(rates)) if rates else 0
            count = counter.count(tokens, 0) if per_descriptor and counter is not None else 0
            posted_ns = posting_ns(per_message, per_descriptor, count)
            return fixed_ns + api_server.ns(tokens) + posted_ns + flow_ns

        return TransferRoute(self.stage(p), transfer_ns)
