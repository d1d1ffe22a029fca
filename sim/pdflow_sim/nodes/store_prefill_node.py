"""A prefill engine that puts what it computes into a store, and loads from there what other engines have put.

`pdflow/serving/storing.py` decides what it does with a prompt. This module has its calls of the store's nodes, which
take a control message's time, and its engine.
"""

from __future__ import annotations

from functools import partial

from pdflow.engine.sequence import Admitted, Sequence
from pdflow.methods.method import PipelinePolicy
from pdflow.methods.store.memory import Item
from pdflow.methods.wire_profile import Side
from pdflow.protocol.effects import Commit, FreeBlocks, PostRead, Quarantine, ReadWord
from pdflow.protocol.ids import KvParams
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import Xid
from pdflow.routing.effects import DispatchPrefill
from pdflow.routing.events import PrefillAnswered
from pdflow.serving.batch import enqueue
from pdflow.serving.core import Port
from pdflow.serving.effects import (
    AnswerCall,
    AnswerStored,
    AskStore,
    ComputeAgain,
    EnqueueLoading,
    Forget,
    HoldEngine,
    ResumeEngine,
    StartPut,
    WithdrawFound,
    WithdrawPut,
)
from pdflow.serving.events import EngineAdmitted, Handle, LookupRequested, PutEnded, PutRequested, StoreAnswered
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.storing import Storing
from pdflow.wiring.stores import load_name, load_xid, node_of
from pdflow_sim.nodes.node import SimPort
from pdflow_sim.nodes.ports import EngineComponents
from pdflow_sim.nodes.prefill_node import WEIGHTS, SimPrefillLeg, SimPrefillNode
from pdflow_sim.nodes.store_node import SimStoreNode
from pdflow_sim.nodes.stores import Stores
from pdflow_sim.observe.run_metrics import request_of


