"""Moves of engines that die and restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdflow.protocol.ids import engine_of
from pdflow.protocol.values import Address
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.moves.engines import Engines
from pdflow_sim.check.moves.onesided import Operations
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.cluster import Nobody, role_of
from pdflow_sim.check.state.shadow_state import WHOLE, PromptStage, RequestStage, rank_bit
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

AFTER_P: dict[int, int] = {
    PromptStage.HELD: PromptStage.RELEASED,
    PromptStage.QUEUED: PromptStage.DEAD,
    PromptStage.COMPUTED: PromptStage.DEAD,
}
"""The stage of P's prompts after its death, by the stage before."""


class Deaths:
    """The moves of engines that die. Their clients learn of it as they learn of aborts."""

    def __init__(self, space: StateSpace, turns: TurnRunner, engines: Engines, operations: Operations) -> None:
        self.space = space
        self.turns = turns
        self.cluster = space.cluster
        self.engines = engines
        self.operations = operations
        self._born: dict[tuple[int, int], list[int]] = {}

    def acts(self) -> Acts:
        return {
            "restart": self.restart,
            "outlive": self.outlive,
            "kill": self.kill,
            "kill rank": self.kill_rank,
            "start": self.start,
        }

    def moves(self, state: State) -> Iterator[Move]:
        scope, left, shadow = self.space.scope, self.space.left(state), self.space.shadow_of(state)
        for engine in range(len(self.cluster.engines)):
            if shadow.down and shadow.down[engine]:
                if not scope.horizon:
                    yield ("start", engine)
            elif left[self.death_of(engine)]:
                yield ("restart", engine)
                if engine < scope.p_engines:
                    if scope.orphan and not shadow.restarts[engine]:
                        yield ("outlive", engine)
                    if scope.down:
                        yield ("kill", engine)
                    if scope.rank_dies:
                        for rank in range(scope.p_tp):
                            yield ("kill rank", engine, rank)

    def death_of(self, engine: int) -> FaultKind:
        return FaultKind.P_RESTART if role_of(self.cluster.engines[engine]) == "P" else FaultKind.D_RESTART

    def lost_by(self, state: State, move: Move) -> list[int]:
        """Return the links between engines on which everything is lost when an engine dies, or one of its ranks."""
        dead = self.cluster.ranks[self.cluster.engines[move[1]]]
        if move[0] == "kill rank":
            dead = dead[move[2] : move[2] + 1]
        between = self.cluster.links[: self.cluster.between_engines]
        return [link for link, ends in enumerate(between) if not set(ends).isdisjoint(dead)]

    def restart(self, draft: Draft, move: Move) -> None:
        self.space.spend(draft, self.death_of(move[1]))
        self.start_again(draft, move[1])

    def kill(self, draft: Draft, move: Move) -> None:
        """Kill an engine's processes. Each D rank that is connected finds that broken, sooner or later."""
        space, cluster, name = self.space, self.cluster, self.cluster.engines[move[1]]
        space.spend(draft, self.death_of(move[1]))
        self.end_processes(draft, move[1])
        space.put_shadow(draft, "down", move[1], WHOLE)
        for node in cluster.nodes:
            if engine_of(node) == name:
                draft[cluster.at[node]] = space.endpoint(node, Nobody())
        self._break(draft, cluster.ranks[name])

    def kill_rank(self, draft: Draft, move: Move) -> None:
        """Kill the process of one rank of P. Its scheduler and the other ranks do not learn of it."""
        _, engine, number = move
        space, cluster = self.space, self.cluster
        rank = cluster.ranks[cluster.engines[engine]][number]
        space.spend(draft, self.death_of(engine))
        self.operations.ranks_die(draft, (rank,))
        self._forget(draft, frozenset((rank,)))
        space.put_shadow(draft, "down", engine, space.shadow_of(draft).down[engine] | rank_bit(number))
        draft[cluster.at[rank]] = space.endpoint(rank, Nobody())
        self._break(draft, (rank,))

    def _break(self, draft: Draft, ranks: Sequence[Address]) -> None:
        """Let each D rank that is connected to one of these dead ranks find that broken, sooner or later."""
        space, cluster = self.space, self.cluster
        ends = [pair for pair in cluster.links[: cluster.between_engines] if pair[1] in ranks]
        ends = [(rank, peer) for rank, peer in ends if peer in space.body(draft, rank).peers.connected]
        broken = (("lost", cluster.at[rank], cluster.at[peer]) for rank, peer in ends)
        draft[space.task] = space.tasks.of(tuple(sorted((*space.tasks_of(draft), *broken))))

    def start(self, draft: Draft, move: Move) -> None:
        """Start processes of an engine that is down. If only ranks of it have died, the others end first."""
        if not self.space.shadow_of(draft).down[move[1]] & WHOLE:
            self.end_processes(draft, move[1])
        self.space.put_shadow(draft, "down", move[1], 0)
        self.start_processes(draft, move[1])

    def start_again(self, draft: Draft, engine: int) -> None:
        """Kill an engine's processes and start others under the same name."""
        self.end_processes(draft, engine)
        self.start_processes(draft, engine)

    def end_processes(self, draft: Draft, engine: int) -> None:
        """End an engine's processes. None is left that could be told how its operations end."""
        space, cluster = self.space, self.cluster
        name = cluster.engines[engine]
        self.operations.ranks_die(draft, cluster.ranks[name])
        for product, now in enumerate(space.shadow_of(draft).products):
            if cluster.p_of[product].engine == name:
                if now in (PromptStage.QUEUED, PromptStage.COMPUTED):
                    self.engines.report(draft, product, False)
                space.put_shadow(draft, "products", product, AFTER_P.get(now, now))
        for i, stage in enumerate(space.shadow_of(draft).stages):
            if cluster.d_of[i].engine == name and stage != RequestStage.UNREGISTERED:
                space.put_shadow(draft, "stages", i, RequestStage.FREED)
                space.put_shadow(draft, "barred", i, cluster.everything)
        space.put_shadow(draft, "restarts", engine, space.shadow_of(draft).restarts[engine] + 1)
        self._forget(draft, frozenset((name, *cluster.ranks[name])))

    def _forget(self, draft: Draft, gone: frozenset[Address]) -> None:
        """Lose the frames and the tasks of processes that are gone."""
        space, cluster = self.space, self.cluster
        for link, ends in enumerate(cluster.links):
            if not gone.isdisjoint(ends):
                draft[space.first_link + link] = 0
        late = space.bags.values[draft[space.bag]]
        kept = tuple(one for one in late if gone.isdisjoint(cluster.links[one[0]]))
        draft[space.bag] = space.bags.of(kept)
        tasks = tuple(task for task in space.tasks_of(draft) if cluster.nodes[task[1]] not in gone)
        draft[space.task] = space.tasks.of(tasks)

    def start_processes(self, draft: Draft, engine: int) -> None:
        """Start processes of an engine whose former ones have ended."""
        space, cluster = self.space, self.cluster
        name, restarts = cluster.engines[engine], space.shadow_of(draft).restarts[engine]
        first = cluster.at[name]
        born = self._born.get((engine, restarts))
        if born is None:
            bodies = cluster.born(name, restarts)
            born = [space.endpoint(cluster.nodes[slot], body) for slot, body in enumerate(bodies, first)]
            self._born[engine, restarts] = born
        draft[first : first + len(born)] = born

    def outlive(self, draft: Draft, move: Move) -> None:
        """Restart an engine while the ranks of the old incarnation keep running. Their requests to the transport are
        answered, their operations go on, and their timers fire; their frames reach no process, and no frame reaches
        them."""
        space, cluster = self.space, self.cluster
        space.spend(draft, self.death_of(move[1]))
        mine = cluster.ranks[cluster.engines[move[1]]]
        orphans = {rank: node for node, rank in cluster.orphans.items() if rank in mine}
        for rank, node in orphans.items():
            draft[cluster.at[node]] = space.endpoint(node, space.body(draft, rank))
        moved = {cluster.at[rank]: cluster.at[node] for rank, node in orphans.items()}
        tasks = ((kind, moved.get(node, node), target) for kind, node, target in space.tasks_of(draft))
        draft[space.task] = space.tasks.of(tuple(sorted(tasks)))
        space.put_ops(draft, [(self._theirs(op, orphans), flags) for op, flags in space.ops_of(draft)])
        self.start_again(draft, move[1])

    def _theirs(self, op: int, orphans: Mapping[Address, Address]) -> int:
        """Return the same operation as one of the orphaned rank."""
        node, restarts, effect = self.space.operations(op)
        return self.space.checker.operations.of((orphans.get(node, node), restarts, effect))
