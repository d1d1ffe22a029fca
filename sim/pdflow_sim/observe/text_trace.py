"""The text trace of one request, in order: which messages are sent, which memories are taken, what is copied where.

This is how methods differ from each other, seen from outside. The golden texts of the tests and the pages of the
documentation are made here. There are no times in it: those are for `pdflow simulate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdflow.methods.wire_profile import LEASE_WORD
from pdflow.protocol.effects import (
    AnswerPrefill,
    Commit,
    Enqueue,
    FreeBlocks,
    Handshake,
    PostRead,
    PostWrite,
    ReadWord,
    ReleaseBlocks,
    Send,
)
from pdflow.protocol.events import DecodeAdmitted, PrefillFinished, Received
from pdflow.protocol.messages import Completion, Done, Message
from pdflow.protocol.values import Address, Instant
from pdflow.routing.effects import DispatchDecode, DispatchPrefill, Reply
from pdflow.scenario.reading.load import parse, resolve
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.run import RunOptions, prepare, run
from pdflow_sim.world import World


class TextTrace:
    """Records what one world does, line by line."""

    def __init__(self, world: World) -> None:
        self.lines: list[str] = []
        self.world = world
        self.wire_profile = world.fabric.wire_profile
        world.metrics.trace_line = self.add_line
        world.watch(self.observe)

    def add_line(self, who: Address, what: str) -> None:
        self.lines.append(f"{who:<13} {what}".rstrip())

    def observe(self, node: Address, event: Any, effects: tuple[Any, ...], now: Instant) -> None:
        phrase = self.describe_received(event) if type(event) is Received else _phrase_for(EVENTS, event)
        if phrase:
            self.add_line(node, phrase)
        for effect in effects:
            if what := self.spoken(node, effect):
                self.add_line(node, what)

    def describe_received(self, event: Received) -> str:
        """Describe a message that comes with data: others are traced as they are sent."""
        if type(event.message) in (Done, Completion) and (name := self.name_of(event.message)):
            return f"receives {name} after the data: {event.sender}"
        return ""

    def spoken(self, node: Address, effect: Any) -> str:
        """Describe an effect, in the words of the system that published the method where it has any; "" to leave it
        out.
        """
        kind = type(effect)
        if kind is Send:
            name = self.name_of(effect.message)
            return f"sends {name}: {effect.to}" if name else ""
        if kind is Handshake:
            contact = self.world.fabric.contact(self.world.fabric.ports[node])
            return f"{contact}: {effect.peer}" if contact else ""
        if kind is ReadWord and LEASE_WORD in self.wire_profile.silent:
            return ""
        brought = ""
        if kind is DispatchPrefill:
            brought = self.wire_profile.prefill_leg
        elif kind is DispatchDecode:
            brought = self.wire_profile.decode_leg
        return _phrase_for(EFFECTS, effect) + (f", with {brought}" if brought else "")

    def name_of(self, message: Message) -> str:
        """Return the published name of a message; "" if the published system does not send it."""
        return self.wire_profile.name_of(str(message.__struct_config__.tag))


def _phrase_for(phrases: dict[type, Callable[[Any], str]], what: Any) -> str:
    phrase = phrases.get(type(what))
    return phrase(what) if phrase is not None else ""


EVENTS: dict[type, Callable[[Any], str]] = {
    PrefillFinished: lambda event: f"has computed the prompt, {event.num_tokens} tokens",
    DecodeAdmitted: lambda event: f"allocates blocks for {event.num_tokens} tokens" if event.allocation.blocks else "",
}
EFFECTS: dict[type, Callable[[Any], str]] = {
    DispatchPrefill: lambda effect: "sends the prefill leg",
    DispatchDecode: lambda effect: "sends the decode leg",
    Reply: lambda effect: f"answers the client: {effect.outcome}",
    AnswerPrefill: lambda effect: "answers the prefill leg",
    Enqueue: lambda effect: "queues the request",
    PostWrite: lambda effect: f"posts a WRITE of {effect.registration.num_tokens} tokens: {effect.to}",
    PostRead: lambda effect: f"posts a READ of {effect.registration.num_tokens} tokens: {effect.source}",
    ReadWord: lambda effect: f"reads the lease word: {effect.source}",
    Commit: lambda effect: "has all KV",
    ReleaseBlocks: lambda effect: "releases the prompt's blocks",
    FreeBlocks: lambda effect: "frees its blocks",
}


ONE = """
[scenario]
name = "one"
[workload]
requests = 1
arrival = { process = "constant", rate_rps = 1.0 }
input_tokens = 48
output_tokens = 4
[model]
preset = "llama-3.1-8b"
num_layers = 2
[[pool]]
name = "prefill"
role = "prefill"
gpu = "h100-sxm"
max_num_batched_tokens = 32
max_num_seqs = 8
kv_tokens = 1024
async_scheduling = false
[[pool]]
name = "decode"
role = "decode"
gpu = "h100-sxm"
max_num_seqs = 8
kv_tokens = 1024
async_scheduling = false
[network]
preset = "rdma-400g"
handshake_s = 0.001
warm = false
[noise]
steps = 0
api_server = 0
links = 0
[router]
dispatch = "concurrent"
"""
"""One request of 48 tokens, computed in two steps by a model of two layers."""


def one_request(method: str, dialect: str = "strict") -> list[str]:
    """Return the trace of that one request by this method."""
    scenario_text = f'{ONE}[transfer]\nmethod = "{method}"\ndialect = "{dialect}"\n'
    return trace_run(resolve(parse("one.toml", scenario_text)))


def trace_run(scenario: ResolvedScenario) -> list[str]:
    """Run this scenario to the last thing that happens, and return its trace."""
    world, _ = prepare(scenario, RunOptions(), [])
    trace = TextTrace(world)
    run(world, None, drain=True)
    return trace.lines
