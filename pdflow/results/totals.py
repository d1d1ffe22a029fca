"""What a run adds up besides its requests: bytes, links, engines, stranded memory, notes of the protocol.

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
    """One link. `busy_ns`: time with at least one flow. `capacity_bytes_per_s` None: unlimited."""

    name: str
    bytes: int = 0
    busy_ns: int = 0
    capacity_bytes_per_s: int | None = None

    def busy_share(self, duration_ns: int) -> float:
        """Share of the run in which something was on the link."""
        return share(self.busy_ns, duration_ns)

    def utilisation(self, duration_ns: int) -> float:
        """Bytes carried over the bytes that the link could have carried; 0 for an unlimited link."""
        return share(self.bytes * NS_PER_S, (self.capacity_bytes_per_s or 0) * duration_ns)


@attrs.define(kw_only=True)
class EngineTotals:
    """One engine. `busy_ps`: time in steps. `gpus` is its tensor parallel size times its pipeline stages."""

    name: str
    role: str
    busy_ps: int = 0
    gpus: int = 1
    kv_blocks: int = 0
    """What its pool holds, 0 if unlimited."""
    peak_kv_blocks: int = 0
    prefix_cache_queries: int = 0
    """Tokens of its prompts, if it remembers prefixes."""
    prefix_cache_hits: int = 0
    """Of these, the tokens whose KV it had already."""
    up_ns: int | None = None
    """How long its GPUs were taken, if not for the whole run."""

    def held_ns(self, duration_ns: int) -> int:
        """How long its GPUs were taken in a run of that length."""
        return duration_ns if self.up_ns is None else self.up_ns

    def busy_share(self, duration_ns: int) -> float:
        """Share of its time in which the engine was in a step: its GPU utilisation as a sampler would see it."""
        return share(self.busy_ps, self.held_ns(duration_ns) * PS_PER_NS)


@attrs.define(kw_only=True)
class Totals:
    """Of one run. `duration_ns` is from its instant 0 to the end of its last request, not of its last timer."""

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
    engines: list[EngineTotals] = attrs.field(factory=list)
    notes: dict[str, int] = attrs.field(factory=dict)
    """How often an endpoint noted something (late, duplicate, stale...), by the note's name."""

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return sum(engine.gpus for engine in self.engines)

    def roles(self) -> tuple[str, ...]:
        """The roles of its engines, in order of appearance."""
        return tuple(dict.fromkeys(engine.role for engine in self.engines))

    def prefix_cache(self, role: str | None = None) -> tuple[int, int]:
        """Prompt tokens looked for and found, over the engines of one role or over all."""
        chosen = [engine for engine in self.engines if role is None or engine.role == role]
        return sum(e.prefix_cache_queries for e in chosen), sum(e.prefix_cache_hits for e in chosen)

    def gpu_busy_share(self, role: str | None = None) -> float:
        """Share of GPU time spent in steps, over the engines of one role or over all."""
        chosen = [engine for engine in self.engines if role is None or engine.role == role]
        held = sum(engine.gpus * engine.held_ns(self.duration_ns) for engine in chosen) * PS_PER_NS
        return share(sum(engine.busy_ps * engine.gpus for engine in chosen), held)

    def busiest_links(self, most: int) -> Sequence[LinkTotals]:
        """The links nearest to their capacity first, then by bytes, then in the network's order; idle ones left out."""
        used = [link for link in self.links if link.bytes > 0]
        return sorted(used, key=lambda link: (-link.utilisation(self.duration_ns), -link.bytes))[:most]


def share(portion: int, whole: int) -> float:
    """`portion / whole`; 0 if `whole` is 0."""
    return portion / whole if whole > 0 else 0.0
