"""An engine's death, and what starts again in its place."""

from __future__ import annotations

from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.ids import engine_of
from sim.check.cluster import FIRST_LIFE
from sim.check.ghost import ENDED_ERR, ENDED_OK, FLYING, NOTICE, ORPHAN, READING, TOLD, Product, Stage
from sim.check.onesided import cut
from sim.check.orders import Orders
from sim.check.scope import Fault, Scope
from sim.check.world import Draft

AFTER_P: dict[int, int] = {Product.HELD: Product.RELEASED, Product.QUEUED: Product.DEAD}
"""What becomes of P's prompts."""


class Deaths(Orders):
    """The moves of engines that die. Their clients learn of it as they learn of orders."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._born: dict[tuple[int, int], list[int]] = {}

    def restart(self, draft: Draft, engine: int) -> None:
        """An engine's processes die, and others start under the same name. Nobody is left to be told of the old life's
        operations; what its NIC has begun may land all the same, but not in the memory of a process that is gone."""
        cluster = self.cluster
        name = "PD"[engine]
        self.spend(draft, (Fault.P_RESTART, Fault.D_RESTART)[engine])
        self.put_ops(draft, [(op, self._outliving(name, op, flags)) for op, flags in self.ops_of(draft)])
        if name == "P":
            for product, now in enumerate(self.ghost_of(draft).products):
                if now == Product.QUEUED:
                    self.report(draft, product, False)
                self.put_ghost(draft, "products", product, AFTER_P.get(now, now))
        else:
            for i, stage in enumerate(self.ghost_of(draft).stages):
                if stage != Stage.UNBORN:
                    self.put_ghost(draft, "stages", i, Stage.FREED)
                    self.put_ghost(draft, "barred", i, self.cluster.everything)
        lives = self.ghost_of(draft).lives[engine] + 1
        self.put_ghost(draft, "lives", engine, lives)
        first = self.span[cluster.at[name]][0]
        born = self._born.get((engine, lives))
        if born is None:
            life = FIRST_LIFE[name] + lives
            bodies = cluster.prefill_engine(life) if name == "P" else cluster.decode_engine(life)
            born = [self.endpoint(cluster.nodes[slot], body) for slot, body in enumerate(bodies, first)]
            self._born[engine, lives] = born
        draft[first : first + len(born)] = born
        for link, ends in enumerate(cluster.links):
            if name in map(engine_of, ends):
                draft[self.first_link + link] = 0
        draft[self.bag] = self.bags.of(())
        kept = tuple(task for task in self.tasks_of(draft) if engine_of(cluster.nodes[task[1]]) != name)
        draft[self.task] = self.tasks.of(kept)

    def _outliving(self, name: str, op: int, flags: int) -> int:
        """What is left of an operation when this engine dies."""
        node, _, effect = self.operations(op)
        if engine_of(node) == name:
            if type(effect) is PostRead or not flags & (FLYING | NOTICE):
                return 0
            return flags & ~(ENDED_OK | ENDED_ERR | TOLD | READING) | ORPHAN
        if type(effect) is PostWrite:
            flags &= ~NOTICE
            if flags & FLYING:
                return flags & ~FLYING | cut(flags)
        return flags
