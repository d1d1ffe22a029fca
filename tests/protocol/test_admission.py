"""Whom D lets in: requests that wait for KV hold blocks, and a peer that sends none must not come to hold them all."""

from __future__ import annotations

from pdflow.protocol.dialect import Dialect
from tests.protocol.support.counterexamples import NamedCluster, in_each_dialect
from tests.support.endpoints import engine_info


@in_each_dialect(strict=1, compat=1, stock=4)
def test_r38_one_peer_takes_every_block(dialect: Dialect, comes_to: int) -> None:
    """One of two prefill engines never writes: for how many of its requests does D give away its 16 blocks?"""
    c = NamedCluster(p=(engine_info("P"), engine_info("P2")), dialect=dialect, pool_blocks=16)
    c.prefill("x-other", "P2")
    c.decode("r-other", "x-other", prefill="P2")
    c.holding = {"Register", "WRITE"}
    for i in range(4):
        c.prefill(f"x{i}")
        c.decode(f"r{i}", f"x{i}")
    c.run()
    assert len([request for request in c.enqueued if request != "r-other"]) == comes_to
