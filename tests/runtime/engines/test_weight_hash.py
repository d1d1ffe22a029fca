"""The hash of a model's tensors: what it depends on, what it does not, and when it is computed again."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.runtime.engines import support

torch = support.torch

from safetensors.torch import save_file  # noqa: E402

from pdflow_runtime.engines import weight_hash  # noqa: E402
from pdflow_runtime.engines.config import ModelError, RopeScaling, read_config  # noqa: E402
from pdflow_runtime.engines.weight_hash import hash_weights  # noqa: E402
from pdflow_runtime.nodes.models import weights_of  # noqa: E402

NOTHING = {"shape": [0], "dtype": "F32", "data_offsets": [0, 0]}


@pytest.fixture(autouse=True)
def _old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tests are kept in the cache at once."""
    monkeypatch.setattr(weight_hash, "SETTLED_NS", -(10**15))


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed": (50, 8), "layers.0.q": (8, 8), "layers.0.norm": (8,), "layers.1.q": (8, 8), "norm": (8,)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def folder(path: Path, *files: dict[str, Any]) -> Path:
    """One with these files."""
    path.mkdir()
    for number, file in enumerate(files, 1):
        save_file(file, path / f"model-{number:05}-of-{len(files):05}.safetensors", {"number": str(number)})
    return path


def digest(path: Path) -> bytes:
    return hash_weights(path, path.parent / "cache").digest


def test_how_tensors_are_split_into_files_does_not_show(tmp_path: Path) -> None:
    every = tensors()
    names = list(every)
    one = folder(tmp_path / "one", every)
    three = folder(tmp_path / "three", *({name: every[name] for name in names[at::3]} for at in (2, 0, 1)))
    assert digest(one) == digest(three)
    found = hash_weights(three, tmp_path / "cache")
    assert (found.tensors, found.dtypes) == (5, ("F32",))
    assert found.nbytes == sum(path.stat().st_size for path in three.iterdir())


def changed_value(every: dict[str, Any]) -> None:
    every["norm"][7] += 1e-6


def renamed(every: dict[str, Any]) -> None:
    every["layers.2.q"] = every.pop("layers.1.q")


def swapped(every: dict[str, Any]) -> None:
    every["layers.0.q"], every["layers.1.q"] = every["layers.1.q"], every["layers.0.q"]


def reshaped(every: dict[str, Any]) -> None:
    every["layers.1.q"] = every["layers.1.q"].reshape(4, 16)


def retyped(every: dict[str, Any]) -> None:
    every["norm"] = every["norm"].view(torch.int32)


def added(every: dict[str, Any]) -> None:
    every["more"] = torch.zeros(0)


