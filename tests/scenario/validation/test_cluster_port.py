"""serve.cluster_port: what it needs, and which ports it may be."""

from __future__ import annotations

import pytest

from pdflow.errors import ScenarioError
from tests.runtime.support.live_pair import cluster

TLS = ("serve.tls_cert=a.crt", "serve.tls_key=a.key", "serve.tls_ca=ca.crt")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("serve.cluster_port=8443",), "set serve.tls_cert, serve.tls_key, serve.tls_ca too"),
        (("serve.cluster_port=8443", *TLS[:1]), "set serve.tls_key, serve.tls_ca too"),
        (("serve.cluster_port=8000", *TLS), "is 8000, which is serve.port, the port for clients; expected another one"),
        (("serve.cluster_port=8443", "serve.port=8443", *TLS), "is 8443, which is serve.port"),
        (("serve.cluster_port=65536", *TLS), "at most 65,535"),
        (("serve.cluster_port=-1", *TLS), "at least 0"),
        (("serve.cluster_port=8443.5", *TLS), "expected an integer"),
    ],
)
def test_a_cluster_port_that_cannot_be_is_refused(overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ScenarioError, match=rf"serve\.cluster_port: .*{problem}"):
        cluster(*overrides)


@pytest.mark.parametrize(("port", "cluster_port"), [(8000, 8443), (0, 0), (0, 8443)])
def test_ports_that_differ_and_free_ones_are_accepted(port: int, cluster_port: int) -> None:
    found = cluster(f"serve.port={port}", f"serve.cluster_port={cluster_port}", *TLS).serve
    assert (found.port, found.cluster_port) == (port, cluster_port)


def test_without_the_key_there_is_no_cluster_port() -> None:
    assert cluster(*TLS).serve.cluster_port is None
