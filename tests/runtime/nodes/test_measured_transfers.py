"""A transfer is measured once, when it ends, on the side that moves the bytes: P's for a push, D's for a pull."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.observe.transfer_samples import NOTHING, Samples, TransferSamples
from tests.runtime.support.live_pair import cluster, live_pair, prompt


@pytest.mark.parametrize(("method", "mover"), [("nixl-push", "p"), ("nixl-pull", "d")])
@pytest.mark.trio
async def test_the_side_that_moves_measures(method: str, mover: str, model: TorchModel) -> None:
    async with live_pair(cluster(f"transfer.method={method}"), model, "tcp") as home:
        samples = {"p": TransferSamples(), "d": TransferSamples()}
        for side, node in (("p", home.p), ("d", home.d)):
            for rank in node.ranks.values():
                rank.measured_by(samples[side])
        await home.ask("r", prompt(100), Sampling(max_tokens=2, ignore_eos=True))
        taken: dict[str, Samples] = {side: each.take() for side, each in samples.items()}
        moved = sum(rank.transfers.bytes_posted for rank in getattr(home, mover).ranks.values())
    (only,) = taken[mover].transferred
    assert only.nbytes == moved > 0
    assert only.descriptors > 0
    assert 0 < only.post_ns <= only.took_ns
    assert taken[mover]._replace(transferred=()) == NOTHING
    assert taken["d" if mover == "p" else "p"] == NOTHING
