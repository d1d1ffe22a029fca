from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pdflow_runtime.nodes.models import TorchModel


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    """The tiny one, for as many engines as want it: nobody writes to its weights."""
    from pdflow_runtime.nodes.models import TorchModel
    from tests.runtime.support.live_pair import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return TorchModel(cluster())
