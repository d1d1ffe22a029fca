"""Workers without a model: vLLM's own lifecycle of a connector in a step, around a forward pass that writes
fingerprints.

`KVConnectorModelRunnerMixin` is vLLM's. What the model runner and the executors do around it is short, and written here
after `v1/worker/gpu_model_runner.py` (`execute_model`, `sample_tokens`) and `v1/executor/multiproc_executor.py`.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.vllm.support.engine_config import of_rank
from tests.vllm.support.kv_memory import Chunk, KvMemory, sampled_token

T = TypeVar("T")
ATTENTION_METADATA = object()
"""A connector is handed some."""


class BedWorker:
    """The process of one rank."""

    def __init__(self, config: VllmConfig, rank: int, kv_cache_config: KVCacheConfig, memory: KvMemory) -> None:
        self.config = of_rank(config, rank)
        self.memory = memory
        self.tensors = {name: torch.from_numpy(array) for name, array in memory.layers.items()}
        connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_cache_config)
        assert isinstance(connector, KVConnectorBase_V1)
        self.connector = connector
        connector.register_kv_caches(self.tensors)

    def execute(self, output: SchedulerOutput, chunks: Sequence[Chunk]) -> ModelRunnerOutput:
        """One step. In vLLM a worker has one connector, which its model runner finds in a global variable."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            assert output.kv_connector_metadata is not None
            self.connector.handle_preemptions(output.kv_connector_metadata)
            if not chunks:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
            with (
                set_forward_context(None, self.config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as kv_output,
            ):
                self.forward(chunks)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        return ModelRunnerOutput(
            req_ids=[chunk.request_id for chunk in chunks],
            req_id_to_index={chunk.request_id: index for index, chunk in enumerate(chunks)},
            sampled_token_ids=[[sampled_token(chunk.end)] if chunk.samples else [] for chunk in chunks],
            kv_connector_output=kv_output,
        )

    def forward(self, chunks: Sequence[Chunk]) -> None:
        for layer, tensor in self.tensors.items():
            self.connector.wait_for_layer_load(layer)
            self.memory.forward(layer, chunks)
            self.connector.save_kv_layer(layer, tensor, ATTENTION_METADATA)


class StepFuture(Future[Any]):
    """Of a step that is executed when somebody asks for its result, or earlier."""

    def __init__(self, executor: BedExecutor) -> None:
        super().__init__()
        self.executor = executor

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self.executor.execute_one()
        return super().result()


def _copied(value: T, **changes: Any) -> T:
    """As `copy.copy`, which takes 30 us for a SchedulerOutput."""
    copied = object.__new__(type(value))
    copied.__dict__.update(value.__dict__, **changes)
    return copied


class BedExecutor:
    """Takes the steps of all workers, and executes them one after another.

    Args:
        chunks_of: what a step is to compute, asked when the step is scheduled.
        lags: whether a step is executed only when its result is waited for: with async scheduling the next one has been
            scheduled by then. Otherwise at once.
    """

    def __init__(
        self,
        workers: Sequence[BedWorker],
        aggregator: KVOutputAggregator | None,
        chunks_of: Callable[[SchedulerOutput], list[Chunk]],
        lags: Callable[[], bool],
    ) -> None:
        self.workers = workers
        self.aggregator = aggregator
        self.chunks_of = chunks_of
        self.lags = lags
        self.waiting: deque[tuple[StepFuture, SchedulerOutput, list[Chunk]]] = deque()
        self.unsampled: deque[StepFuture] = deque()

    def execute_model(self, output: SchedulerOutput, non_block: bool = False) -> Future[Any]:
        step = StepFuture(self)
        self.waiting.append((step, output, self.chunks_of(output)))
        if not self.lags():
            while self.waiting:
                self.execute_one()
        if not output.total_num_scheduled_tokens:
            return step
        self.unsampled.append(step)
        executed = Future[Any]()
        executed.set_result(None)
        return executed

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        step = self.unsampled.popleft()
        return step if non_block else step.result()

    def execute_one(self) -> None:
        step, output, chunks = self.waiting.popleft()
        try:
            step.set_result(self._execute(output, chunks))
        except Exception as error:
            step.set_exception(error)

    def _execute(self, output: SchedulerOutput, chunks: list[Chunk]) -> ModelRunnerOutput:
        if self.aggregator is None:
            (worker,) = self.workers
            return worker.execute(output, chunks)
        results: list[ModelRunnerOutput | None] = []
        message = pickle.dumps(output.kv_connector_metadata)
        for worker in self.workers:
            received = _copied(output, kv_connector_metadata=pickle.loads(message))
            result = worker.execute(received, chunks)
            answer = pickle.dumps(result.kv_connector_output)
            results.append(_copied(result, kv_connector_output=pickle.loads(answer)))
        aggregated = self.aggregator.aggregate(results)
        assert aggregated is not None
        return aggregated

    # What else EngineCore asks of an executor, when it pauses.

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [None for _ in self.workers]

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass
