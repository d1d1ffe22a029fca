"""What vLLM's scheduler expects to be told of each load, so that it is told exactly once, and of no other request.

vLLM 0.32 (`Scheduler._update_from_kv_xfer_finished`) asserts that every id in `finished_recving` is a request that it
still has, so one id too many ends EngineCore, for all its clients; one that is missing keeps the request's blocks for
ever. It expects one report of each request whose blocks it has allocated for a load: whether the load ends well, fails
(`failed_recving` in the same output), or the client has gone meanwhile, when the blocks wait for the report.

`finished_sending` is never reported: what P still sends from is kept by references (`block_references.py`), and not by
the delayed free that vLLM offers, so vLLM expects nothing of it.
"""

from __future__ import annotations

from typing import Final


class LedgerError(AssertionError):
    """A report that vLLM does not wait for, or a second load of one request: a bug of the connector's."""


class LoadLedger:
    """The loads of which vLLM waits for a report, and the reports that its next output will hold."""

    def __init__(self) -> None:
        self._waiting: Final[dict[str, None]] = {}
        self._received: Final[set[str]] = set()

    def __len__(self) -> int:
        """Return how many reports vLLM waits for."""
        return len(self._waiting) + len(self._received)

    def __contains__(self, request_id: str) -> bool:
        """Whether vLLM waits for the report of this request's load, and nobody has it in hand."""
        return request_id in self._waiting

    def waiting(self) -> tuple[str, ...]:
        return tuple(self._waiting)

    def begin(self, request_id: str) -> None:
        """Note that vLLM has allocated a request's blocks for a load."""
        if request_id in self._waiting or request_id in self._received:
            raise LedgerError(f"vLLM already waits for the load of {request_id}")
        self._waiting[request_id] = None

    def end(self, request_id: str) -> None:
        """Report in the next output that a load has ended."""
        self.fail(request_id)
        self._received.add(request_id)

    def fail(self, request_id: str) -> None:
        """Note that this output reports a load, as failed."""
        if request_id not in self._waiting:
            raise LedgerError(f"vLLM does not wait for the load of {request_id}")
        del self._waiting[request_id]

    def take_received(self) -> set[str]:
        """Return the loads that have ended well since the last call."""
        taken = set(self._received)
        self._received.clear()
        return taken
