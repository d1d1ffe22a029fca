"""MultiConnector hands the handshake metadata of one child, the first that has any, to all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdflow_runtime.vllm.options import UnsupportedError
from tests.vllm.support.required import importing_any_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

with importing_any_vllm():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlBaseConnectorScheduler

    from pdflow_runtime.vllm.connector import PdflowConnector, RankAddress


class OfAnother(KVConnectorHandshakeMetadata):
    pass


def test_behind_a_connector_that_has_metadata_it_is_refused() -> None:
    connector = object.__new__(PdflowConnector)
    connector._instance = SimpleNamespace(info=SimpleNamespace(shards=SimpleNamespace(ranks=1)))
    with pytest.raises(UnsupportedError, match="list PdflowConnector first"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): OfAnother()})


def test_vllms_nixl_connectors_refuse_to_be_behind_it() -> None:
    """So the two cannot be children of one MultiConnector, in any order."""
    scheduler = object.__new__(NixlBaseConnectorScheduler)
    with pytest.raises(ValueError, match="expects NixlHandshakePayload"):
        scheduler.set_xfer_handshake_metadata({(0, 0): RankAddress("127.0.0.1", 1, 1)})
