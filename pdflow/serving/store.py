"""The handling of puts and gets at a store's node.

The node is a decode engine towards the prefill engines that put, and a prefill engine towards the engines that get,
under two names and over one memory. A put is a decode leg: the store registers room, P writes, and the commit makes it
complete. From then on it is offered as a computed prompt is; so is what a lookup has found, at once. A call is answered
when there is something to get, or when there will not be. `store/ledger.py` knows what is where in memory.

Room is given when all that happens now is handled: the put that would get it may be given up at this very instant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from pdflow.methods.store.ledger import Lookup, Offer, Put, StoreLedger
from pdflow.methods.store.memory import StoreMemory
from pdflow.protocol.effects import AnswerPrefill, Commit, Enqueue, FreeBlocks, Quarantine, ReleaseBlocks, Resolve
from pdflow.protocol.events import DecodeAborted
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId, Xid
from pdflow.serving.core import Core, Port
from pdflow.serving.effects import AnswerCall, AskForRoom, EndCall, Stored
from pdflow.serving.events import CallWithdrawn, LookupRequested, PutRequested, RoomDue


class StoreCore(Core):
    """The core of a store's node. Args: `count` adds to a counter of the result: (its name, how much)."""

    def __init__(self, memory: StoreMemory, block_size: int, count: Callable[[str, int], None]) -> None:
        super().__init__()
        self.memory = memory
        self.ledger = StoreLedger(memory, block_size, count)
        self.puts: Port
        """The endpoint that is put to."""
        self.gets: Port
        """The endpoint that is got from."""
        self.asked = False
        self.rules.update(
            {
                PutRequested: self._put,
                LookupRequested: self._look,
                CallWithdrawn: self._withdrawn,
                RoomDue: self._admit_waiting,
            }
        )

    def begin(self, puts: Port, gets: Port) -> None:
        """Attach the endpoints of the node's two schedulers, for puts and for gets. To be called when the driver has
        registered its handlers of effects."""
        self.puts, self.gets = puts, gets
        self.do.update(
            {
                Enqueue: self._enqueue,
                Commit: self._commit,
                Resolve: self._resolve,
                Quarantine: self._quarantine,
                FreeBlocks: self._free,
                AnswerPrefill: self._answer,
                ReleaseBlocks: self._release,
            }
        )

    def knows(self, request_id: RequestId, xid: Xid) -> bool:
        """Whether one of these names is taken."""
        return request_id in self.ledger.puts or xid in self.ledger.offered

    # What engines ask of it.

    def _put(self, event: PutRequested) -> None:
        params = event.params
        put = Put(params.request_id, params, event.items, params.digest, params.weights)
        self.send_local(self.puts, self.ledger.start(put))

    def _look(self, event: LookupRequested) -> None:
        found = self.ledger.look(Lookup(event.request_id, event.xid, event.items, event.digest, event.weights))
        if found is None:
            self.pending_effects.append(AnswerCall(event.xid, None))
            self.pending_effects.append(EndCall(event.xid))
        else:
            self._offer(found)

    def _withdrawn(self, event: CallWithdrawn) -> None:
        abort_event = self.ledger.abort(event.request_id, event.xid)
        if abort_event is not None:
            self.send_local(self.puts if type(abort_event) is DecodeAborted else self.gets, abort_event)

    # Being written to.

    def _enqueue(self, _: Port, effect: Enqueue) -> None:
        never = self.ledger.enqueue(effect.request_id)
        if never is None:
            self._ask()
        else:
            self.send_local(self.puts, never)

    def _ask(self) -> None:
        if self.memory.waiting and not self.asked:
            self.asked = True
            self.pending_effects.append(AskForRoom())

    def _admit_waiting(self, _: RoomDue) -> None:
        self.asked = False
        for event in self.ledger.admit_waiting(self.now):
            self.send_local(self.puts, event)

    def _commit(self, _: Port, effect: Commit) -> None:
        put = self.ledger.puts[effect.request_id]
        self._offer(self.ledger.commit(effect.request_id))
        self.pending_effects.append(Stored(put.items, put.tokens))

    def _offer(self, events: Offer) -> None:
        for event in events:
            self.send_local(self.gets, event)

    def _resolve(self, _: Port, effect: Resolve) -> None:
        """Answer a put that has failed. No other request is affected."""
        put = self.ledger.failed(effect.request_id)
        code = Code.IO if effect.code is Code.NONE else effect.code
        self.pending_effects.append(AnswerCall(put.params.xid, None, code))
        self.pending_effects.append(EndCall(put.params.xid))
        self._ask()

    def _quarantine(self, _: Port, effect: Quarantine) -> None:
        """Keep held what a writer may still reach."""

    def _free(self, _: Port, effect: FreeBlocks) -> None:
        self.ledger.free(effect.allocation.generation, self.now)
        self._ask()

    # Being read from.

    def _answer(self, _: Port, effect: AnswerPrefill) -> None:
        """Answer the call of a prompt that can be got from now on."""
        self.pending_effects.append(effect)
        self.pending_effects.append(AnswerCall(effect.params.xid, effect.params))

    def _release(self, _: Port, effect: ReleaseBlocks) -> None:
        self.ledger.release(effect.xid, self.now)
        self.pending_effects.append(EndCall(effect.xid))
        self._ask()

    # As one value, for whoever explores.

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.ledger.fingerprint(), self.asked

    def assert_empty(self, whose: str) -> None:
        super().assert_empty(whose)
        self.ledger.assert_empty(whose)
