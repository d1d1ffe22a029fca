"""Two worlds under one schedule: vLLM's own classes, and our endpoints in `vllm-stock`. After every action both must
have wanted the same: notifications, transfers, handshakes, and what is reported as sent and as received.

An action is a tuple of a word and its arguments, so that a schedule that fails can be printed and played again; which
may come next is in `schedule`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.v1.request import RequestStatus

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.shapes import KvShape
from pdflow.protocol.dialect import VLLM_STOCK, Dialect
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeQueued,
    PrefillAborted,
    PrefillFinished,
    PrefillQueued,
    ReadEnded,
    Received,
    WriteEnded,
)
from pdflow.protocol.ids import EngineInfo, KvParams, Shards, engine_of, rank_of
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, Allocation, S
from tests.vllm.support.nixl_stub import NixlNotification, Transfer
from tests.vllm.support.observed import Observed, of_message, of_notification, of_posted, of_transfer
from tests.vllm.support.parties import PROMPT_BLOCKS, Blocks, Decode, Prompt, request
from tests.vllm.support.stock_engine import INCARNATIONS, StockEngine
from tests.vllm.support.vllm_engine import BLOCK, HEAD_DIM, HEADS, VllmEngine, World

PORTS = {"P": 6000, "D": 6001}


class Duel:
    """Both worlds, and what is under way between their engines: each thing once, in both its shapes."""

    def __init__(self, world: World, p_tp: int, d_tp: int, pulls: bool, dialect: Dialect) -> None:
        self.pulls = pulls
        self.tps = {"P": p_tp, "D": d_tp}
        self.world = world
        self.infos = {engine: EngineInfo(engine, Shards(tp, 1, BLOCK)) for engine, tp in self.tps.items()}
        shape = KvShape(num_layers=1, num_kv_heads=HEADS, head_dim=HEAD_DIM, bytes_per_value=4, block_size=BLOCK)
        geometry = TransferGeometry(shape, initiator="pull" if pulls else "push", rule="vllm")
        self.vllm = {e: VllmEngine(self.world, e, e == "P", tp, pulls, PORTS[e]) for e, tp in self.tps.items()}
        self.stock = {e: StockEngine(info, e == "P", pulls, geometry, dialect) for e, info in self.infos.items()}
        self.prompts: list[Prompt] = []
        self.decodes: list[Decode] = []
        self.under_way: list[tuple[NixlNotification, Address, Received]] = []
        self.transfers: list[tuple[Transfer, PostWrite | PostRead]] = []
        self.handshakes: list[tuple[Address, str]] = []
        self.steps = 0
        """Of P."""
        self.unshipped = False
        """P has finished a prompt since its last step."""
        self.worked = [0] * p_tp
        """Steps that each rank of P has been through."""
        self.seen: Counter[str] = Counter()

    def play(self, action: tuple[Any, ...]) -> None:
        """Make it happen in both worlds. Raises AssertionError if they want different things because of it."""
        verb, *arguments = action
        getattr(self, "do_" + verb.replace(" ", "_"))(*arguments)
        vllm, stock = self._vllm_observed(), self._stock_observed()
        self._pair_what_is_under_way()
        only_vllm, only_stock = list((vllm - stock).elements()), list((stock - vllm).elements())
        assert not only_vllm + only_stock, f"{action}: vLLM alone {only_vllm}, vllm-stock alone {only_stock}"
        self.seen.update(entry[0] for entry in vllm.elements())
        self._look()

    def _look(self) -> None:
        """What is worth having been through."""
        for rank in self.stock["P"].ranks:
            for cell in rank.cells.values():
                if cell.freed:
                    self.seen[f"freed in {cell.phase.name}"] += 1
                if cell.reg is not None and cell.reg.seq:
                    self.seen["a registration beside its WRITE"] += 1
        for engine in self.stock.values():
            self.seen.update(engine.notes)
            engine.notes.clear()

    # Actions.

    def do_prefill(self, name: str) -> None:
        prompt = Prompt(len(self.prompts), name, self.steps)
        self.prompts.append(prompt)
        scheduler = self.vllm["P"].scheduler
        scheduler.on_new_request(prompt.vllm)
        scheduler.update_state_after_alloc(prompt.vllm, Blocks(prompt.blocks), 0)
        self.stock["P"].feed_scheduler(PrefillQueued(prompt.xid, name))

    def do_finish(self, index: int) -> None:
        prompt = self.prompts[index]
        prompt.state = "finished"
        prompt.step = self.steps
        prompt.vllm.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.vllm["P"].scheduler.request_finished(prompt.vllm, (list(prompt.blocks),))
        allocation = Allocation(index, prompt.blocks)
        self.stock["P"].feed_scheduler(PrefillFinished(prompt.xid, allocation, PROMPT_BLOCKS * BLOCK, 7, 1))
        self.unshipped = True

    def do_abort_prefill(self, index: int) -> None:
        prompt = self.prompts[index]
        prompt.state = "aborted"
        prompt.vllm.status = RequestStatus.FINISHED_ABORTED
        self.vllm["P"].scheduler.request_finished(prompt.vllm, (list(prompt.blocks),))
        self.stock["P"].feed_scheduler(PrefillAborted(prompt.xid, Code.CANCELLED))

    def do_decode(self, name: str, index: int, known: bool) -> None:
        """`known`: the router has waited for P's answer, so that D knows P's id of the prompt."""
        prompt = self.prompts[index]
        guess = f"u{len(self.decodes)}"
        params = KvParams(self.infos["P"], guess, prompt.name, PROMPT_BLOCKS * BLOCK)
        transfer_params: dict[str, Any] = {
            "do_remote_prefill": True,
            "remote_engine_id": "P",
            "remote_request_id": prompt.name if known else guess,
            "remote_host": "localhost",
            "remote_port": PORTS["P"],
            "tp_size": self.tps["P"],
        }
        if known:
            prompt.named = True
            params = self.stock["P"].answers[prompt.name]
            transfer_params |= {"remote_block_ids": (list(prompt.blocks),), "remote_num_tokens": PROMPT_BLOCKS * BLOCK}
        decode = Decode(len(self.decodes), name, params, request(name, transfer_params, PROMPT_BLOCKS * BLOCK))
        self.decodes.append(decode)
        self.vllm["D"].scheduler.on_new_request(decode.vllm)
        self.stock["D"].feed_scheduler(DecodeQueued(name, params, PROMPT_BLOCKS, 0))

    def do_admit(self, index: int, num_blocks: int) -> None:
        decode = self.decodes[index]
        decode.state = "admitted"
        decode.blocks = decode.blocks[:num_blocks]
        tokens = num_blocks * BLOCK
        self.vllm["D"].scheduler.update_state_after_alloc(decode.vllm, Blocks(decode.blocks), tokens)
        self.stock["D"].blocks[index] = decode.name
        allocation = Allocation(index, decode.blocks)
        start = (PROMPT_BLOCKS - num_blocks) * BLOCK
        self.stock["D"].feed_scheduler(DecodeAdmitted(decode.name, allocation, start, tokens, 7, 1))

    def do_abort(self, index: int) -> None:
        decode = self.decodes[index]
        decode.state = "aborted" if decode.state == "admitted" else "gone"
        decode.vllm.status = RequestStatus.FINISHED_ABORTED
        self.vllm["D"].scheduler.request_finished(decode.vllm, (list(decode.blocks),))
        self.stock["D"].feed_scheduler(DecodeAborted(decode.name, Code.CANCELLED))

    def do_step(self, engine: str, heartbeat: bool) -> None:
        if engine == "P":
            self.steps += 1
            self.unshipped = False
        self.vllm[engine].step(heartbeat)
        self.stock[engine].step(heartbeat)

    def do_work(self, engine: str, rank: int) -> None:
        if engine == "P":
            self.worked[rank] += 1
        self.vllm[engine].work(rank)
        self.stock[engine].work(rank)

    def do_deliver(self, index: int) -> None:
        self.do_repeat(index)
        del self.under_way[index]

    def do_repeat(self, index: int) -> None:
        """It arrives, and will arrive again."""
        notification, to, event = self.under_way[index]
        self.world.wire.deliver(notification)
        self.stock[engine_of(to)].inboxes[rank_of(to)].setdefault(event.sender, []).append(event)

    def do_lose(self, index: int) -> None:
        del self.under_way[index]

    def do_shaken(self, index: int, ok: bool) -> None:
        address, other = self.handshakes.pop(index)
        engine, rank = engine_of(address), rank_of(address)
        self.vllm[engine].end_handshake(rank, other, ok)
        self.stock[engine].end_handshake(rank, other, ok)

    def do_end(self, index: int, ok: bool) -> None:
        transfer, effect = self.transfers.pop(index)
        transfer.state = "DONE" if ok else "ERR"
        initiator = self.stock[engine_of(transfer.initiator)]
        ended = (ReadEnded if self.pulls else WriteEnded)(effect.op, ok)
        initiator.ended[rank_of(transfer.initiator)].append(ended)
        if ok:
            notification = NixlNotification(transfer.initiator, transfer.other, transfer.body)
            incarnation = INCARNATIONS[engine_of(transfer.initiator)]
            assert effect.notification is not None
            self.under_way.append(
                (notification, transfer.other, Received(transfer.initiator, incarnation, effect.notification))
            )

    def do_refuse(self, rank: int) -> None:
        self.world.wire.refuses = f"P.r{rank}"
        self.stock["P"].refuses = rank

    def do_pass(self, seconds: int) -> None:
        self.world.clock.now_s += seconds
        for engine in self.stock.values():
            engine.now += seconds * S

    # What both wanted.

    def _vllm_observed(self) -> Counter[Observed]:
        observed: Counter[Observed] = Counter(("handshake", *begun) for begun in self.world.handshakes)
        self.handshakes += self.world.handshakes
        self.world.handshakes = []
        observed.update(map(of_notification, self.world.wire.sent))
        observed.update(map(of_transfer, self.world.wire.posted))
        for engine in self.vllm.values():
            observed.update(("sent", name) for name in engine.sent)
            observed.update(self._received(*received) for received in engine.received)
            engine.sent, engine.received = [], []
        return observed

    def _stock_observed(self) -> Counter[Observed]:
        """vLLM shakes hands with an engine, we with each of its ranks."""
        observed: Counter[Observed] = Counter()
        for engine in self.stock.values():
            observed.update({("handshake", address, engine_of(peer)) for address, peer in engine.handshakes})
            observed.update(of_message(*sent) for sent in engine.sent)
            observed.update(of_posted(*posted) for posted in engine.posted)
            observed.update(("sent", self._prompt(xid).name) for xid in engine.released)
            observed.update(("unheard of", effect) for effect in engine.strange)
            observed.update(self._received(*received) for received in engine.received)
            for name, _ in engine.received:
                self._decode(name).state = "gone"
            engine.handshakes, engine.released, engine.strange, engine.received = [], [], [], []
        return observed

    def _received(self, name: str, failed: bool) -> Observed:
        """Of an aborted request it does not matter how its last transfer went."""
        return ("received", name, failed and self._decode(name).state == "admitted")

    def _pair_what_is_under_way(self) -> None:
        """From now on each notification and transfer lies beside its likeness."""
        wire = self.world.wire
        for engine in self.stock.values():
            for address, send in engine.sent:
                for notification in wire.sent:
                    if of_notification(notification) == of_message(address, send):
                        event = Received(address, INCARNATIONS[engine.engine], send.message)
                        self.under_way.append((notification, send.to, event))
                        wire.sent.remove(notification)
                        break
            for address, posted in engine.posted:
                for transfer in wire.posted:
                    if of_transfer(transfer) == of_posted(address, posted):
                        if transfer.state == "PROC":
                            self.transfers.append((transfer, posted))
                        wire.posted.remove(transfer)
                        break
            engine.sent, engine.posted = [], []
        wire.sent, wire.posted = [], []

    def _prompt(self, xid: str) -> Prompt:
        return next(prompt for prompt in self.prompts if prompt.xid == xid)

    def _decode(self, name: str) -> Decode:
        return next(decode for decode in self.decodes if decode.name == name)


@contextlib.contextmanager
def duel(p_tp: int, d_tp: int, pulls: bool = False, dialect: Dialect = VLLM_STOCK) -> Iterator[Duel]:
    world = World()
    with world.installed():
        yield Duel(world, p_tp, d_tp, pulls, dialect)
