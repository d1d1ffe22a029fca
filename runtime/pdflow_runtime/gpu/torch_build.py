"""Whether the installed torch can use GPUs, without importing it, which takes seconds."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final

INSTALL_CUDA: Final = "pip install torch, without the index of CPU builds"


def torch_problem() -> str | None:
    """Return why torch cannot compute on GPUs here: it is missing, or was built without CUDA. It is not imported."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return f"torch is not installed: {INSTALL_CUDA}"
    found = spec_from_file_location("torch_version", Path(spec.submodule_search_locations[0], "version.py"))
    assert found is not None
    assert found.loader is not None
    version = module_from_spec(found)
    found.loader.exec_module(version)
    return None if version.cuda else f"torch {version.__version__} is built without CUDA: {INSTALL_CUDA}"
