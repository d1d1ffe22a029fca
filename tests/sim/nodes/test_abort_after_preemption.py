"""A client that goes away while its sequence, loaded and then preempted before its first token, waits for blocks."""

from __future__ import annotations

from pdflow.engine.sequence import Phase, Sequence
from pdflow.protocol.values import MS
from pdflow.scenario.reading.load import parse, resolve
from pdflow_sim.run import RunOptions, prepare, run
from pdflow_sim.world import World

SMALL_POOL = """
[workload]
requests = 300
arrival = { process = "poisson", rate_rps = 40.0 }
input_tokens = 64
output_tokens = 60
[model]
preset = "llama-3.1-8b"
[[pool]]
name = "prefill"
role = "prefill"
gpu = "h100-sxm"
[[pool]]
name = "decode"
role = "decode"
gpu = "h100-sxm"
kv_tokens = 1280
[network]
preset = "rdma-400g"
"""


def preempted_before_its_first_token(world: World) -> Sequence | None:
    for seq in world.decodes[0].legs.values():
        if seq.preemptions and not seq.generated and seq.phase is Phase.WAITING:
            return seq
    return None


def test_it_is_not_decoded_to_its_end() -> None:
    world, _ = prepare(resolve(parse("small.toml", SMALL_POOL)), RunOptions(), [])
    node = world.decodes[0]
    gone: list[Sequence] = []

    def look(_: None) -> None:
        seq = preempted_before_its_first_token(world)
        if seq is None:
            if not world.done:
                world.clock.call(MS // 50, look, None)
            return
        world.router.hang_up(seq.index)
        gone.append(seq)

    world.clock.call(0, look, None)
    run(world, None, True)
    (seq,) = gone
    assert world.records.outcome[seq.index] == "cancelled"
    assert seq.finished_ns < 0
    assert not node.legs
    assert not [note for note in world.totals.notes if "DecodeAborted" in note]
    world.assert_empty()
