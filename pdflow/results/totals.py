"""The totals of a run besides its requests: bytes, links, engines, stranded memory, notes of the protocol.

The world that ran fills it; integers in the unit that the name ends with. Shares (how busy, how full) are worked out
here and nowhere else, and are 0 where nothing could have been busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

PS_PER_NS = 1_000
NS_PER_S = 1_000_000_000


@attrs.define(kw_only=True)
class LinkTotals:
    """The totals of one link. `busy_ns`: time with at least one flow. `capacity_bytes_per_s` None: unlimited."""

    name: str
    bytes: int = 0
    busy_ns: int = 0
    capacity_bytes_per_s: int | None = None

    def busy_share(self, duration_ns: int) -> float:
        """Return the share of the run in which the link had at least one flow."""
        return share(self.busy_ns, duration_ns)

    def utilisation(self, duration_ns: int) -> float:
        """Return bytes carried over the bytes that the link could have carried; 0 for an unlimited link."""
        return share(self.bytes * NS_PER_S, (self.capacity_bytes_per_s or 0) * duration_ns)


@attrs.define(kw_only=True)
class EngineTotals:
    """The totals of one engine. `busy_ps`: time in steps. `gpus`: tensor-parallel size times pipeline stages times
    replicas of attention."""

    name: str
    role: str
    busy_ps: int = 0
    gpus: int = 1
    kv_blocks: int = 0
    """The size of its block pool, 0 if unlimited."""
    peak_kv_blocks: int = 0
    prefix_cache_queries: int = 0
    """Tokens of its prompts, if it caches prefixes."""
    prefix_cache_hits: int = 0
    """Of these, the tokens whose KV was in its cache."""
    max_num_seqs: int = 0
    """The most sequences in one of its steps, 0 if not known."""
    up_ns: int | None = None
    """How long its GPUs were allocated, if not for the whole run."""

    def held_ns(self, duration_ns: int) -> int:
        """Return how long its GPUs were allocated in a run of that length."""
        return duration_ns if self.up_ns is None else self.up_ns

    def busy_share(self, duration_ns: int) -> float:
        """Return the share of time in which the engine was in a step: GPU utilisation as a sampler would see it."""
        return share(self.busy_ps, self.held_ns(duration_ns) * PS_PER_NS)


@attrs.frozen(kw_only=True)
class FaultTotals:
    """One time that a fault acted. `engine`: "" if it is not an engine's; `end_ns` None: to the end of the run."""

    name: str
    engine: str
    begin_ns: int
    end_ns: int | None = None


@attrs.define(kw_only=True)
class Totals:
    """The totals of one run. `duration_ns` is from instant 0 to the end of the last request, not of the last timer."""

    duration_ns: int = 0
    bytes_moved: int = 0
    """KV payload that arrived, over all transfers; not headers or control messages."""
    transfers: int = 0
    """Shards that arrived: one request at TP 2 to TP 2 makes two."""
    messages: int = 0
    """Between engines and the router; not tokens to the client."""
    world_events: int = 0
    """Turns of the simulator's queue."""
    stranded_byte_ns: int = 0
    """Integral over time of KV bytes held although their prefill had ended: waiting for, in, or after a transfer."""
    links: list[LinkTotals] = attrs.field(factory=list)
    posting_ns: dict[str, int] = attrs.field(factory=dict)
    """By rank, how long it was posting transfers, descriptor by descriptor."""
    engines: list[EngineTotals] = attrs.field(factory=list)
    faults: list[FaultTotals] = attrs.field(factory=list)
    """Crashes, pauses, partitions, slow links and failed NICs, in order; not faults of single messages or clients."""
    notes: dict[str, int] = attrs.field(factory=dict)
    """How often an endpoint noted something (late, duplicate, stale...), by the note's name."""

    @property
    def gpus(self) -> int:
        """The GPUs of all engines."""
        return sum(engine.gpus for engine in self.engines)

    def roles(self) -> tuple[str, ...]:
        """Return the roles of its engines, in order of appearance."""
        return tuple(dict.fromkeys(engine.role for engine in self.engines))

    def prefix_cache(self, role: str | None = None) -> tuple[int, int]:
        """Return the prompt tokens looked up and found, over the engines of one role or over all."""
        chosen = [engine for engine in self.engines if role is None or engine.role == role]
        return sum(e.prefix_cache_queries for e in chosen), sum(e.prefix_cache_hits for e in chosen)

    def gpu_busy_share(self, role: str | None = None) -> float:
        """Return the share of GPU time spent in steps, over the engines of one role or over all."""
        chosen = [engine for engine in self.engines if role is None or engine.role == role]
        held = sum(engine.gpus * engine.held_ns(self.duration_ns) for engine in chosen) * PS_PER_NS
        return share(sum(engine.busy_ps * engine.gpus for engine in chosen), held)

    def of_role(self, role: str) -> list[EngineTotals]:
        """Return the engines of a role."""
        return [engine for engine in self.engines if engine.role == role]

    def peak_kv_share(self, role: str) -> float | None:
        """Return the largest share of its KV blocks that any engine of a role had in use; None if all are unlimited."""
        limited = [engine for engine in self.of_role(role) if engine.kv_blocks]
        return max((share(engine.peak_kv_blocks, engine.kv_blocks) for engine in limited), default=None)

    def busiest_links(self, most: int) -> Sequence[LinkTotals]:
        """Return the links that were used: nearest to capacity first, then by bytes, then in the network's order."""
        used = [link for link in self.links if link.bytes > 0]
        return sorted(used, key=lambda link: (-link.utilisation(self.duration_ns), -link.bytes))[:most]

    def busiest_lane(self) -> tuple[str, float]:
        """Return the rank that was posting for the largest share of the run, and that share; ("", 0.0) if none was."""
        name = max(self.posting_ns, key=lambda rank: self.posting_ns[rank], default="")
        return name, share(self.posting_ns.get(name, 0), self.duration_ns)


def share(portion: int, whole: int) -> float:
    """Return `portion / whole`; 0 if `whole` is 0."""
    return portion / whole if whole > 0 else 0.0
