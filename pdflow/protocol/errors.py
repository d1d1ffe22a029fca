"""The exceptions of the protocol.

    LocalProtocolError    our own caller misused the machine: raised, state unchanged
    InvariantViolated     raised by the invariant checker (`invariants.oracle`)

Whatever a peer sends is data: it becomes a failure effect or a named no-op, and touches only the transfer it names. An
AssertionError is a bug of ours and stops the node.
"""

from __future__ import annotations


class LocalProtocolError(Exception):
    """The driver or the engine broke the contract of an endpoint."""


class InvariantViolated(AssertionError):  # noqa: N818 (what happened, not which kind of error)
    """A bug of the state machine, or of its driver. `counterexample`: the events that led to it, oldest first."""

    def __init__(self, name: str, what: str, counterexample: str) -> None:
        super().__init__(f"{name}: {what}\n{counterexample}")
        self.name = name
        self.what = what
        self.counterexample = counterexample
