"""The guard around the scheduler's half: an exception in one of its hooks, a bug of ours, ends the connector and not
EngineCore.

An exception out of a hook would end EngineCore, for all its clients (vLLM has no handler there). After the first one
the connector is broken until its process restarts: loads that vLLM waits for are reported as failed, what the protocol
holds stays referenced, since a writer may still reach it, and every later request is computed by vLLM alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from pdflow.protocol.values import BlockTables
from pdflow_runtime.vllm.scheduler.scheduler_side import SchedulerSide
from pdflow_runtime.vllm.step_metadata import decode_up

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedSide:
    """The hooks of a scheduler's half, none of which raises. Args: `side`; `make_broken` is called once, with a text,
    when it breaks."""

    def __init__(self, side: SchedulerSide[Any], make_broken: Callable[[str], None] = lambda _: None) -> None:
        self.side: Final = side
        self.broken = ""
        """Why the connector is broken; empty while it works."""
        self._make_broken: Final = make_broken
        self._asked: Final[set[str]] = set()
        """Loads that workers have been asked to report as failed, and have not. What else is reported as failed belongs
        to another connector of a MultiConnector."""

    def _guarded(self, otherwise: T, hook: Callable[..., T], *args: Any) -> T:
        if self.broken:
            return otherwise
        try:
            return hook(*args)
        except Exception as error:
            self.break_off(f"{type(error).__name__}: {error}")
            log.exception("pdflow: internal error in %s; please report it", getattr(hook, "__name__", hook))
            return otherwise

    def break_off(self, why: str) -> None:
        """Move no KV any more. Blocks that the protocol holds stay referenced until the process restarts."""
        if self.broken:
            return
        self.broken = why
        log.error(
            "pdflow's connector of %s has failed and moves no KV until the instance restarts (%s): the instance "
            "computes all prompts itself, and %d KV blocks stay out of use",
            self.side.instance.info.engine,
            why,
            self.side.references.blocks,
        )
        self._make_broken(why)

    # Hooks.

    def on_new_request(self, request: Any) -> None:
        self._guarded(None, self.side.on_new_request, request)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        nothing: tuple[int | None, bool] = (0, False)
        return self._guarded(nothing, self.side.get_num_new_matched_tokens, request, computed)

    def update_state_after_alloc(self, request: Any, tables: BlockTables, external: int) -> None:
        """Broken, the connector offers no KV; a load that vLLM begins all the same, as it was offered before, fails."""
        self._guarded(None, self.side.update_state_after_alloc, request, tables, external)
        if self.broken and external and request.request_id not in self.side.ledger:
            self.side.ledger.begin(request.request_id)

    def request_finished(self, request: Any, tables: BlockTables) -> dict[str, Any] | None:
        return self._guarded(None, self.side.request_finished, request, tables)

    def take_failed(self) -> tuple[str, ...]:
        """Return the loads that workers are to report as failed with this step. Broken, all that vLLM waits for."""
        nothing: tuple[str, ...] = ()
        failed = self._guarded(nothing, self.side.take_failed)
        if self.broken:
            failed = tuple(each for each in self.side.ledger.waiting() if each not in self._asked)
        self._asked.update(failed)
        return failed

    def take_down(self, scheduled: Mapping[str, int]) -> bytes | None:
        return self._guarded(None, self.side.take_down, scheduled)

    def update_output(self, output: Any, payloads: list[bytes] | None) -> None:
        """Handle a step's output, and add to its reports what vLLM waits for (`vllm.v1.outputs.KVConnectorOutput`).
        `payloads`: what ranks have sent with it, or None."""
        if failed := self._asked.intersection(output.failed_recving or ()):
            self._asked.difference_update(failed)
            unexpected = self._update_failed(failed)
            output.finished_recving = (output.finished_recving or set()) - unexpected
        if payloads is not None:
            self._guarded(None, self._take_up, payloads)
        if received := self.side.ledger.take_received():
            output.finished_recving = (output.finished_recving or set()) | received

    def _update_failed(self, failed: set[str]) -> set[str]:
        """Handle the workers' reports of failed loads, and return those of which vLLM waits for none."""
        before = set(self.side.ledger.waiting())
        if not self.broken:
            unexpected = self._guarded(None, self.side.update_failed, failed)
            if unexpected is not None:
                return unexpected
        for request_id in failed & before:
            if request_id in self.side.ledger:
                self.side.ledger.fail(request_id)
        return failed - before

    def _take_up(self, payloads: list[bytes]) -> None:
        """Handle what ranks have sent. A rank that has ended breaks the connector."""
        messages = [decode_up(payload) for payload in payloads]
        for message in messages:
            if message.broken:
                self.break_off(f"rank {message.rank}: {message.broken}")
                return
        self.side.take_up(messages)

    def reset(self) -> None:
        self._guarded(None, self.side.reset)

    def has_pending_work(self) -> bool:
        if self.broken:
            return bool(len(self.side.ledger))
        return self._guarded(False, self.side.has_pending_work)
