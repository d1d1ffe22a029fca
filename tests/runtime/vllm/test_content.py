"""Two requests have one digest if, and only if, the KV of their prompts is the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdflow_runtime.nodes.content import digest_of
from pdflow_runtime.vllm.scheduler.content import UnnamedContentError, content_digest

pytest.importorskip("safetensors", reason="adapters are written by it")
numpy = pytest.importorskip("numpy")


def request(**fields: Any) -> Any:
    return SimpleNamespace(**({"prompt_token_ids": [1, 2, 3]} | fields))


def image(identifier: str = "i", offset: int = 0, length: int = 2) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Adapters by name: two of one name, whose tensors differ, and a copy of the first."""
    from safetensors.numpy import save_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = {}
    for name, value in (("a", 1.0), ("b", 2.0), ("copy of a", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"lora": numpy.full(8, value, "float32")}, folder / "adapter_model.safetensors")
        made[name] = SimpleNamespace(
            lora_name="style", lora_path=str(folder), lora_int_id=len(made) + 1, load_inplace=False
        )
    return made


def test_most_requests_are_named_by_their_tokens_and_the_weights() -> None:
    assert content_digest(request(), 7) == digest_of([1, 2, 3], 7)
    assert content_digest(request(), 7) != content_digest(request(), 8)
    assert content_digest(request(), 7) != content_digest(request(prompt_token_ids=[1, 2]), 7)


def test_each_of_what_kv_depends_on_makes_another_digest(adapters: dict[str, Any]) -> None:
    named = SimpleNamespace(**(vars(adapters["a"]) | {"lora_name": "other"}))
    several = [
        request(),
        request(cache_salt="s"),
        request(cache_salt="t"),
        request(mm_features=[image()]),
        request(mm_features=[image("j")]),
        request(mm_features=[image(offset=1)]),
        request(mm_features=[image(length=1)]),
        request(mm_features=[image(), image()]),
        request(lora_request=adapters["a"]),
        request(lora_request=adapters["b"]),
        request(lora_request=named),
        request(lora_request=adapters["a"], cache_salt="s"),
    ]
    assert len({content_digest(each, 7) for each in several}) == len(several)


def test_an_adapter_is_the_same_wherever_its_files_are(adapters: dict[str, Any]) -> None:
    one, other = (content_digest(request(lora_request=adapters[name]), 7) for name in ("a", "copy of a"))
    assert one == other


def test_an_adapter_that_is_written_anew_is_another_if_vllm_is_to_load_it_again(adapters: dict[str, Any]) -> None:
    """Otherwise nobody knows which of the two vLLM computes with: it may have dropped the first one meanwhile."""
    from safetensors.numpy import save_file

    adapter = adapters["a"]
    before = content_digest(request(lora_request=adapter), 7)
    save_file({"lora": numpy.full(9, 3.0, "float32")}, Path(adapter.lora_path) / "adapter_model.safetensors")
    with pytest.raises(UnnamedContentError, match="changed after vLLM loaded it"):
        content_digest(request(lora_request=adapter), 7)
    adapter.load_inplace = True
    renewed = content_digest(request(lora_request=adapter), 7)
    adapter.load_inplace = False
    assert content_digest(request(lora_request=adapter), 7) == renewed != before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": None}, "embeddings"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"lora_request": SimpleNamespace(lora_name="a", lora_path="/nowhere")}, "no \\*.safetensors"),
    ],
    ids=["no tokens", "embeddings", "no adapter"],
)
def test_content_that_cannot_be_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnnamedContentError, match=message):
        content_digest(request(**fields), 7)


def test_an_adapter_whose_file_is_cut_off_cannot_be_named(adapters: dict[str, Any]) -> None:
    path = Path(adapters["a"].lora_path) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UnnamedContentError, match="cannot read its adapter"):
        content_digest(request(lora_request=adapters["a"]), 7)
