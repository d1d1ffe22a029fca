"""What engines and clients do of their own accord: prompts finish, requests arrive, are let in, are given up."""

from __future__ import annotations

from pdflow.protocol.ids import KvParams
from pdflow.serving.events import DecodeRequested, PrefillReported, RequestAborted
from sim.check.changes import Changes
from sim.check.cluster import DIGEST
from sim.check.ghost import Ghost, Product, Stage
from sim.check.roles import Admits, Computes, Fails
from sim.check.scope import TOKENS, Fault
from sim.check.world import Draft


class Orders(Changes):
    """The moves of engines and clients."""

    def finish(self, draft: Draft, i: int) -> None:
        """P has computed a prompt."""
        cluster = self.cluster
        self.put_ghost(draft, "products", i, Product.HELD)
        self.at_p(draft, i, Computes(cluster.xids[i], cluster.sources[i]))
        self.report(draft, i, True)

    def at_p(self, draft: Draft, i: int, event: object) -> None:
        """Something happens to a prompt at its engine."""
        self.event(draft, self.cluster.roles[self.cluster.p_of[i].engine], event)

    def at_d(self, draft: Draft, i: int, event: object) -> None:
        """Something happens to a request at its engine."""
        self.event(draft, self.cluster.roles[self.cluster.d_of[i].engine], event)

    def report(self, draft: Draft, product: int, ok: bool) -> None:
        """The router tells D how a prefill leg ended, which vllm-compat rests on."""
        if not self.scope.dialect.control_frames:
            for i, request_id in enumerate(self.cluster.requests):
                if self.cluster.product_of[i] == product and self.ghost_of(draft).stages[i] != Stage.UNBORN:
                    self.at_d(draft, i, PrefillReported(request_id, ok))

    def abort_prefill(self, draft: Draft, i: int) -> None:
        self.spend(draft, Fault.PREFILL_ABORT)
        self.put_ghost(draft, "products", i, Product.DEAD)
        self.at_p(draft, i, Fails(self.cluster.xids[i]))
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
        self.put_ghost(draft, "stages", i, Stage.KNOWN)
        self.requested_at_d(draft, i, params)
        now = self.ghost_of(draft).products[product]
        if not self.scope.dialect.control_frames and now != Product.QUEUED:
            self.at_d(draft, i, PrefillReported(cluster.requests[i], now != Product.DEAD))

    def requested_at_d(self, draft: Draft, i: int, params: KvParams) -> None:
        cluster = self.cluster
        digest = DIGEST + cluster.product_of[i]
        self.at_d(draft, i, DecodeRequested(cluster.requests[i], params, cluster.d_blocks, TOKENS, digest))

    def admit(self, draft: Draft, i: int) -> None:
        """D's engine has a seat and blocks for it."""
        self.put_ghost(draft, "stages", i, Stage.ADMITTED)
        self.at_d(draft, i, Admits(self.cluster.requests[i], self.cluster.targets[i], self.scope.hit_tokens))

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
        self.at_d(draft, i, Admits(self.cluster.requests[i], self.cluster.targets[i], TOKENS))

    def abort(self, draft: Draft, i: int) -> None:
        """The client gives up."""
        self.spend(draft, Fault.ABORT)
        self.at_d(draft, i, RequestAborted(self.cluster.requests[i]))