@pytest.mark.parametrize("change", [changed_value, renamed, swapped, reshaped, retyped, added])
def test_names_dtypes_shapes_and_every_byte_show(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    every = tensors()
    before = folder(tmp_path / "before", every)
    change(every)
    assert digest(folder(tmp_path / "after", every)) != digest(before)


def test_it_is_the_hash_of_pieces_in_the_order_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, with pieces and reads so small that all threads have some."""
    monkeypatch.setattr(weight_hash, "PIECE_BYTES", 100)
    monkeypatch.setattr(weight_hash, "READ_BYTES", 33)
    every = tensors()
    listed = []
    for name, tensor in sorted(every.items()):
        raw = tensor.numpy().tobytes()
        pieces = b"".join(sha256(raw[at : at + 100]).digest() for at in range(0, len(raw), 100))
        listed.append([name, "F32", list(tensor.shape), sha256(pieces).hexdigest()])
    expected = sha256(json.dumps(listed, separators=(",", ":")).encode()).digest()
    assert digest(folder(tmp_path / "model", every)) == expected


def test_of_a_tensor_in_two_files_the_later_counts(tmp_path: Path) -> None:
    """As where weights are read."""
    every = tensors()
    other = {"norm": torch.zeros(8)}
    assert digest(folder(tmp_path / "two", every, other)) == digest(folder(tmp_path / "one", every | other))
    assert digest(folder(tmp_path / "again", other, every)) == digest(folder(tmp_path / "plain", every))


def test_what_is_known_of_a_file_is_not_computed_again(tmp_path: Path) -> None:
    every = tensors()
    model = folder(tmp_path / "model", every, {"more": torch.ones(3)})
    first, second = (hash_weights(model, tmp_path / "cache") for _ in range(2))
    assert first.hashed_bytes == first.nbytes == second.nbytes
    assert second.hashed_bytes == 0
    assert attrs.evolve(second, hashed_bytes=first.hashed_bytes, elapsed_s=first.elapsed_s) == first

    path = model / "model-00002-of-00002.safetensors"
    os.utime(path, ns=(1, 1))
    assert hash_weights(model, tmp_path / "cache").hashed_bytes == path.stat().st_size, "only that file"


def test_a_file_whose_time_was_set_back_is_hashed_again(tmp_path: Path) -> None:
    """Of the same size, in the same place, with the time of its last write as it was."""
    model = folder(tmp_path / "model", tensors())
    (path,) = model.iterdir()
    before, status = digest(model), path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(model) != before


def test_what_was_written_just_now_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be written again within the same step of the file system's clock."""
    monkeypatch.setattr(weight_hash, "SETTLED_NS", 3600 * 10**9)
    model = folder(tmp_path / "model", tensors())
    found = [hash_weights(model, tmp_path / "cache") for _ in range(2)]
    assert [each.hashed_bytes for each in found] == [found[0].nbytes] * 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stamp": 1}'])
def test_a_broken_cache_is_a_line_in_the_log(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = folder(tmp_path / "model", tensors())
    expected = digest(model)
    (kept,) = (tmp_path / "cache").glob("*.json")
    kept.write_bytes(content)
    assert digest(model) == expected
    assert "cannot read the cached hash" in caplog.text
    assert hash_weights(model, tmp_path / "cache").hashed_bytes == 0, "it was made anew"
    assert not [*(tmp_path / "cache").glob(".*")], "nothing temporary is left"


def test_a_cache_that_cannot_be_written_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = folder(tmp_path / "model", tensors())
    expected = digest(model)
    (tmp_path / "file").write_text("no folder")
    found = hash_weights(model, tmp_path / "file" / "weights")
    assert found.digest == expected
    assert "cannot lock the hash cache" in caplog.text
    assert "cannot cache the hashes" in caplog.text


STARTED = """
import sys, time
from pathlib import Path
from pdflow_runtime.engines import weight_hash
piece = weight_hash._hashed_piece
def slow(*args):
    time.sleep(1.0)
    return piece(*args)
weight_hash._hashed_piece, weight_hash.SETTLED_NS = slow, -10**15
sys.stdin.readline()
found = weight_hash.hash_weights(Path(sys.argv[1]), Path(sys.argv[2]))
print(found.hashed_bytes, found.digest.hex())
"""


@pytest.mark.slow
def test_of_processes_that_start_together_one_hashes(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", {"norm": torch.ones(8)})
    command = [sys.executable, "-c", STARTED, str(model), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    nbytes = sum(path.stat().st_size for path in model.iterdir())
    assert sorted(int(hashed) for hashed, _ in outputs) == [0, 0, nbytes]
    assert len({found for _, found in outputs}) == 1


def raw(header: object, data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x07" * 100, "not a safetensors file"),
        (b"", "not a safetensors file"),
        (raw([1, 2, 3]), "not a safetensors file: its header is invalid"),
        (raw({"x": {"dtype": "F32"}}), "not a safetensors file: its header is invalid"),
        (raw({"x": {**NOTHING, "data_offsets": [0, 5]}}, b"1234"), "x lies beyond the end"),
        (raw({"x": {**NOTHING, "data_offsets": [4, 0]}}, b"1234"), "x lies beyond the end"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    model = folder(tmp_path / "model", tensors())
    (model / "z.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=f"z.safetensors: {message}"):
        digest(model)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder(tmp_path / "model", tensors())
    (path,) = model.iterdir()
    piece = weight_hash._hashed_piece

    def meanwhile(*args: Any) -> bytes:
        os.utime(path)
        return piece(*args)

    monkeypatch.setattr(weight_hash, "_hashed_piece", meanwhile)
    with pytest.raises(ModelError, match="changed while it was read"):
        digest(model)


def test_what_is_computed_with_is_named_and_nothing_else(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = read_config(tiny)
    caplog.set_level(logging.INFO)
    expected = weights_of(tiny, config, "float32")
    assert 0 < expected < 1 << 63
    assert f"weights {expected:016x}" in caplog.text
    same = attrs.evolve(config, eos_token_ids=frozenset((1, 7)), dtype="bfloat16", max_position_embeddings=99)
    assert weights_of(tiny, same, "float32") == expected
    scaling: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    others = {
        weights_of(tiny, attrs.evolve(config, **change), "float32")
        for change in (
            {"rope_theta": 500000.0},
            {"rope_scaling": RopeScaling(factor=8.0, **scaling)},
            {"rope_scaling": RopeScaling(factor=4.0, **scaling)},
            {"rms_norm_eps": 1e-6},
            {"num_attention_heads": 8},
        )
    }
    assert len(others | {expected, weights_of(tiny, config, "bfloat16")}) == 7


def test_the_log_says_whether_hashes_were_computed_or_read_from_the_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, model = read_config(tiny), folder(tmp_path / "model", tensors(), {"more": torch.ones(3)})
    caplog.set_level(logging.INFO)

    def logged() -> str:
        caplog.clear()
        weights_of(model, config, "float32")
        return caplog.text

    assert "; all of it hashed in " in logged()
    assert "; hashes read from the cache in " in logged()
    os.utime(model / "model-00002-of-00002.safetensors", ns=(1, 1))
    assert " GB hashed, the other hashes read from the cache, in " in logged()
