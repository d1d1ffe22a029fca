"""A store between P and D: two prompts that begin alike are put and got in every order, in a memory that evicts.

The real `StoreMemory` decides what has room, what is found and what is evicted; `kv_store_keys` makes the keys. Of each
block it is known what has been written to it. Each of P and D is a process, and where processes salt their keys their
salts differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import deepcopy
from enum import IntEnum

from pdflow.methods.method import PipelinePolicy
from pdflow.methods.store.keys import block_keys, origin
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow.protocol.values import Allocation
from pdflow_sim.check.datapath.findings import Finding, Violation
from pdflow_sim.check.datapath.search import Move

Tokens = tuple[int, ...]
PROMPTS: tuple[Tokens, ...] = ((1, 2, 3, 4), (1, 2, 5, 6))
BLOCK_TOKENS = 2
NUM_BLOCKS = 3
"""Both fit, but not below the high-water mark."""
P_SALT, D_SALT = 1, 2


class StoreRequestPhase(IntEnum):
    """The phase of a request."""

    TO_COME = 0
    WAITING = 1
    """P waits for room."""
    PUTTING = 2
    PUT = 3
    GETTING = 4
    DONE = 5
    FAILED = 6
    """Not all was there: to be computed again."""


class StoreWorld:
    """A state of the store, P and D; implements `Explorable` of `search.py`."""

    def __init__(self, pipeline_policy: PipelinePolicy) -> None:
        self.salts = pipeline_policy.salts_keys
        self.memory = StoreMemory(NUM_BLOCKS, keeps=True)
        self.phases = [StoreRequestPhase.TO_COME] * len(PROMPTS)
        self.puts: list[Allocation | None] = [None] * len(PROMPTS)
        """Allocations that P holds: room for what it writes, then all of the prompt."""
        self.gets: list[Allocation | None] = [None] * len(PROMPTS)
        self.cells: dict[int, Tokens] = {}
        """By block, all tokens of the prompt up to the block's last."""
        self.action = ""
        self.faults = 0

    def items(self, r: int, salt: int) -> tuple[Item, ...]:
        start = origin("model", 0, 1, salt if self.salts else 0)
        return tuple(Item(key, 1) for key in block_keys(start, (prefix[-BLOCK_TOKENS:] for prefix in contents(r))))

    def fingerprint(self) -> Hashable:
        memory = self.memory
        objects = tuple((key, stored.own.blocks, stored.holders) for key, stored in memory.known.items())
        order = tuple(memory.waiting), tuple(memory.idle), tuple(memory.pinned)
        held = tuple(self.puts), tuple(self.gets)
        return tuple(self.phases), held, objects, order, tuple(sorted(self.cells.items()))

    def moves(self) -> Iterator[Move]:
        for r, phase in enumerate(self.phases):
            if phase is StoreRequestPhase.TO_COME:
                yield ("put", r, 0)
            elif phase is StoreRequestPhase.PUTTING:
                yield ("written", r, 0)
            elif phase is StoreRequestPhase.PUT:
                yield ("get", r, 0)
            elif phase is StoreRequestPhase.GETTING:
                yield ("read", r, 0)
            if self.puts[r] is not None and phase > StoreRequestPhase.PUTTING:
                yield ("lapse", r, 0)

    def after(self, move: Move) -> StoreWorld:
        """Return the state that a move leads to. Raises Violation."""
        other = deepcopy(self)
        verb, r, _ = move
        try:
            getattr(other, verb)(r)
            other.settle()
        except Violation as broken:
            broken.action = other.action
            raise
        return other

    def put(self, r: int) -> None:
        self.action = f"P has computed r{r}, and asks the store for memory"
        self.phases[r] = StoreRequestPhase.WAITING
        self.memory.enqueue(f"r{r}", self.items(r, P_SALT))

    def settle(self) -> None:
        for placed in self.memory.admit_waiting(0):
            r = int(placed.name[1:])
            self.phases[r] = StoreRequestPhase.PUTTING
            self.puts[r] = placed.target

    def written(self, r: int) -> None:
        self.action = f"P writes the missing pieces of r{r} to the store"
        target = self.puts[r]
        assert target is not None
        self.phases[r] = StoreRequestPhase.PUT
        new = contents(r)[len(PROMPTS[r]) // BLOCK_TOKENS - len(target.blocks) :]
        for block, content in zip(target.blocks, new, strict=True):
            self.cells[block] = content
        self.puts[r] = self.memory.complete(target.generation)

    def lapse(self, r: int) -> None:
        self.action = f"P's lease on r{r} ends"
        held = self.puts[r]
        assert held is not None
        self.puts[r] = None
        self.memory.release(held.generation, 0)

    def get(self, r: int) -> None:
        items = self.items(r, D_SALT)
        self.action = f"D asks the store for r{r}"
        found = self.memory.lease(items)
        if found is None and self.puts[r] is not None:
            raise Violation(Finding.SALT, f"the store has r{r}, and D does not find it")
        if found is None or len(found.blocks) < len(items):
            self.action += ": not all is there"
            self.phases[r] = StoreRequestPhase.FAILED
            if found is not None:
                self.memory.release(found.generation, 0)
            return
        self.gets[r], self.phases[r] = found, StoreRequestPhase.GETTING

    def read(self, r: int) -> None:
        self.action = f"D has read r{r}"
        held = self.gets[r]
        assert held is not None
        read = [self.cells.get(block) for block in held.blocks]
        if read != contents(r):
            raise Violation(Finding.STALE, f"r{r} decodes with {read}")
        self.gets[r], self.phases[r] = None, StoreRequestPhase.DONE
        self.memory.release(held.generation, 0)

    def at_rest(self) -> None:
        """Check that all requests have ended and nothing is held. Raises Violation."""
        left = [f"r{r}" for r, phase in enumerate(self.phases) if phase < StoreRequestPhase.DONE]
        if left:
            raise Violation(Finding.STUCK, f"{' and '.join(left)} cannot end")
        try:
            self.memory.assert_empty("the store")
        except AssertionError as wrong:
            raise Violation(Finding.KEPT, str(wrong)) from wrong


def contents(r: int) -> list[Tokens]:
    """Return the contents of each block of a prompt: all tokens up to the block's end."""
    prompt = PROMPTS[r]
    return [prompt[:stop] for stop in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)]
