"""API keys of clients: their file, which requests need one, and what is read again when it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from pdflow.errors import ScenarioError
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import JSON, Headers, HttpRequest
from pdflow_runtime.security import reloaded
from pdflow_runtime.security.api_keys import ApiKeys, api_keys_of, needs_key
from pdflow_runtime.security.secret import private_text
from tests.runtime.http.world import LOCAL
from tests.runtime.router.test_router_node import Town, town
from tests.runtime.support.live_pair import cluster
from tests.runtime.support.served import ROOT, served

ALICE, BOB = "a" * 32, "b" * 32
TEXT = f"# keys of the team\n\nalice:{ALICE}\n  bob : {BOB}\n".encode()


def request(*headers: tuple[bytes, bytes]) -> HttpRequest:
    return HttpRequest("POST", "/v1/completions", "", headers, b"{}", True, True)


def bearer(key: str) -> Headers:
    return ((b"authorization", b"Bearer " + key.encode()),)


def written(path: Path, text: bytes, mode: int = 0o600) -> Path:
    """Replaced at once, as operators should: by a file of another name."""
    new = path.with_suffix(".new")
    new.write_bytes(text)
    new.chmod(mode)
    new.replace(path)
    return path


def test_a_request_has_the_name_of_its_key() -> None:
    keys = ApiKeys.of(TEXT)
    assert keys.name_of(request(*bearer(ALICE))) == "alice"
    assert keys.name_of(request((b"authorization", b"bearer  " + BOB.encode()))) == "bob"
    for headers in ((), bearer("c" * 32), bearer(""), bearer(ALICE[:-1]), ((b"authorization", b"Basic " + b"a" * 32),)):
        with pytest.raises(OpenAIError) as refused:
            keys.name_of(request(*headers))
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert not any(key in str(refused.value) for key in (ALICE, BOB, "c" * 32))


def test_a_name_may_have_an_old_and_a_new_key() -> None:
    keys = ApiKeys.of(f"alice:{ALICE}\nalice:{BOB}\r\n".encode())
    assert {keys.name_of(request(*bearer(key))) for key in (ALICE, BOB)} == {"alice"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALICE, "line 1: expected NAME:KEY"),
        (f"# x\nalice:{ALICE} {BOB}", "line 2: expected NAME:KEY"),
        (f"alice:{ALICE}\nbob:short-key", "line 2: the key has 9 bytes, expected 16 to 512"),
        ("alice:" + "x" * 513, "line 1: the key has 513 bytes"),
        (f"alice:{ALICE}\nbob:{ALICE}", "line 2: another name has the same key"),
        (f":{ALICE}", "line 1"),
        ("# none\n", "there is no key in it"),
    ],
)
def test_a_malformed_file_is_refused_without_quoting_it(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        ApiKeys.of(text.encode())
    assert not any(key in str(refused.value) for key in (ALICE, BOB, "short-key"))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", TEXT, 0o644)
    with pytest.raises(ScenarioError, match=r"serve\.api_keys_file: .*readable by other users: chmod 600"):
        api_keys_of(cluster(f"serve.api_keys_file={path}"))
    with pytest.raises(ScenarioError, match="cannot be read"):
        api_keys_of(cluster(f"serve.api_keys_file={tmp_path / 'absent'}"))
    written(path, b"alice")
    with pytest.raises(ScenarioError, match="line 1: expected NAME:KEY"):
        api_keys_of(cluster(f"serve.api_keys_file={path}"))
    assert api_keys_of(cluster()) is None


def test_the_group_may_read_a_file_that_root_owns_for_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "keys", TEXT, 0o440)
    scenario = cluster()

    def owned_by(owner: int, us: int, mode: int) -> bool:
        path.chmod(mode)
        found = os.stat(path)
        fields = [*found[:4], owner, *found[5:]]
        monkeypatch.setattr(os, "fstat", lambda _: os.stat_result(fields))
        monkeypatch.setattr(os, "geteuid", lambda: us)
        try:
            return private_text(scenario, "api_keys_file", str(path)) == TEXT
        except ScenarioError:
            return False
        finally:
            monkeypatch.undo()

    assert owned_by(owner=0, us=10001, mode=0o440)
    assert owned_by(owner=10001, us=10001, mode=0o400)
    assert not owned_by(owner=0, us=10001, mode=0o444)
    assert not owned_by(owner=0, us=0, mode=0o440)
    assert not owned_by(owner=10001, us=10001, mode=0o440)


def test_paths_that_need_no_key_are_listed_and_no_others() -> None:
    free = ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version", "/admin/state")
    assert not any(map(needs_key, free))
    assert all(map(needs_key, ("/v1/models", "/v1/completions", "/tokenize", "/detokenize", "/", "/healthy", "/admin")))


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0
    path = written(tmp_path / "keys", TEXT)
    keys = api_keys_of(cluster(f"serve.api_keys_file={path}"), lambda: now)
    assert keys
    keys.current()
    caplog.set_level(logging.INFO, reloaded.log.name)
    written(path, f"alice:{BOB}\n".encode())
    assert keys.current().name_of(request(*bearer(ALICE))) == "alice", "it was looked at within the same second"
    now += reloaded.EVERY_NS
    assert keys.current().name_of(request(*bearer(BOB))) == "alice"
    with pytest.raises(OpenAIError):
        keys.current().name_of(request(*bearer(ALICE)))
    for broken in (b"alice", None):
        if broken is None:
            path.unlink()
        else:
            written(path, broken)
        caplog.clear()
        for _ in range(3):
            now += reloaded.EVERY_NS
            assert keys.current().name_of(request(*bearer(BOB))) == "alice"
        (line,) = caplog.messages
        assert "the previous content stays in use" in line
        assert BOB not in line
    written(path, f"carol:{ALICE}\n".encode())
    now += reloaded.EVERY_NS
    assert keys.current().name_of(request(*bearer(ALICE))) == "carol"


async def asked(router: Town, method: str, path: str, headers: Headers = (), body: bytes = b"") -> tuple[int, Headers]:
    async with router.client.request(method, LOCAL, router.port, path, (JSON, *headers), body) as response:
        await response.read()
    return response.status, response.headers


@pytest.mark.trio
async def test_a_router_with_keys_answers_only_their_holders(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", TEXT)
    async with town() as router:
        router.front.keys = api_keys_of(cluster(f"serve.api_keys_file={path}"))
        for free in ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version"):
            assert (await asked(router, "GET", free))[0] == 200, free
        body = msgspec.json.encode({"prompt": "ab"})
        for method, guarded in (("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/v1/completions")):
            for headers in ((), bearer("c" * 32)):
                status, answer = await asked(router, method, guarded, headers, body)
                assert (status, dict(answer).get(b"www-authenticate")) == (401, b"Bearer"), guarded
        assert (await asked(router, "GET", "/v1/models", bearer(ALICE)))[0] == 200
        assert (await asked(router, "POST", "/tokenize", bearer(BOB), body))[0] == 200
        assert router.asked == []


@pytest.mark.trio
@pytest.mark.slow
async def test_clients_of_a_cluster_with_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", TEXT)
    small = ("pool.prefill.replicas=1", "pool.decode.replicas=1", f"serve.api_keys_file={path}")
    with served(tmp_path, ROOT / "examples/reference.toml", *small, events=tmp_path / "events") as up:
        body = msgspec.json.encode({"prompt": [5, 6, 7], "max_tokens": 2})
        several = msgspec.json.encode({"prompt": [5, 6, 7], "max_tokens": 2, "n": 2})
        for asked_for in (body, several):
            assert (await up.exchange("POST", "/v1/completions", asked_for))[0] == 401
            assert (await up.exchange("POST", "/v1/completions", asked_for, bearer(ALICE)))[0] == 200
        assert (await up.exchange("GET", "/admin/state", headers=bearer(ALICE)))[0] == 401
        assert (await up.exchange("GET", "/admin/state"))[0] == 200, "the operators' secret is no client's key"
        state = msgspec.json.decode((await up.exchange("GET", "/admin/notes"))[1])
        assert state
    left = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "keys")
    assert ALICE.encode() not in left
