"""Strongly connected components of a graph whose edges are computed when needed (Tarjan, without recursion)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


def components(root: int, after: Callable[[int], Iterable[int]], closed: set[int]) -> Iterator[list[int]]:
    """Yield every component that can be reached from `root`, each after those that it leads to.

    Args:
        after: returns the nodes that a node leads to; called once for each node.
        closed: nodes of components that have been yielded, which are left out; new ones are added.
    """
    if root in closed:
        return
    index = {root: 0}
    low = [0]
    path = [root]
    work = [(root, iter(after(root)))]
    while work:
        node, following = work[-1]
        number = index[node]
        for other in following:
            if other in closed:
                continue
            found = index.get(other)
            if found is None:
                index[other] = len(low)
                low.append(len(low))
                path.append(other)
                work.append((other, iter(after(other))))
                break
            if found < low[number]:
                low[number] = found
        else:
            work.pop()
            if work:
                before = index[work[-1][0]]
                low[before] = min(low[before], low[number])
            if low[number] == number:
                component = [path.pop()]
                while component[-1] != node:
                    component.append(path.pop())
                closed.update(component)
                yield component
