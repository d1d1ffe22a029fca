"""Which files of a Hugging Face folder hold the model's weights.

In the order of transformers' `from_pretrained`: model.safetensors, else the shards that model.safetensors.index.json
names. A folder with neither is read whole, but for consolidated*.safetensors, in which Mistral's folders have the same
weights once more under other names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pdflow_runtime.engines.config import ModelError, read_json

WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the model's weights, in the order of their names. ModelError if the index is malformed, or
    names files that are missing."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    return [path for path in files if not path.name.startswith("consolidated")] or files


def _indexed(folder: Path, index: Path) -> list[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index}: weight_map is missing or empty")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index}: weight_map names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: No such file or directory; {INDEX} names it")
    return [folder / name for name in names]
