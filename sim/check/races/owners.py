"""A P rank as vLLM has it: the engine's thread ends leases, the writer's matches and posts, and an inbox lies between.

The endpoint is the writer here. When its lease timer fires for the first time, the engine's thread has ended the lease
and the blocks are gone; when it fires again, the writer has found that in its inbox, and only then does it know. In
pdflow a P rank is one endpoint, which ends a lease in one turn: this world is for `vllm-stock` alone.
"""

from __future__ import annotations

from pdflow.protocol.timers import TimerKind
from sim.check.ghost import Product
from sim.check.relation import Relation
from sim.check.world import Draft


class TwoOwners(Relation):
    """A Relation in which P's leases end in two moves."""

    def timer(self, draft: Draft, node: int, i: int) -> None:
        timer = self.armed[draft[node]][i]
        if timer.kind is not TimerKind.LEASE:
            super().timer(draft, node, i)
            return
        product = self.cluster.xids.index(str(timer.key))
        if self.ghost_of(draft).products[product] == Product.HELD:
            self.put_ghost(draft, "products", product, Product.RELEASED)
            return
        # The writer lets go of what is gone already: not a second release.
        self.put_ghost(draft, "products", product, Product.HELD)
        super().timer(draft, node, i)
        self.put_ghost(draft, "products", product, Product.RELEASED)
