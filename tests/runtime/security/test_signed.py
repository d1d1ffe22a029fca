"""Requests between parts are believed when somebody who knows the secret made them: for us, now, for the first time."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.errors import ScenarioError
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import Header, HttpRequest
from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.security.secret import Secret, secret_beyond_loopback, secret_of
from pdflow_runtime.security.signed import WINDOW_S, Gate, Signer, operators_signer
from tests.runtime.support.live_pair import cluster

TEXT = "what all parts of this cluster know"
SECRET = Secret(TEXT.encode())
OTHER = Secret(b"what parts of another cluster know")


class Clock:
    """Seconds, as a test has them."""

    def __init__(self, now_s: int = 1_000_000) -> None:
        self.now_s = now_s

    def __call__(self) -> int:
        return self.now_s


def request(*headers: Header, path: str = "/v1/completions", body: bytes = b"{}") -> HttpRequest:
    return HttpRequest("POST", path, "", headers, body, True, True)


def signed(secret: Secret | None, clock: Clock, to: str = "decode-0", body: bytes = b"{}") -> HttpRequest:
    return request(*Signer(secret, clock).sign(to, "POST", "/v1/completions", body), body=body)


def why_not(gate: Gate, asked: HttpRequest) -> str:
    try:
        gate.check(asked)
    except OpenAIError as error:
        return f"{error}{'' if error.status == 401 else error.status}"
    return ""


def test_who_knows_the_secret_is_believed_once() -> None:
    clock = Clock()
    gate = Gate(SECRET, "decode-0", clock)
    asked = signed(SECRET, clock)
    assert why_not(gate, asked) == ""
    assert why_not(gate, asked) == "the request is a repetition: its nonce was used before"
    assert why_not(gate, signed(SECRET, clock)) == ""


def test_without_a_secret_nobody_is_asked() -> None:
    clock = Clock()
    assert signed(None, clock).headers == ()
    assert why_not(Gate(None, "decode-0", clock), request()) == ""


def test_pages_in_a_browser_are_kept_out_where_nobody_needs_a_secret() -> None:
    """Any site that its user looks at may have it send requests to loopback."""
    asked = request((b"origin", b"https://example.org"))
    assert (
        why_not(Gate(None, "decode-0", Clock()), asked)
        == "requests from web pages (with an Origin header) are rejected403"
    )


def test_what_only_begins_like_loopback_is_not() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert not any(map(is_loopback, ("127.example.org", "10.0.0.1", "::", "0.0.0.0", "localhost.example.org")))


def test_a_signature_is_of_one_request_to_one_component() -> None:
    clock = Clock()
    gate = Gate(SECRET, "decode-0", clock)
    asked = signed(SECRET, clock)
    wrong = (
        signed(OTHER, clock),
        signed(SECRET, clock, to="decode-1"),
        msgspec.structs.replace(asked, body=b"{ }"),
        msgspec.structs.replace(asked, path="/stop"),
        msgspec.structs.replace(asked, method="DELETE"),
    )
    for changed in wrong:
        assert why_not(gate, changed).startswith("wrong signature")
    assert why_not(gate, asked) == ""


def test_a_signature_is_of_the_name_that_a_leg_has() -> None:
    """Whoever could write into the network could have another request's leg be begun, or be in the way of one."""
    clock = Clock()
    gate = Gate(SECRET, "decode-0", clock)
    named: Header = (b"x-request-id", b"r.1")
    signature = Signer(SECRET, clock).sign("decode-0", "POST", "/v1/completions", b"{}", (named,))
    others: tuple[tuple[Header, ...], ...] = (
        (),
        ((b"x-request-id", b"r.2"),),
        ((b"x-request-id", b"r.2"), named),
        ((b"x-request-id", b""),),
    )
    for headers in others:
        assert why_not(gate, request(*signature, *headers)).startswith("wrong signature")
    assert why_not(gate, request(*signature, (b"traceparent", b"00-1"), named)) == ""


@pytest.mark.parametrize(("off_s", "reason"), [(31, "31 s ahead"), (-31, "31 s behind")])
def test_clocks_must_agree(off_s: int, reason: str) -> None:
    ours, theirs = Clock(), Clock(1_000_000 + off_s)
    gate = Gate(SECRET, "decode-0", ours)
    assert reason in why_not(gate, signed(SECRET, theirs))
    theirs.now_s = ours.now_s + (1 if off_s > 0 else -1) * 2
    assert why_not(gate, signed(SECRET, theirs)) == ""


