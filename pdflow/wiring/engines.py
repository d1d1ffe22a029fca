"""Builds the endpoints of engines, their limits and their staging memory from [transfer] and [[pool]].

The caller passes in what only its driver knows: the shape of a pool's KV, since synthetic engines keep less of it.
"""

from __future__ import annotations

import msgspec

from pdflow.engine.sequence import Limits
from pdflow.layout.ranks import Initiator, Rule
from pdflow.layout.shapes import KvShape, stage_layers
from pdflow.methods.guards import effective_timers
from pdflow.methods.staging import KvSize
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow.wiring.endpoints import Consumer, Producer, ProtocolConfig, consumer, producer


class EngineWiring:
    """Builds the endpoints of a scenario's engines, by its transfer method, dialect and layout.

    Args: `shapes`: a pool's KV, by the pool's name; `done_is_remote`: whether a WRITE that the transport reports as
    done has landed. If it has not, P flushes before it says SENT.
    """

    def __init__(self, scenario: ResolvedScenario, shapes: dict[str, KvShape], done_is_remote: bool = True) -> None:
        self.scenario = scenario
        self.shapes = shapes
        self.done_is_remote = done_is_remote
        transfer = scenario.transfer
        self.method = transfer.adapted_method()
        self.pipeline_policy = self.method.pipeline_policy(transfer.dialect)
        self.dialect = self.method.dialect(transfer.dialect)
        self.pulls = self.method.pulls
        self.reads_p = self.pulls and not self.method.stores
        self.timers = effective_timers(transfer.timers(), self.pipeline_policy.guards)
        self.protocol = ProtocolConfig(
            shape=shapes[scenario.pools[0].name],
            pulls=self.pulls,
            dialect=self.dialect,
            timers=self.timers,
            done_is_remote=done_is_remote,
            in_pieces=self.method.in_pieces,
            into_staging=self.method.staged_at_d,
            reads_p=self.reads_p,
            peer_fraction=transfer.quarantine_fraction,
            suspect_fraction=transfer.quarantine_suspect_fraction,
        )
        self.initiator: Initiator = self.protocol.initiator
        self.rule: Rule = self.protocol.rule
        self.geometry: Geometry = self.protocol.geometry()

    def limits_of(self, pool: Pool) -> Limits:
        replicas, policy = pool.attention_replicas, self.pipeline_policy
        prompts_first = pool.computes_prompts_first(policy)
        return Limits(
            max_num_seqs=pool.max_num_seqs * replicas,
            max_num_batched_tokens=pool.step_tokens * replicas,
            block_size=pool.block_size,
            async_scheduling=pool.async_scheduling and not prompts_first,
            prompts_first=prompts_first,
            stands_for_loads=prompts_first and policy.decode_waits,
            replicas=replicas,
        )

    def blocks_of(self, pool: Pool) -> int:
        """Return the number of KV blocks of an engine of this pool."""
        return kv_tokens_of(self.scenario.model, pool) // pool.block_size

    def producer(self, info: EngineInfo, incarnation: int) -> Producer:
        """Create the endpoints of one incarnation of a prefill engine."""
        return producer(self.protocol, self.geometry, info, incarnation)

    def consumer(self, info: EngineInfo, incarnation: int, num_blocks: int, pulls: bool | None = None) -> Consumer:
        """Create the endpoints of one incarnation of a decode engine, or of another receiver of KV. `pulls` overrides
        that of the method."""
        config = self.protocol if pulls is None else msgspec.structs.replace(self.protocol, pulls=pulls)
        return consumer(config, self.geometry, info, incarnation, num_blocks)

    def most_layers(self, pool: Pool) -> int:
        """Return the most layers that a rank of an engine of this pool has."""
        return max(len(stage) for stage in stage_layers(self.shapes[pool.name].num_layers, pool.pp))

    def staged_size(self, pool: Pool) -> KvSize:
        """Return the size of a token in the staging memory of an engine of this pool, at its rank with most layers."""
        shape = self.shapes[pool.name]
        return KvSize(self.most_layers(pool), shape.rank_bytes_per_token(pool.tp) // shape.num_layers)
