"""What engines and clients do of their own accord: prompts finish, requests arrive, are let in, are given up."""

from __future__ import annotations

from pdflow.protocol.ids import KvParams
from pdflow.serving.events import DecodeRequested, PrefillReported, RequestAborted
from sim.check.changes import Changes
from sim.check.cluster import DIGEST
from sim.check.ghost import DECODING, FLYING, Broken, Ghost, Product, Stage
from sim.check.roles import Admits, Computes, Ends, Fails, Preempts, Reports
from sim.check.scope import TOKENS, Fault
from sim.check.world import Draft


class Orders(Changes):
    """The moves of engines and clients."""

    def finish(self, draft: Draft, i: int) -> None:
        """P has computed a prompt."""
        cluster = self.cluster
        if self.scope.late and self.ghost_of(draft).products[i] == Product.QUEUED:
            self.put_ghost(draft, "products", i, Product.COMPUTED)
            self.at_p(draft, i, Computes(cluster.xids[i], cluster.sources[i]))
            return
        said = Reports(cluster.xids[i]) if self.scope.late else Computes(cluster.xids[i], cluster.sources[i])
        self.at_p(draft, i, said)
        self.report(draft, i, True)

    def cancel_prefill(self, draft: Draft, i: int) -> None:
        """The prefill leg is taken back. What P has computed stays."""
        self.spend(draft, Fault.ABORT)
        queued = self.ghost_of(draft).products[i] == Product.QUEUED
        if queued:
            self.put_ghost(draft, "products", i, Product.DEAD)
        else:
            self.judge.goal("taken back too late")
        self.at_p(draft, i, RequestAborted(self.cluster.xids[i]))
        if queued:
            self.report(draft, i, False)

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
        if not self.scope.dialect.control_frames and now not in (Product.QUEUED, Product.COMPUTED):
            self.at_d(draft, i, PrefillReported(cluster.requests[i], now != Product.DEAD))

    def requested_at_d(self, draft: Draft, i: int, params: KvParams) -> None:
        cluster = self.cluster
        digest = DIGEST + cluster.product_of[i]
        self.at_d(draft, i, DecodeRequested(cluster.requests[i], params, cluster.d_blocks, TOKENS, digest))

    def admit(self, draft: Draft, i: int) -> None:
        """D's engine has a seat and blocks for it."""
        self.put_ghost(draft, "stages", i, Stage.GIVEN if self.scope.late else Stage.ADMITTED)
        self.at_d(draft, i, Admits(self.cluster.requests[i], self.cluster.targets[i], self.scope.hit_tokens))

    def tell_admitted(self, draft: Draft, i: int) -> None:
        """And says so."""
        self.put_ghost(draft, "stages", i, Stage.ADMITTED)
        self.at_d(draft, i, Reports(self.cluster.requests[i]))

    def preempt(self, draft: Draft, i: int) -> None:
        """D's engine takes the blocks of a request that it decodes."""
        self.spend(draft, Fault.PREEMPT)
        flying = [self.operations(op)[2] for op, flags in self.ops_of(draft) if flags & FLYING]
        if any(self.judge.request_of(effect) == i for effect in flying):
            raise Broken("S1", f"blocks of {self.cluster.requests[i]} are others', and something may land in them")
        self.put_ghost(draft, "stages", i, Stage.PREEMPTED)
        self.at_d(draft, i, Preempts(self.cluster.requests[i]))

    def end(self, draft: Draft, i: int) -> None:
        """D's engine has generated the last token."""
        self.at_d(draft, i, Ends(self.cluster.requests[i]))

    def taken(self, ghost: Ghost, i: int) -> bool:
        """Whether another request still holds the blocks that this one would get. Decoding takes no time here."""
        pool, d_of = self.scope.pool, self.cluster.d_of
        holding = (Stage.GIVEN, Stage.ADMITTED, Stage.RESOLVED) + (Stage.COMMITTED,) * self.scope.decodes
        return any(
            stage in holding and j % pool == i % pool and d_of[j] is d_of[i] for j, stage in enumerate(ghost.stages)
        )

    def hit(self, draft: Draft, i: int) -> None:
        """The whole prompt is in D's prefix cache: nothing has to land."""
        self.put_ghost(draft, "landed", i, self.cluster.everything)
        self.put_ghost(draft, "stages", i, Stage.ADMITTED)
        self.at_d(draft, i, Admits(self.cluster.requests[i], self.cluster.targets[i], TOKENS))

    def abort(self, draft: Draft, i: int) -> None:
        """The client gives up."""
        self.spend(draft, Fault.ABORT)
        decodes = self.ghost_of(draft).stages[i] in DECODING
        self.at_d(draft, i, RequestAborted(self.cluster.requests[i]))
        if decodes and self.ghost_of(draft).stages[i] in DECODING:
            raise Broken("S6", f"{self.cluster.requests[i]} is aborted, and its engine decodes on")