class SimStorePrefillNode(SimPrefillNode):
    """The node of a prefill engine with a store. `storing` is also its core's."""

    def __init__(self, components: EngineComponents, stores: Stores, pipeline_policy: PipelinePolicy) -> None:
        self.storing = Storing(stores.most_tokens, components.engine.limits.block_size, pipeline_policy.prefill_waits)
        super().__init__(components, PrefillCore(WEIGHTS, self.storing))
        self.stores = stores
        self.pipeline_policy = pipeline_policy
        self.salt = 0
        self.objects: dict[Xid, tuple[Item, ...]] = {}
        """The objects as which each prompt is stored, with their keys; computed once."""
        self.loads = False
        self.do.update(
            {
                PostRead: self.post_read,
                ReadWord: self.read_word,
                Quarantine: self.quarantine,
                FreeBlocks: self.free_blocks,
            }
        )
        self.perform.update(
            {
                AskStore: self.ask,
                WithdrawFound: self.withdraw_found,
                EnqueueLoading: self.enqueue_loading,
                Commit: self.commit,
                ComputeAgain: self.compute_again,
                StartPut: self.start_put,
                WithdrawPut: self.withdraw_put,
                AnswerStored: self.answer_stored,
                FreeBlocks: self.free_blocks,
                HoldEngine: self.hold_engine,
                ResumeEngine: self.resume_engine,
            }
        )

    def make_scheduler(self, endpoint: ProducerScheduler, incarnation: int) -> None:
        super().make_scheduler(endpoint, incarnation)
        if self.pipeline_policy.salts_keys:
            self.salt = incarnation

    def make_loads(self, incarnation: int) -> None:
        """Add the endpoints with which it loads, if it does, behind those with which it puts."""
        loads = self.stores.loads(self.info, self.engine.pool.num_blocks, incarnation)
        if loads is not None:
            scheduler, ranks = loads
            self.loads = True
            self.storing.scheduler = self.add(load_name(self.name), scheduler, incarnation, Side.D)
            for rank in ranks:
                self.add(rank.me, rank, incarnation, Side.D)

    @property
    def engines(self) -> tuple[str, ...]:
        return (self.name, load_name(self.name))

    def looks_up(self, dispatch: DispatchPrefill) -> bool:
        """True if the store may have the beginning of this prompt. Where a prompt is one object, nothing before its end
        has a name.
        """
        return self.loads and dispatch.keeps and len(self.items(dispatch.request, dispatch.xid)) > 1

    def items(self, request: int, xid: Xid) -> tuple[Item, ...]:
        items = self.objects.get(xid)
        if items is None:
            items = self.objects[xid] = self.stores.items(request, self.salt)
        return items

    def items_of(self, leg: SimPrefillLeg) -> tuple[Item, ...]:
        return self.items(leg.seq.index, leg.xid)

    # What is stored of a prompt already.

    def ask(self, port: Port, effect: AskStore) -> None:
        leg = self.legs[effect.handle]
        items, digest = self.items_of(leg), self.prompts.digest(leg.seq.index)
        store = self.stores.node_of(items)
        ask = LookupRequested(leg.request_id, load_xid(leg.xid), items[:-1], digest, WEIGHTS)
        on_answer = partial(self.on_answer, store, leg.xid)
        self.clock.call(self.fabric.control_ns, store.look, (ask, on_answer))

    def on_answer(self, store: SimStoreNode, handle: Handle, answer: AnswerCall) -> None:
        """Handle the store's answer: what it has of the prompt, if anything."""
        if self.alive:
            self.feed(self.role, StoreAnswered(handle, answer.params))
        elif answer.params is not None:
            self.withdraw(store, answer.params)

    def withdraw_found(self, port: Port, effect: WithdrawFound) -> None:
        name = node_of(effect.params.prefill.engine)
        self.withdraw(next(node for node in self.stores.nodes if node.name == name), effect.params)

    def withdraw(self, store: SimStoreNode, params: KvParams) -> None:
        """Notify the store that no engine will come for this prompt."""
        self.clock.call(self.fabric.control_ns, store.abort, (params.request_id, params.xid))

    def on_engine_output(self, outcome: object) -> None:
        if type(outcome) is Admitted:
            seq = outcome.seq
            assert seq.allocation is not None
            self.feed(self.role, EngineAdmitted(seq.handle, seq.allocation, seq.cached_tokens))
        else:
            super().on_engine_output(outcome)

    def enqueue_loading(self, port: Port, effect: EnqueueLoading) -> None:
        seq = self.legs[effect.handle].seq
        seq.remote_kv = True
        seq.loaded_tokens = effect.loaded_tokens
        self.submit(seq)

    def compute_again(self, port: Port, effect: ComputeAgain) -> None:
        leg = self.legs[effect.handle]
        old = leg.seq
        leg.seq = Sequence(old.index, old.prompt_tokens, 1, False, True, 0, old.prefix, 0, old.handle)
        self.submit(leg.seq)

    def submit(self, seq: Sequence) -> None:
        rejected = enqueue(self.engine, seq, self.clock.now)
        if rejected is not None:
            self.feed(self.role, rejected)
        else:
            self.rearm()

    def commit(self, port: Port, effect: Commit) -> None:
        self.engine.loaded(self.legs[effect.request_id].seq, self.clock.now)
        self.rearm()

    def quarantine(self, port: Port, effect: Quarantine) -> None:
        self.engine.pool.quarantine(effect.allocation)

    def free_blocks(self, port: Port, effect: FreeBlocks) -> None:
        self.engine.release(effect.allocation, self.clock.now)
        self.rearm()

    def post_read(self, port: SimPort, effect: PostRead) -> None:
        self.fabric.read(port, effect, request_of(effect.op.reg.request_id))

    def read_word(self, port: SimPort, effect: ReadWord) -> None:
        self.fabric.read_word(port, effect.op, effect.source, effect.index)

    # What is computed.

    def start_put(self, port: Port, effect: StartPut) -> None:
        items = self.items_of(self.legs[effect.handle])
        put = PutRequested(effect.params, items)
        on_answer = partial(self.put_ended, effect.handle)
        self.clock.call(self.fabric.control_ns, self.stores.node_of(items).start, (put, on_answer))

    def put_ended(self, handle: Handle, answer: AnswerCall) -> None:
        if self.alive:
            self.feed(self.role, PutEnded(handle, answer.params, answer.code))

    def withdraw_put(self, port: Port, effect: WithdrawPut) -> None:
        leg = self.legs[effect.handle]
        store = self.stores.node_of(self.items_of(leg))
        self.clock.call(self.fabric.control_ns, store.abort, (leg.request_id, leg.xid))

    def answer_stored(self, port: Port, effect: AnswerStored) -> None:
        leg = self.legs[effect.handle]
        self.by_request.pop(leg.request_id, None)
        self.router.later(PrefillAnswered(leg.request_id, effect.params))

    def forget(self, port: Port, effect: Forget) -> None:
        super().forget(port, effect)
        self.objects.pop(effect.handle, None)

    def unfulfilled(self) -> str:
        wrong = super().unfulfilled()
        return self.misplaced(self.storing.scheduler, self.engine.pool, None) if self.loads and not wrong else wrong

    def assert_empty(self) -> None:
        super().assert_empty()
        assert not self.objects, f"{self.name} still keeps {self.objects}"
        assert not self.held, f"{self.name} still waits"
