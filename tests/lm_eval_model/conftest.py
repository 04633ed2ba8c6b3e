from __future__ import annotations

from pathlib import Path

import pytest

from docs_hub import DRAFT, TARGET, build_hub


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny target and of a draft that agrees with it now and then."""
    folder: Path = tmp_path_factory.mktemp("hub")
    build_hub(folder)
    return {"pretrained": str(folder / TARGET), "assistant": str(folder / DRAFT)}
