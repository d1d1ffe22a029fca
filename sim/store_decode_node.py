"""A decode engine that gets from a store as PR #12957 published it: a prompt that is lost takes its batch with it.

There its engine stands still until all that have come in are loaded, and computes all of them if anything is missing of
one. What each of them does then is the router's business: it fails, is tried again, or is computed by D.
"""

from __future__ import annotations

from pdflow.protocol.effects import Outcome, Resolve
from pdflow.protocol.events import DecodeAborted
from sim.decode_node import DecodeNode
from sim.node import Port


class BatchDecodeNode(DecodeNode):
    def resolve(self, port: Port, effect: Resolve) -> None:
        batch = list(self.awaited)
        super().resolve(port, effect)
        if effect.outcome is Outcome.FAILED and effect.request_id in batch:
            for other in batch:
                if other in self.awaited and other != effect.request_id:
                    self.feed(self.scheduler, DecodeAborted(other, effect.code))
