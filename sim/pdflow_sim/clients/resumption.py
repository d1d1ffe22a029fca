"""Simulated answers that another attempt continues: which tokens the client has of them, and when it had them.

Tokens bypass the router's endpoint. What an engine has generated when its leg is aborted, or when it died, is the end
of the next attempt's prompt. The stages of a request, which add up to its TTFT, stay those of the attempt that brought
the first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.engine.sequence import Sequence
from pdflow.protocol.values import Instant
from pdflow.results.records import FIRST_DECODE, EngineTokens
from pdflow_sim.clients.prompt_content import PromptContent
from pdflow_sim.observe.run_metrics import RunMetrics

if TYPE_CHECKING:
    from pdflow_sim.nodes.engine_node import SimEngineNode


class Resumptions:
    """The answers of open requests that are, or may have to be, resumed.

    Args: `prompts`: gets the tokens that the next attempt's prompt ends with; `keeps_first`: the first token is P's.
    """

    def __init__(self, metrics: RunMetrics, prompts: PromptContent, http_ns: int, keeps_first: bool) -> None:
        self.metrics = metrics
        self.prompts = prompts
        self.http_ns = http_ns
        self.keeps_first = keeps_first
        self.streaming: dict[int, tuple[SimEngineNode, Sequence]] = {}
        """The engine that has generated the tokens of an answer that have come since it was last resumed."""
        self.stages: dict[int, tuple[int, ...]] = {}
        """The ends of the stages of requests that were resumed, up to the first token."""

    def streams(self, request: int, node: SimEngineNode, seq: Sequence) -> None:
        """Record which engine generates an answer of which a token has come to the client."""
        self.streaming[request] = node, seq

    def resume(self, request: int, now: Instant) -> None:
        """Let the next attempt's prompt end with the tokens that have come to the client by now."""
        records = self.metrics.records
        self.metrics.count("answer resumed")
        streaming = self.streaming.pop(request, None)
        if streaming is None:
            return  # The attempt that was to continue it has generated nothing.
        node, seq = streaming
        if request not in self.stages:
            first_ns = records.ends[FIRST_DECODE][request] = seq.first_token_ns + self.http_ns
            if records.first_token_ns[request] < 0:
                records.first_token_ns[request] = first_ns
            self.stages[request] = tuple([column[request] for column in records.ends])
            self.prompts.given[request] = int(self.keeps_first)
        # What has been generated since is on its way, and is dropped.
        runs, ends_ns = node.engine.decoded_by(seq, now - self.http_ns)
        before = node.steps_before
        # If the last token is among them, nothing would be left to generate: it is generated again.
        most = records.output_tokens[request] - self.prompts.given[request] - 1
        earlier = EngineTokens(node.name, tuple([step + before for run in runs for step in run]), ends_ns)
        kept = earlier.limited_to(most)
        records.earlier.setdefault(request, []).append(kept)
        self.prompts.given[request] += len(kept)

    def ended(self, request: int) -> None:
        """Record the end of a request: its stages are those of its first token."""
        self.streaming.pop(request, None)
        stages = self.stages.pop(request, None)
        if stages is not None:
            del self.prompts.given[request]
            for column, end in zip(self.metrics.records.ends, stages, strict=True):
                column[request] = end
