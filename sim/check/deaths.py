"""An engine's death, and what starts again in its place."""

from __future__ import annotations

from collections.abc import Mapping

from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.ids import engine_of
from pdflow.protocol.values import Address
from sim.check.cluster import role_of
from sim.check.ghost import ENDED_ERR, ENDED_OK, FLYING, NOTICE, ORPHAN, READING, TOLD, Product, Stage
from sim.check.onesided import cut, other_end
from sim.check.orders import Orders
from sim.check.scope import Fault, Scope
from sim.check.world import Draft

AFTER_P: dict[int, int] = {
    Product.HELD: Product.RELEASED,
    Product.QUEUED: Product.DEAD,
    Product.COMPUTED: Product.DEAD,
}
"""What becomes of P's prompts."""


class Deaths(Orders):
    """The moves of engines that die. Their clients learn of it as they learn of orders."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._born: dict[tuple[int, int], list[int]] = {}

    def death_of(self, engine: int) -> Fault:
        return Fault.P_RESTART if role_of(self.cluster.engines[engine]) == "P" else Fault.D_RESTART

    def restart(self, draft: Draft, engine: int) -> None:
        """An engine's processes die, and others start under the same name. Nobody is left to be told of the old life's
        operations; what its NIC has begun may land all the same, but not in the memory of a process that is gone."""
        cluster = self.cluster
        name = cluster.engines[engine]
        self.spend(draft, self.death_of(engine))
        self.put_ops(draft, [(op, self._outliving(name, op, flags)) for op, flags in self.ops_of(draft)])
        for product, now in enumerate(self.ghost_of(draft).products):
            if cluster.p_of[product].engine == name:
                if now in (Product.QUEUED, Product.COMPUTED):
                    self.report(draft, product, False)
                self.put_ghost(draft, "products", product, AFTER_P.get(now, now))
        for i, stage in enumerate(self.ghost_of(draft).stages):
            if cluster.d_of[i].engine == name and stage != Stage.UNBORN:
                self.put_ghost(draft, "stages", i, Stage.FREED)
                self.put_ghost(draft, "barred", i, cluster.everything)
        lives = self.ghost_of(draft).lives[engine] + 1
        self.put_ghost(draft, "lives", engine, lives)
        first = cluster.at[name]
        born = self._born.get((engine, lives))
        if born is None:
            bodies = cluster.born(name, lives)
            born = [self.endpoint(cluster.nodes[slot], body) for slot, body in enumerate(bodies, first)]
            self._born[engine, lives] = born
        draft[first : first + len(born)] = born
        for link, ends in enumerate(cluster.links):
            if name in map(engine_of, ends):
                draft[self.first_link + link] = 0
        late = self.bags.values[draft[self.bag]]
        draft[self.bag] = self.bags.of(tuple(one for one in late if name not in map(engine_of, cluster.links[one[0]])))
        kept = tuple(task for task in self.tasks_of(draft) if engine_of(cluster.nodes[task[1]]) != name)
        draft[self.task] = self.tasks.of(kept)

    def outlive(self, draft: Draft, engine: int) -> None:
        """The same, but the old life's ranks are not dead. What they have asked for is answered, what they have posted
        goes on, and their timers fire; their frames reach nobody, and none reaches them."""
        cluster = self.cluster
        mine = cluster.ranks[cluster.engines[engine]]
        orphans = {rank: node for node, rank in cluster.orphans.items() if rank in mine}
        for rank, node in orphans.items():
            draft[cluster.at[node]] = self.endpoint(node, self.body(draft, rank))
        moved = {cluster.at[rank]: cluster.at[node] for rank, node in orphans.items()}
        tasks = ((kind, moved.get(node, node), about) for kind, node, about in self.tasks_of(draft))
        draft[self.task] = self.tasks.of(tuple(sorted(tasks)))
        self.put_ops(draft, [(self._theirs(op, orphans), flags) for op, flags in self.ops_of(draft)])
        self.restart(draft, engine)

    def _theirs(self, op: int, orphans: Mapping[Address, Address]) -> int:
        """The same operation, as its orphan's."""
        node, life, effect = self.operations(op)
        return self.judge.operations.of((orphans.get(node, node), life, effect))

    def _outliving(self, name: str, op: int, flags: int) -> int:
        """What is left of an operation when this engine dies."""
        node, _, effect = self.operations(op)
        if engine_of(node) == name:
            if type(effect) is PostRead or not flags & (FLYING | NOTICE):
                return 0
            return flags & ~(ENDED_OK | ENDED_ERR | TOLD | READING) | ORPHAN
        if engine_of(other_end(effect)) == name and type(effect) is PostWrite:
            flags &= ~NOTICE
            if flags & FLYING:
                return flags & ~FLYING | cut(flags)
        return flags
