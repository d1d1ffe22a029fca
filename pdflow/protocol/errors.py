"""The one exception of the protocol.

    LocalProtocolError    our own caller misused the machine: raised, state unchanged

Whatever a peer sends is data: it becomes a failure effect or a named no-op, and touches only the transfer it names. An
AssertionError is a bug of ours and stops the node.
"""

from __future__ import annotations


class LocalProtocolError(Exception):
    """The driver or the engine broke the contract of an endpoint."""
