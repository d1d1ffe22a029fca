"""Which report vLLM waits for, of each request. Misuse that its own assertions miss is refused here.

vLLM asserts that a reported request exists and, unless it waits for its load, that it has finished. It accepts a second
report of a load before the next schedule, a failure of a load that it does not wait for, and `finished_sending` of a
request whose load is under way, which frees blocks that are being written. It waits without limit for a report that is
never made.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


class ReportLedger:
    """Wraps the hooks of a scheduler's connector.

    vLLM waits for `finished_recving` of the requests in `loading`, for `finished_sending` of those in `sending`.
    `answers` has the status of each request that is over, and the kv_transfer_params that its hook returned.
    """

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self.matched: dict[str, tuple[int | None, bool]] = {}
        """What the connector last answered, until blocks were allocated for it."""
        self.loading: set[str] = set()
        self.sending: set[str] = set()
        self.loaded: set[str] = set()
        """Requests whose load has ended well."""
        self.answers: dict[str, tuple[RequestStatus, Any]] = {}
        self.unanswered: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        for hook in (
            self.on_new_request,
            self.get_num_new_matched_tokens,
            self.update_state_after_alloc,
            self.update_connector_output,
        ):
            self._stand_around(connector, hook.__name__, hook)
        finished = "request_finished_all_groups" if isinstance(connector, SupportsHMA) else "request_finished"
        self._stand_around(connector, finished, self.request_finished)

    def _stand_around(self, connector: KVConnectorBase_V1, name: str, hook: Any) -> None:
        inner = getattr(connector, name)

        def called(*args: Any) -> Any:
            return hook(inner, *args)

        setattr(connector, name, called)

    def on_new_request(self, inner: Any, request: Request) -> None:
        self.unanswered[request.request_id] += 1
        inner(request)

    def get_num_new_matched_tokens(self, inner: Any, request: Request, computed: int) -> tuple[int | None, bool]:
        request_id = request.request_id
        result: tuple[int | None, bool] = inner(request, computed)
        external, loads = result
        assert request_id not in self.loading, f"{request_id} is looked up while it loads"
        assert external is None or 0 <= external <= request.num_tokens - computed, (request_id, result, computed)
        assert external or not loads, f"{request_id}: an asynchronous load of nothing"
        self.seen["looked up"] += 1
        self.seen["hit"] += computed > 0
        self.seen["loaded, looked up again"] += request_id in self.loaded
        self.seen["not known yet"] += external is None
        self.seen["matched, not allocated, matched again"] += loads and self.matched.get(request_id) == result
        self.matched[request_id] = result
        return result

    def update_state_after_alloc(self, inner: Any, request: Request, blocks: Any, external: int) -> None:
        matched, loads = self.matched.pop(request.request_id, (0, False))
        if external:
            assert external == matched, (request.request_id, external, matched)
            if loads:
                self.loading.add(request.request_id)
                self.seen["loads"] += 1
                self.seen["loads again"] += request.num_preemptions > 0
        inner(request, blocks, external)

    def request_finished(self, inner: Any, request: Request, block_ids: Any) -> tuple[bool, Any]:
        request_id = request.request_id
        self.unanswered[request_id] -= 1
        assert not self.unanswered[request_id], f"{request_id} has finished twice"
        del self.unanswered[request_id]
        self.matched.pop(request_id, None)
        self.loaded.discard(request_id)
        delay, params = inner(request, block_ids)
        self.answers[request_id] = request.status, params
        self.seen[request.status.name] += 1
        if delay:
            assert request_id not in self.loading, f"{request_id}: vLLM frees it at the first of two reports"
            self.sending.add(request_id)
        elif request_id in self.loading:
            self.seen[f"{request.status.name} while it loads"] += 1
        return delay, params

    def update_connector_output(self, inner: Any, output: KVConnectorOutput) -> None:
        """What the connector adds to the sets in its hook counts, except failures, which vLLM has read before."""
        failed = set(output.failed_recving)
        inner(output)
        assert output.failed_recving == failed, "failed_recving was read before this hook"
        received, sent = set(output.finished_recving or ()), set(output.finished_sending or ())
        assert failed <= received, f"failed, and waited for still: {failed - received}"
        assert received <= self.loading, f"no load of these is waited for: {received - self.loading}"
        assert sent <= self.sending, f"no end of sending is waited for: {sent - self.sending}"
        self.loading -= received
        self.loaded |= received - failed
        self.sending -= sent
        self.seen["load failed"] += len(failed)
        self.seen["sent"] += len(sent)
        self.seen["received"] += len(received) - len(failed)

    def assert_at_rest(self) -> None:
        assert not self.loading, f"vLLM waits for finished_recving of {sorted(self.loading)}"
        assert not self.sending, f"vLLM waits for finished_sending of {sorted(self.sending)}"
        assert not self.unanswered, f"without an end: {sorted(self.unanswered)}"
