"""The batch engine of a script: it records what a node asks of it, and does what the script says.

One small model stands behind both worlds' engines. It keeps a script legal: who may be admitted, what `drop` answers in
which phase, that a preempted sequence goes back to the head of the queue and is computed anew here. A step that is not
possible does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pdflow.engine.sequence import (
    Admitted,
    ChunkBegun,
    Dropped,
    Finished,
    NeverFitsError,
    Outcome,
    Phase,
    Prefilled,
    Sequence,
)
from pdflow.memory.paged import PagedPool
from pdflow.protocol.values import Allocation, Instant
from tests.serving.script import Call, Do

LAYER_NS: Final = 1_000_000
"""What a step that computes prompts takes for each layer."""


class RecordingPool(PagedPool):
    """A pool that says which of its blocks are put into quarantine."""

    __slots__ = ("on_quarantine",)

    def __init__(self, num_blocks: int, on_quarantine: Callable[[Allocation], None]) -> None:
        super().__init__(num_blocks)
        self.on_quarantine = on_quarantine

    def quarantine(self, allocation: Allocation) -> None:
        self.on_quarantine(allocation)
        super().quarantine(allocation)


class EngineModel:
    """Args: `record` takes each call; `layers` are those that ChunkBegun's layers are counted by."""

    def __init__(self, record: Callable[[Call], None], num_blocks: int, block_size: int, layers: int) -> None:
        self.record = record
        self.pool = RecordingPool(num_blocks, lambda own: self.call("quarantine", self.owner[own.generation]))
        self.block_size = block_size
        self.layers = layers
        self.reports_chunks = False
        self.held = False
        self.seqs: dict[int, Sequence] = {}
        """By request: its latest sequence."""
        self.numbers: dict[int, int] = {}
        """Requests, by the identity of their sequences."""
        self.kept: list[Sequence] = []
        """Every sequence so far, so that no identity is used twice."""
        self.owner: dict[int, int] = {}
        """Requests, by the generation of their blocks."""
        self.queue: list[Sequence] = []
        self.tokens: dict[int, int] = {}
        """Generated so far."""
        self.leaving: list[Sequence] = []
        self.step: list[tuple[Sequence, int]] = []
        """Prompts, and how much of them, in the step that runs."""
        self.layers_done = 0

    def call(self, kind: str, r: int, *details: Any) -> None:
        self.record(Call(kind, f"r{r}", details))

    def number(self, seq: Sequence) -> int:
        return self.numbers[id(seq)]

    # What a node asks.

    def submit(self, r: int, seq: Sequence) -> None:
        tokens = seq.prompt_tokens + (0 if seq.prefill_only else seq.output_tokens - 1)
        fits = tokens <= self.pool.num_blocks * self.block_size
        kind = "prompt only" if seq.prefill_only else f"{seq.output_tokens} out"
        remote = (seq.remote_tokens or seq.loaded_tokens or seq.prompt_tokens) if seq.remote_kv else 0
        self.call("submit", r, f"{seq.prompt_tokens} in", kind, f"{remote} remote", "fits" if fits else "never fits")
        if not fits:
            raise NeverFitsError(f"r{r}")
        assert seq.phase is Phase.NEW
        seq.phase = Phase.WAITING
        seq.local = not seq.remote_kv
        seq.target = seq.remote_tokens or seq.prompt_tokens
        self.seqs[r] = seq
        self.numbers[id(seq)] = r
        self.kept.append(seq)
        self.tokens[r] = 0
        self.queue.append(seq)

    def loaded(self, seq: Sequence) -> None:
        self.call("loaded", self.number(seq))
        assert seq.phase is Phase.LOADING, f"{seq.phase.name}, not LOADING"
        seq.phase = Phase.READY

    def drop(self, seq: Sequence) -> Dropped:
        answer = self._drop(seq)
        r = self.numbers.get(id(seq))
        self.record(Call("drop", "nobody" if r is None else f"r{r}", (answer.name,)))
        return answer

    def _drop(self, seq: Sequence) -> Dropped:
        phase = seq.phase
        if phase in (Phase.NEW, Phase.GONE) or seq.dropping:
            return Dropped.NOT_HERE
        if phase is Phase.RUNNING:
            seq.dropping = True
            self.leaving.append(seq)
            return Dropped.AFTER_STEP
        seq.phase = Phase.GONE
        if phase is Phase.WAITING:
            self.queue.remove(seq)
            return Dropped.AT_ONCE
        if phase is Phase.LOADING:
            return Dropped.BLOCKS_ARE_YOURS
        self._give_back(seq)
        return Dropped.AT_ONCE

    def release(self, allocation: Allocation) -> None:
        self.call("release blocks", self.owner[allocation.generation], *allocation.blocks)
        self.pool.release(allocation)

    def hold(self) -> None:
        if not self.held:
            self.record(Call("hold", "engine"))
        self.held = True

    def go_on(self) -> None:
        if self.held:
            self.record(Call("go on", "engine"))
        self.held = False

    # What a script has it do.

    def possible(self) -> list[Do]:
        """What it may do next."""
        found = []
        if self.step:
            last = not self.reports_chunks or self.layers_done == self.layers
            return [Do("computed", -1) if last else Do("layer", -1)]
        if self.queue and self._fits(self.queue[0]):
            seq = self.queue[0]
            r = self.number(seq)
            if seq.prefill_only and seq.local:
                found += self._chunks(r, seq)
            else:
                found.append(Do("admit", r))
                if not seq.local and seq.target > self.block_size:
                    found.append(Do("admit", r, self.block_size))
        for r, seq in self.seqs.items():
            if seq.phase is Phase.READY:
                found.append(Do("join", r))
            elif seq.phase is Phase.RUNNING and not seq.dropping:
                if seq.prefill_only:
                    found += self._chunks(r, seq)
                    continue
                found += [Do("finish", r), Do("preempt", r)]
                if self.tokens[r] < seq.output_tokens - 1:
                    found.append(Do("token", r))
        return found

    def _chunks(self, r: int, seq: Sequence) -> list[Do]:
        left = seq.target - seq.computed
        first_chunk = [Do("compute", r, self.block_size)] if left > self.block_size else []
        return [] if self.held else [*first_chunk, Do("compute", r, left)]

    def _fits(self, seq: Sequence) -> bool:
        return -(-seq.target // self.block_size) <= self.pool.free

    def do(self, step: Do, now: Instant) -> list[Outcome]:
        """What comes of it. Nothing, if it is not possible."""
        if self.leaving and step.act != "layer":
            for gone in self.leaving:
                if gone.phase is Phase.RUNNING and gone not in [seq for seq, _ in self.step]:
                    gone.phase = Phase.GONE
                    self._give_back(gone)
            self.leaving = [seq for seq in self.leaving if seq.phase is Phase.RUNNING]
        if step not in self.possible():
            return []
        acts: dict[str, Callable[..., list[Outcome]]] = {
            "admit": self._admit,
            "join": self._join,
            "token": self._token,
            "finish": self._finish,
            "preempt": self._preempt,
            "compute": self._compute,
            "layer": self._layer,
            "computed": self._computed,
        }
        return acts[step.act](step, now)

    def _admit(self, step: Do, now: Instant) -> list[Outcome]:
        seq = self.queue.pop(0)
        self._take(seq, step.r, step.n)
        seq.phase = Phase.RUNNING if seq.local else Phase.LOADING
        return [] if seq.local else [Admitted(seq, now)]

    def _take(self, seq: Sequence, r: int, here: int) -> None:
        seq.blocks = -(-seq.target // self.block_size)
        seq.allocation = self.pool.allocate(seq.blocks - here // self.block_size)
        assert seq.allocation is not None
        seq.cached_tokens = seq.computed = here
        seq.admitted_ns = now_or(seq.admitted_ns, 0)
        self.owner[seq.allocation.generation] = r

    def _join(self, step: Do, now: Instant) -> list[Outcome]:
        seq = self.seqs[step.r]
        seq.phase = Phase.RUNNING
        seq.start_ns = now_or(seq.start_ns, now)
        if seq.prefill_only:
            seq.local = True
            seq.computed = max(seq.computed, seq.loaded_tokens)
        return []

    def _token(self, step: Do, now: Instant) -> list[Outcome]:
        seq = self.seqs[step.r]
        seq.first_token_ns = now_or(seq.first_token_ns, now)
        if seq.local and not seq.generated:
            seq.generated = 1
        self.tokens[step.r] += 1
        return []

    def _finish(self, step: Do, now: Instant) -> list[Outcome]:
        seq = self.seqs[step.r]
        seq.first_token_ns = now_or(seq.first_token_ns, now)
        seq.phase = Phase.GONE
        self._give_back(seq)
        return [Finished(seq, now)]

    def _preempt(self, step: Do, now: Instant) -> list[Outcome]:
        seq = self.seqs[step.r]
        self._give_back(seq)
        seq.phase = Phase.WAITING
        seq.local = True
        seq.generated = self.tokens[step.r]
        seq.target = seq.prompt_tokens + seq.generated
        seq.computed = 0
        self.queue.insert(0, seq)
        return []

    def _compute(self, step: Do, now: Instant) -> list[Outcome]:
        seq = self.seqs[step.r]
        if seq.phase is Phase.WAITING:
            self.queue.remove(seq)
            self._take(seq, step.r, 0)
            seq.phase = Phase.RUNNING
        seq.start_ns = now_or(seq.start_ns, now)
        self.step = [(seq, step.n)]
        self.layers_done = 0
        end = now + self.layers * LAYER_NS
        return [ChunkBegun(seq, seq.computed, step.n, now, end)] if self.reports_chunks else []

    def _layer(self, step: Do, now: Instant) -> list[Outcome]:
        self.layers_done += 1
        return []

    def _computed(self, step: Do, now: Instant) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for seq, new in self.step:
            seq.computed += new
            if seq.dropping or seq.computed == seq.target:
                seq.phase = Phase.GONE
                if seq.dropping:
                    self._give_back(seq)
                else:
                    outcomes.append(Prefilled(seq, now))
        self.step = []
        return outcomes

    def _give_back(self, seq: Sequence) -> None:
        assert seq.allocation is not None
        self.pool.release(seq.allocation)
        seq.allocation = None


def now_or(known: Instant, now: Instant) -> Instant:
    return known if known >= 0 else now
