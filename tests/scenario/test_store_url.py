"""The server of a store, as a scenario names it: no password can stand there, and none is repeated."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.errors import ScenarioError
from pdflow.scenario import load
from pdflow.scenario.store_url import StoreUrl, read_store_url

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/methods/kv-store.toml"


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("valkey://127.0.0.1", StoreUrl("valkey", "127.0.0.1", 6379, None, 0)),
        ("redis://kv.example.org:1234/", StoreUrl("redis", "kv.example.org", 1234, None, 0)),
        ("valkey://me@[::1]:1234/7", StoreUrl("valkey", "::1", 1234, "me", 7)),
        ("valkeys://kv.example.org", StoreUrl("valkeys", "kv.example.org", 6379, None, 0)),
        ("rediss://me@[::1]:1234/7", StoreUrl("rediss", "::1", 1234, "me", 7)),
    ],
)
def test_what_a_url_means(url: str, meant: StoreUrl) -> None:
    assert read_store_url(url) == meant
    assert read_store_url(str(meant)) == attrs.evolve(meant, user=None)  # what people are shown has no user
    assert meant.tls == (url.split(":")[0] in ("valkeys", "rediss"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "valkey://",
        "http://a:1",
        "a:6379",
        "valkey://a:65536",
        "valkey://a b",
        "redis://a/x",
        "valkeyss://a",
        "redis://a?db=1",
    ],
)
def test_what_is_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected valkey://\[USER@\]HOST:PORT"):
        read_store_url(url)


@pytest.mark.parametrize(
    "url", ["valkey://:{}@a:1", "valkeys://:{}@a:1", "redis://me:{}@a", "x://me:{}@@a:b", "valkey://me:{}@"]
)
@given(password=st.text("abcxyz/@:?#", min_size=4))
def test_a_password_is_refused_and_not_repeated(url: str, password: str) -> None:
    with pytest.raises(ValueError, match=r"contains a password; put it into serve\.store_password_file") as caught:
        read_store_url(url.format(f"secret{password}"))
    assert "secret" not in str(caught.value)


def complaints(*overrides: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        load(EXAMPLE, overrides=overrides)
    return str(caught.value)


def test_a_scenario_with_a_password_is_refused_without_it(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(f'{EXAMPLE.read_text()}\n[serve]\nstore_url = "valkey://:hunter2@a:1"\n')
    with pytest.raises(ScenarioError, match=r"serve\.store_url: contains a password") as caught:
        load(file)
    for text in (str(caught.value), complaints("serve.store_url=valkey://me:hunter2@a:1")):
        assert "contains a password" in text
        assert "hunter2" not in text


def test_nothing_is_kept_that_is_never_looked_for() -> None:
    url = "serve.store_url=valkey://a:1"
    text = complaints(url, "transfer.store_granularity=prompt")
    assert 'transfer.store_granularity: is "prompt", expected "block" with serve.store_url' in text
    text = complaints(url, "transfer.store_keep=false")
    assert "transfer.store_keep: is false, expected true with serve.store_url" in text
    assert "serve.store_ttl_s" in complaints(url, "serve.store_ttl_s=0")


def test_methods_without_a_store_ignore_it() -> None:
    url = "valkey://a:1"
    overrides = (f"serve.store_url={url}", "transfer.method=nixl-push", "transfer.store_keep=false")
    assert load(EXAMPLE, overrides=overrides).serve.store_url == url