def test_signatures_for_the_former_incarnation_are_refused() -> None:
    clock = Clock()
    asked = signed(SECRET, clock)
    clock.now_s += 10
    assert why_not(Gate(SECRET, "decode-0", clock), asked) == "the request was signed before this component started"


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.integers(0, 30)), max_size=40))
def test_however_late_it_is_sent_again_it_is_not_believed_twice(steps: list[tuple[int, bool, int]]) -> None:
    clock = Clock()
    gate = Gate(SECRET, "decode-0", clock)
    clock.now_s += 100
    made: list[HttpRequest] = []
    for wait_s, new, which in steps:
        clock.now_s += wait_s
        if new or not made:
            made.append(signed(SECRET, Clock(clock.now_s + which - 15)))
            assert why_not(gate, made[-1]) == ""
        else:
            assert why_not(gate, made[which % len(made)])
        assert len(gate._nonces) == len(gate._by_time) <= 1 + sum(new for _, new, _ in steps)
    clock.now_s += 3 * WINDOW_S
    assert why_not(gate, signed(SECRET, clock)) == ""
    assert len(gate._nonces) == 1


def test_operators_may_show_the_secret_itself() -> None:
    gate = Gate(SECRET, "router", Clock())
    assert why_not(gate, request((b"authorization", f"Bearer {TEXT}".encode()))) == ""
    assert why_not(gate, request((b"authorization", b"Bearer something"))) == "wrong secret"
    assert "authentication required" in why_not(gate, request())


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(lambda rest: b"PDFLOW " + rest)))
def test_no_header_of_an_unauthenticated_peer_is_accepted_or_raises_anything_else(header: bytes) -> None:
    assert why_not(Gate(SECRET, "router", Clock()), request((b"authorization", header)))


def test_a_secret_stands_in_a_file_of_its_owner_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    assert secret_of(cluster()) is None
    file = tmp_path / "secret"
    file.write_text(TEXT + "\n")
    scenario = cluster(f"serve.secret_file={file}")
    file.chmod(0o640)
    with pytest.raises(ScenarioError, match="chmod 600"):
        secret_of(scenario)
    file.chmod(0o600)
    monkeypatch.setenv("PDFLOW_SECRET", f" {TEXT} ")
    for found in (secret_of(scenario), secret_of(cluster())):
        assert found is not None
        assert found.mac(b"for", b"this") == SECRET.mac(b"for", b"this")
    monkeypatch.setenv("PDFLOW_SECRET", os.fsdecode(b"\xff" * 16))
    found = secret_of(cluster())
    assert found is not None
    assert found.is_text(b"\xff" * 16), "a secret need be no text"
    assert (
        why_not(Gate(found, "router"), request(*operators_signer().sign("router", "POST", "/v1/completions", b"{}")))
        == ""
    )
    for wrong in ("short", "x" * 5000):
        monkeypatch.setenv("PDFLOW_SECRET", wrong)
        with pytest.raises(ScenarioError, match="expected 16 to 4,096"):
            secret_of(cluster())
    os.unlink(file)
    with pytest.raises(ScenarioError, match="cannot be read: No such file"):
        secret_of(scenario)


def test_beyond_loopback_there_is_no_cluster_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        assert secret_beyond_loopback(cluster(f"serve.engine_host={host}"), "engine_host") is None
    for host in ("0.0.0.0", "192.0.2.1", "::", "fd00::1", "a.host"):
        with pytest.raises(
            ScenarioError, match=r"serve\.engine_host: is .*: beyond loopback a cluster secret is required"
        ):
            secret_beyond_loopback(cluster(f"serve.engine_host={host}"), "engine_host")
    monkeypatch.setenv("PDFLOW_SECRET", TEXT)
    assert secret_beyond_loopback(cluster("serve.engine_host=192.0.2.1"), "engine_host") is not None


def test_fields_of_a_mac_are_not_confused() -> None:
    macs = {
        SECRET.mac(*fields) for fields in ((b"a", b"bc"), (b"ab", b"c"), (b"abc",), (b"a", b"b", b"c"), (b"abc", b""))
    }
    assert len(macs) == 5
