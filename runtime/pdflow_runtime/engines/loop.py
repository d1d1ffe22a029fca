"""A live engine: pdflow's scheduler composes each step, a runner computes it.

Which sequences run is decided by `pdflow/engine/scheduler.py`, the very one that is simulated, with blocks that have
names (`named.py`) and a clock that is read. The live engine keeps what simulation has no use for, the tokens.

One task runs it; all its methods and callbacks are called in trio's thread. Outputs come in this order: the tokens of
a step, the outcomes of its end (Prefilled, Finished), the sequences admitted to the next. A callback may call the
engine at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Final, TypeAlias

import trio

from pdflow.cost.step import PS_PER_NS
from pdflow.engine import Dropped, Finished, Limits, Outcome, Prefilled, Sequence
from pdflow.engine.named import NamedBatch
from pdflow.engine.scheduler import Scheduler
from pdflow.engine.sequence import ChunkBegun, NeverFitsError
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow.protocol.values import Allocation, Instant, Value
from pdflow.serving.events import EngineRejected
from pdflow_runtime.clock import now_ns
from pdflow_runtime.engines.job import Job, Runner, Sampled, Token, TokenRequest, Work
from pdflow_runtime.engines.prefix import block_names
from pdflow_runtime.engines.sampling.constraints import History
from pdflow_runtime.engines.step_load import CopyLayer, StepLoad


class LayerComputed(Value, frozen=True, gc=False):
    """The running step has written the KV of this layer to its blocks."""

    layer: int
    at_ns: Instant


EngineOutput: TypeAlias = Token | LayerComputed | Outcome


class _Answer:
    """The state of a sequence that the scheduler does not keep: its tokens and its block table."""

    __slots__ = ("allocation", "blocks", "first", "job", "loaded", "prompt", "tokens")

    def __init__(self, job: Job) -> None:
        self.job: Final = job
        self.tokens: Final = list(job.tokens)
        self.prompt: Final = len(job.tokens)
        self.first: Final = self.prompt - job.given
        """Where the answer begins."""
        self.allocation: Allocation | None = None
        self.blocks: tuple[int, ...] = ()
        self.loaded = False
        """True if KV has arrived for it and no step has read that yet."""


class LiveEngine:
    """An engine whose steps the scheduler composes and `runner` computes. `on_output` must not wait. `eos`: tokens that
    end an answer unless it ignores them."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        pool: PagedPool,
        on_output: Callable[[EngineOutput], None],
        eos: Iterable[int] = (),
    ) -> None:
        if limits.async_scheduling:
            raise ValueError(
                "async_scheduling is not supported: a live engine composes a step when the previous one has ended"
            )
        self.limits: Final = limits
        self.pool: Final = pool
        self.steps = 0
        self.generated_tokens = 0
        self.prompt_tokens_computed = 0
        """Tokens of prompts that were computed here, a transferred prompt's last one included."""
        self._batch: Final = NamedBatch(limits.block_size)
        self._scheduler: Final = Scheduler(limits, pool, self._batch, False, None)
        self._runner: Final = runner
        self._on_output: Final = on_output
        self._eos: Final = frozenset(eos)
        self._answers: dict[Sequence, _Answer] = {}
        self._bell = trio.Event()
        self._reporting: Sequence | None = None
        self._held = False
        self._load: StepLoad | None = None
        """The copies that the step which is being composed will wait for."""
        self._idle = False
        """It waits for the bell, since there was nothing to compute."""
        self.reports_chunks = False
        """Whether ChunkBegun, then LayerComputed, are reported for chunks of prompts computed for another engine."""
        self.stepped: Callable[[Seq[Work], Instant, int], None] | None = None
        """Called with each step that is over, when it began, and how many blocks are not free."""
        self.settle: Callable[[], None] | None = None
        """Called before a step is composed or completed, for whatever has come before it to be handled before its
        outcomes."""

    # What the driver tells.

    def submit(self, job: Job) -> None:
        """Queue the job. Raises NeverFitsError, changing nothing, if the whole pool is too small for it."""
        seq = job.seq
        if seq.prompt_tokens != len(job.tokens):
            raise ValueError(
                f"sequence {seq.index} has {len(job.tokens)} prompt tokens, but prompt_tokens is {seq.prompt_tokens}"
            )
        self._scheduler.admission.enqueue(seq, now_ns())
        self._answers[seq] = _Answer(job)
        self._bell.set()

    def enqueue(self, job: Job) -> EngineRejected | None:
        """Queue the job; return why, if it can never be computed here."""
        try:
            self.submit(job)
        except NeverFitsError as error:
            return EngineRejected(job.seq.handle, str(error))
        return None

    def loaded(self, seq: Sequence) -> None:
        """Take an admitted remote sequence whose KV has arrived: it decodes from the next step on."""
        answer = self._answers[seq]
        answer.loaded = True
        if answer.job.given:
            answer.tokens[:] = answer.job.tokens
        self._scheduler.arrived(seq, now_ns())
        self._bell.set()

    def load_in_step(self, seq: Sequence, layers: int, copy: CopyLayer, copied: Callable[[], None]) -> None:
        """Have the step that admits `seq`, a sequence with `loads_in_step`, copy its KV and wait for each layer. To be
        called while its `Admitted` is reported. `copy` and `copied` are called in another thread: see `StepLoad`."""
        if seq not in self._scheduler.awaited:
            raise ValueError(f"sequence {seq.index} is not one whose KV the next step waits for")
        self._scheduler.awaited.remove(seq)
        self._load = self._load or StepLoad(layers)
        self._load.add(copy, copied)

    def finish(self, seq: Sequence) -> None:
        """Make the token that is being reported the sequence's last: `Finished` comes with the end of this step."""
        if self._reporting is not seq:
            raise ValueError(f"sequence {seq.index} should finish with a token, but no token of it is being reported")
        self._end(seq)

    def drop(self, seq: Sequence) -> Dropped:
        """Abort the sequence: nothing more of it is reported. Returns what happened to its blocks."""
        answer = self._scheduler.drop(seq, now_ns())
        if answer is not Dropped.NOT_HERE:
            del self._answers[seq]
            self._bell.set()
        return answer

    def release(self, allocation: Allocation) -> None:
        """Release an allocation that the caller has kept after its sequence ended."""
        self.pool.release(allocation)
        self._bell.set()

    def hold(self) -> None:
        """Begin no step from now on."""
        self._held = True

    def resume(self) -> None:
        """Begin steps again."""
        self._held = False
        self._bell.set()

    async def run(self) -> None:
        """Run step after step, for ever. A step that has begun is waited for even when this is cancelled."""
        while True:
            begun = now_ns()
            # What is told while a step is composed may ring already.
            self._bell = trio.Event()
            works = [] if self._held else self._compose()
            if not works:
                self._idle = True
                await self._bell.wait()
                self._idle = False
                continue
            layer_done = self._layer_done if self.reports_chunks else None
            load, self._load = self._load, None
            results = await self._runner.step([work for _, work in works], layer_done, load)
            self.steps += 1
            self._complete(works, results)
            if self.stepped is not None:
                self.stepped([work for _, work in works], begun, self.pool.num_blocks - self.pool.free)

    # What the driver asks.

    def missed_wake_up(self) -> str:
        """Describe, in words, what the engine could compute while it is idle and nothing wakes it (S12); "" if nothing:
        then its driver has called a method here for all that has changed. For tests."""
        if not self._idle or self._held or self._bell.is_set():
            return ""
        admission = self._scheduler.admission
        if self.running:
            return f"the engine is idle, but {self.running} sequences could be computed"
        if admission.waiting and admission.spare_for_head() >= 0:
            return f"the engine is idle, but the first of {admission.waiting} sequences in its queue could be admitted"
        return ""

    def names(self, tokens: Seq[int]) -> tuple[int, ...]:
        """Return the `prefix` of a sequence with these tokens: the names of the blocks that this engine's pool may
        remember."""
        if not isinstance(self.pool, CachingPool):
            return ()
        return block_names(tokens, self.pool.span * self.limits.block_size)

    @property
    def waiting(self) -> int:
        return self._scheduler.admission.waiting

    @property
    def loading(self) -> int:
        return self._scheduler.admission.loading

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def prefix_cache_queries(self) -> int:
        return self._scheduler.admission.prefix_cache_queries

    @property
    def caches_prefixes(self) -> bool:
        return self._scheduler.admission.prefixes is not None

    @property
    def prefix_cache_hits(self) -> int:
        return self._scheduler.admission.prefix_cache_hits

    # A step.

    def _compose(self) -> list[tuple[Sequence, Work]]:
        """Compose the next step, and report the outcomes of that. Empty: there is nothing to do until the bell
        rings."""
        if self.settle is not None:
            self.settle()
        now = now_ns()
        outcomes: list[Outcome] = []
        scheduler = self._scheduler
        works = []
        if scheduler.compose(now * PS_PER_NS, now, now + 1, True, outcomes):
            works = self._begun(now)
        for outcome in outcomes:
            self._on_output(outcome)
        self._check_loads()
        if self.reports_chunks and works:
            for seq, new in self._scheduler.chunks:
                if seq.prefill_only:
                    self._on_output(ChunkBegun(seq, seq.computed, new, now, now))
        return works

    def _check_loads(self) -> None:
        """Raise RuntimeError if the step would read blocks into which nothing is copied."""
        awaited = self._scheduler.awaited
        if missing := [seq.index for seq in awaited if not seq.dropping]:
            raise RuntimeError(f"no copies were given for sequences {missing}, which load in the step that admits them")
        awaited.clear()

    def _layer_done(self, layer: int, at: Instant) -> None:
        self._on_output(LayerComputed(layer, at))

    def _begun(self, now: int) -> list[tuple[Sequence, Work]]:
        self._batch.name_blocks(self.pool)
        works = []
        for seq, new in self._scheduler.chunks:
            emits_token = not seq.prefill_only or self._answers[seq].job.returns_first_token
            needs_token = emits_token and seq.computed + new == seq.target
            works.append((seq, self._work(seq, seq.computed, new, needs_token, False)))
        for seq, context in self._batch.contexts():
            works.append((seq, self._work(seq, context - 1, 1, True, True)))
        for seq, _ in works:
            if seq.start_ns < 0:
                seq.start_ns = now
        return works

    def _work(self, seq: Sequence, start: int, new: int, needs_token: bool, decodes: bool) -> Work:
        answer = self._answers[seq]
        allocation = seq.allocation
        assert allocation is not None
        if allocation is not answer.allocation:
            answer.allocation = allocation
            answer.blocks = self.pool.table(allocation) if isinstance(self.pool, CachingPool) else allocation.blocks
        end = start + new
        self.prompt_tokens_computed += max(0, min(end, answer.prompt) - start)
        token_request = self._token_request(answer) if needs_token else None
        loaded: tuple[int, ...] = ()
        in_step = seq in self._scheduler.awaited
        if answer.loaded or in_step:
            # Its own blocks: those that it shares with others have been read before.
            shared = len(answer.blocks) - len(allocation.blocks)
            loaded = answer.blocks[shared : -(-start // self.limits.block_size)]
            answer.loaded = False
        scores = None if decodes else answer.job.scores
        tokens = tuple(answer.tokens[start:end])
        return Work(tokens, start, answer.blocks, token_request, decodes, loaded, in_step, scores)

    def _token_request(self, answer: _Answer) -> TokenRequest:
        sampling, index = answer.job.sampling, len(answer.tokens) - answer.first
        if sampling.constraints is None:
            return TokenRequest(sampling, index)
        endings = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | self._eos
        return TokenRequest(sampling, index, History(answer.tokens, answer.first, endings))

    def _complete(self, works: list[tuple[Sequence, Work]], results: list[Sampled | None]) -> None:
        if self.settle is not None:
            self.settle()
        now = now_ns()
        for (seq, _), sampled in zip(works, results, strict=True):
            if sampled is not None and not seq.dropping:
                self._append_token(seq, sampled, now)
        outcomes: list[Outcome] = []
        self._scheduler.complete(1, now * PS_PER_NS, now, outcomes)
        for outcome in outcomes:
            if type(outcome) is Finished or type(outcome) is Prefilled:
                del self._answers[outcome.seq]
            self._on_output(outcome)

    def _append_token(self, seq: Sequence, sampled: Sampled, now: int) -> None:
        """Append a sampled token to its sequence and report it. A stop token ends the sequence for the scheduler,
        too."""
        answer = self._answers[seq]
        answer.tokens.append(sampled.token)
        self.generated_tokens += 1
        if seq.first_token_ns < 0:
            seq.first_token_ns = now
        sampling = answer.job.sampling
        stops = sampled.token in sampling.stop_token_ids or (sampled.token in self._eos and not sampling.ignore_eos)
        if stops:
            self._end(seq)
        last = len(answer.tokens) - answer.prompt == seq.output_tokens
        self._reporting = seq
        self._on_output(Token(seq, sampled.token, sampled.logprobs, "stop" if stops else "length" if last else None))
        self._reporting = None

    def _end(self, seq: Sequence) -> None:
        answer = self._answers[seq]
        seq.output_tokens = len(answer.tokens) - answer.prompt
