"""A runner that computes the model in torch: works become forward passes, in a thread, and logits become tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import torch
import trio
from torch import Tensor

from pdflow_runtime.clock import clock_for_threads
from pdflow_runtime.engines.attention.gathered import gathered
from pdflow_runtime.engines.attention.prompts import prompts_attending
from pdflow_runtime.engines.device import Device, DeviceEvent
from pdflow_runtime.engines.host_mirror import HostMirror
from pdflow_runtime.engines.job import LayerDone, Sampled, Work
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.malloc import keep_what_is_freed
from pdflow_runtime.engines.model import Attends, Llama, StepInput
from pdflow_runtime.engines.rows import ROWS
from pdflow_runtime.engines.sampling.draws import sample, score
from pdflow_runtime.engines.sampling.logprobs import PromptScores
from pdflow_runtime.engines.step_load import StepLoad

if TYPE_CHECKING:
    from pdflow_runtime.engines.attention.decode_graphs import DecodeGraphs

_KERNELS_FOR: Final = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that kernels of attention compute in, on a GPU."""


class TorchRunner:
    """A runner of one model and its cache. Steps are computed one at a time, each in trio's next idle thread. Args:
    `mirror`, the copy of the blocks in host memory, if there is one; `stores`, whether it is kept up to date, as a
    prefill engine's is."""

    def __init__(self, model: Llama, cache: KvCache, mirror: HostMirror | None = None, stores: bool = False) -> None:
        keep_what_is_freed()
        self._model = model
        self._cache = cache
        self._device: Final[Device] = cache.device
        self._mirror: Final = mirror
        self._stores: Final = stores
        self._kernels: Final = self._device.where.type == "cuda" and cache.dtype in _KERNELS_FOR
        self._graphs: Final = _graphs(model, cache) if self._kernels else None

    def warm_up(self, sequences: int) -> None:
        """Compile what prompts take, and what decoding up to so many sequences at once does. Only a GPU needs that. To
        be called before any block is in use."""
        if not self._kernels:
            return
        # Two numbers of rows: what is compiled for the second one is for any.
        for rows in (ROWS, 3 * ROWS):
            blocks = -(-rows // self._cache.block_size)
            if blocks <= self._cache.num_blocks:
                self.compute([Work((0,) * rows, 0, tuple(range(blocks)), None)])
        if self._graphs is not None and sequences:
            with self._device.computing():
                self._graphs.warm_up(sequences)
                self._device.record().synchronize()

    async def step(
        self, works: Seq[Work], layer_done: LayerDone | None = None, load: StepLoad | None = None
    ) -> list[Sampled | None]:
        if layer_done is None:
            return await trio.to_thread.run_sync(self.compute, works, None, load)
        # In the order of the calls, and before what the thread returns.
        soon = trio.lowlevel.current_trio_token().run_sync_soon
        now = clock_for_threads()
        return await trio.to_thread.run_sync(self.compute, works, lambda layer: soon(layer_done, layer, now()), load)

    def compute(
        self, works: Seq[Work], written: Callable[[int], None] | None = None, load: StepLoad | None = None
    ) -> list[Sampled | None]:
        """Compute a step; when this returns, all of its KV is in its blocks, and in the mirror if that is kept, and all
        copies of `load` have ended, also if it raises LoadFailedError."""
        chosen: dict[int, Sampled] = {}
        with self._device.computing(), self._loading(works, load):
            self._load(works)
            self._clear_ends(works)
            wait_for = None if load is None else load.wait_for
            layers = _Layers(self._device, written, self._store(works), wait_for)
            for numbers, forward in self._batches(works):
                logits = forward([works[at] for at in numbers], layers)
                to_sample = [at for at in numbers if works[at].token_request is not None]
                requests = [request for at in to_sample if (request := works[at].token_request)]
                chosen |= zip(to_sample, sample(logits, requests), strict=True)
            layers.finish()
        return [chosen.get(at) for at in range(len(works))]

    def _batches(self, works: Seq[Work]) -> list[tuple[list[int], Callable[[list[Work], _Layers], Tensor]]]:
        """Return the numbers of works that are computed together, and the function that does: a graph decodes only, and
        no KV that is still copied, since it waits for no layer."""
        numbers = list(range(len(works)))
        graphs = self._graphs
        if graphs is None:
            # Those with one token by the size of their contexts: neighbours attend together.
            numbers.sort(key=lambda at: (len(works[at].tokens) > 1, works[at].start))
            return [(numbers, self._forward)]
        prompts = [at for at in numbers if works[at].in_step or not works[at].decodes]
        decodes = [at for at in numbers if works[at].decodes and not works[at].in_step]
        batches: list[tuple[list[int], Callable[[list[Work], _Layers], Tensor]]] = []
        if prompts:
            batches.append((prompts, self._forward))
        for first in range(0, len(decodes), graphs.most):
            batches.append((decodes[first : first + graphs.most], lambda batch, layers: graphs.forward(batch)))
        return batches

    def _forward(self, works: list[Work], layers: _Layers) -> Tensor:
        return self._model.forward(self._input(works), self._cache, layers.queued, layers.wait_for)

    def _input(self, works: Seq[Work]) -> StepInput:
        size, cache = self._cache.block_size, self._cache
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        logits_indices = []
        scored = _ScoredRows() if any(work.scores is not None for work in works) else None
        for work in works:
            end = work.start + len(work.tokens)
            if scored is not None and work.scores is not None:
                scored.add(work.scores, work.scores.rows(work.start, end), len(tokens))
            tokens += work.tokens
            positions += range(work.start, end)
            blocks += [work.blocks[at // size] for at in range(work.start, end)]
            if work.token_request is not None:
                logits_indices.append(len(tokens) - 1)
        tensor = self._device.tensor
        at = tensor(positions)
        return StepInput(
            tokens=tensor(tokens),
            positions=at,
            slot_mapping=cache.slot_mapping(tensor(blocks), at % size),
            attending=self._attending(works),
            logits_indices=tensor(logits_indices),
            scored=None if scored is None else scored.on(self._device),
        )

    def _attending(self, works: Seq[Work]) -> Seq[Attends]:
        if self._kernels:
            return prompts_attending(works, self._cache)
        return gathered(works, self._cache, self._model.group)

    def _load(self, works: Seq[Work]) -> None:
        """Bring what has landed in host memory to the blocks."""
        landed = sorted({block for work in works if not work.in_step for block in work.loaded})
        if self._mirror is not None and landed:
            self._mirror.load(self._device.tensor(landed))

    def _loading(self, works: Seq[Work], load: StepLoad | None) -> AbstractContextManager[None]:
        """Make the step's copies while it computes. Those into host memory are followed by copies of the same blocks to
        the device, which overwrite the slots beyond each sequence's end, too."""
        mirror, device = self._mirror, self._device
        if load is None:
            return nullcontext()
        copied = sorted({block for work in works if work.in_step for block in work.loaded})
        if mirror is None or not copied:
            return load.running(None)
        blocks, ends = device.tensor(copied), self._ends([work for work in works if work.in_step])

        def bring(layer: int) -> None:
            with device.loading():
                mirror.load(blocks, layer)
                if ends is not None:
                    self._cache.clear(*ends, layer)
                device.record().synchronize()

        return load.running(bring)

    def _store(self, works: Seq[Work]) -> Callable[[int], None] | None:
        """Return what copies a layer's KV of this step to host memory, if that is kept."""
        mirror = self._mirror
        if mirror is None or not self._stores:
            return None
        blocks = mirror.blocks((work.blocks, work.start, work.start + len(work.tokens)) for work in works)
        return lambda layer: mirror.store(layer, blocks)

    def _clear_ends(self, works: Seq[Work]) -> None:
        """Zero the slots beyond each sequence's end in its last block: they may hold anything, and 0 times infinity is
        no number."""
        ends = self._ends(works)
        if ends is not None:
            self._cache.clear(*ends)

    def _ends(self, works: Seq[Work]) -> tuple[Tensor, Tensor] | None:
        """Return the blocks and offsets of these slots; None if there are none."""
        size = self._cache.block_size
        blocks: list[int] = []
        offsets: list[int] = []
        for work in works:
            end = work.start + len(work.tokens)
            if end % size and (work.loaded or not work.decodes or not work.start % size):
                blocks += [work.blocks[end // size]] * (size - end % size)
                offsets += range(end % size, size)
        return (self._device.tensor(blocks), self._device.tensor(offsets)) if blocks else None


class _ScoredRows:
    """The rows of a step whose logits score tokens of prompts, prompt after prompt."""

    def __init__(self) -> None:
        self.rows: Tensor
        self._numbers: list[int] = []
        self._positions: list[tuple[PromptScores, int]] = []
        """Of each row, whose prompt it scores, and its position there."""

    def add(self, scores: PromptScores, positions: range, first: int) -> None:
        """Add the rows from the number `first` on, at these positions of a prompt."""
        self._numbers += range(first, first + len(positions))
        self._positions += [(scores, position) for position in positions]

    def on(self, device: Device) -> _ScoredRows | None:
        """Return this with its rows on the device; None if there are none."""
        self.rows = device.tensor(self._numbers)
        return self if self._numbers else None

    def take(self, first: int, logits: Tensor) -> None:
        score(logits, self._positions[first : first + len(logits)])


class _Layers:
    """The layers of a running step: those whose KV is in its blocks are reported in order, in the computing thread,
    between one layer's launch and the next one's. Args: `wait_for` waits until a layer may be computed; None if all
    may."""

    def __init__(
        self,
        device: Device,
        written: Callable[[int], None] | None,
        store: Callable[[int], None] | None,
        wait_for: Callable[[int], None] | None = None,
    ) -> None:
        self.wait_for: Final = wait_for
        self._device: Final = device
        self._written: Final = written
        self._store: Final = store
        self._queued: deque[tuple[int, DeviceEvent]] = deque()

    def queued(self, layer: int) -> None:
        """Take note that a layer's KV will be in its blocks once all that is queued by now is done."""
        if self._store is not None:
            with self._device.copying():
                self._store(layer)
                event = self._device.record()
        elif self._written is not None:
            event = self._device.record()
        else:
            return
        self._queued.append((layer, event))
        while self._queued and self._queued[0][1].query():
            self._report()

    def finish(self) -> None:
        """Wait for everything that is queued, and report the layers that are not reported yet."""
        while self._queued:
            self._queued[0][1].synchronize()
            self._report()
        self._device.record().synchronize()

    def _report(self) -> None:
        layer, _ = self._queued.popleft()
        if self._written is not None:
            self._written(layer)


def _graphs(model: Llama, cache: KvCache) -> DecodeGraphs:
    # It imports torch's compiler, which takes seconds, and of which a CPU has no use.
    from pdflow_runtime.engines.attention.decode_graphs import DecodeGraphs

    return DecodeGraphs(model, cache)
