"""What engines and clients do of their own accord: prompts finish, requests arrive, are let in, are given up."""

from __future__ import annotations

from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillAborted,
    PrefillFinished,
    PrefillLegEnded,
)
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from sim.check.changes import Changes
from sim.check.cluster import DIGEST, WEIGHTS
from sim.check.ghost import Ghost, Product, Stage
from sim.check.scope import TOKENS, Fault, Scope
from sim.check.world import Draft


class Orders(Changes):
    """The moves of engines and clients."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        cluster, here = self.cluster, scope.hit_tokens
        self._finished = [
            PrefillFinished(xid, source, TOKENS, DIGEST + i, WEIGHTS)
            for i, (xid, source) in enumerate(zip(cluster.xids, cluster.sources, strict=True))
        ]
        self._admitted = [
            DecodeAdmitted(request_id, target, here, TOKENS - here, DIGEST + product, WEIGHTS)
            for request_id, target, product in zip(cluster.requests, cluster.targets, cluster.product_of, strict=True)
        ]

    def finish(self, draft: Draft, i: int) -> None:
        """P has computed a prompt."""
        self.put_ghost(draft, "products", i, Product.HELD)
        self.event(draft, self.cluster.p_of[i].engine, self._finished[i])
        self.report(draft, i, True)

    def report(self, draft: Draft, product: int, ok: bool) -> None:
        """The router tells D how a prefill leg ended, which vllm-compat rests on."""
        if not self.scope.dialect.control_frames:
            for i, request_id in enumerate(self.cluster.requests):
                if self.cluster.product_of[i] == product and self.ghost_of(draft).stages[i] != Stage.UNBORN:
                    self.event(draft, self.cluster.d_of[i].engine, PrefillLegEnded(request_id, ok))

    def abort_prefill(self, draft: Draft, i: int) -> None:
        self.spend(draft, Fault.PREFILL_ABORT)
        self.put_ghost(draft, "products", i, Product.DEAD)
        self.event(draft, self.cluster.p_of[i].engine, PrefillAborted(self.cluster.xids[i], Code.PREFILL_ABORTED))
        self.report(draft, i, False)

    def decode(self, draft: Draft, i: int) -> None:
        """The decode leg reaches D."""
        cluster = self.cluster
        product = cluster.product_of[i]
        xid = cluster.xids[product]
        answered = self.ghost_of(draft).products[product] in (Product.HELD, Product.RELEASED)
        if self.scope.pulls and answered:
            params = self.judge.params[xid]
        else:
            params = KvParams(cluster.p_of[product], xid, cluster.prefill_ids[product], TOKENS)
        request_id, engine = cluster.requests[i], cluster.d_of[i].engine
        self.put_ghost(draft, "stages", i, Stage.KNOWN)
        self.event(draft, engine, DecodeQueued(request_id, params, cluster.d_blocks, 0))
        now = self.ghost_of(draft).products[product]
        if not self.scope.dialect.control_frames and now != Product.QUEUED:
            self.event(draft, engine, PrefillLegEnded(request_id, now != Product.DEAD))

    def admit(self, draft: Draft, i: int) -> None:
        """D's engine has a seat and blocks for it."""
        self.put_ghost(draft, "stages", i, Stage.ADMITTED)
        self.event(draft, self.cluster.d_of[i].engine, self._admitted[i])

    def taken(self, ghost: Ghost, i: int) -> bool:
        """Whether another request still holds the blocks that this one would get. Decoding takes no time here."""
        pool, d_of = self.scope.pool, self.cluster.d_of
        return any(
            stage in (Stage.ADMITTED, Stage.RESOLVED) and j % pool == i % pool and d_of[j] is d_of[i]
            for j, stage in enumerate(ghost.stages)
        )

    def hit(self, draft: Draft, i: int) -> None:
        """The whole prompt is in D's prefix cache: nothing has to land."""
        self.put_ghost(draft, "landed", i, self.cluster.everything)
        self.put_ghost(draft, "stages", i, Stage.ADMITTED)
        self.event(draft, self.cluster.d_of[i].engine, DecodeHit(self.cluster.requests[i]))

    def abort(self, draft: Draft, i: int) -> None:
        """The client gives up."""
        self.spend(draft, Fault.ABORT)
        self.event(draft, self.cluster.d_of[i].engine, DecodeAborted(self.cluster.requests[i], Code.CANCELLED))
