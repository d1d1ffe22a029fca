from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="the engine's arithmetic is torch's: pip install 'pdflow[live]'")
    from pdflow_runtime.engines.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)
