"""The tiny model of examples/tiny, as blobs and loaded.

Libraries are imported late: this module is imported before ``pytest_configure`` limits their
threads if the directory is an argument of pytest.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from clowder_aimage.dialect.aimage import AImage
    from clowder_aimage.model.flow.pipeline import FlowPipeline
    from tests.model.model_blobs import FolderStore

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderStore, AImage]:
    from tests.model.model_blobs import import_directory

    return import_directory(TINY, tmp_path_factory.mktemp("blobs"))


@pytest.fixture(scope="session")
def pipeline(tiny: tuple[FolderStore, AImage]) -> FlowPipeline:
    from clowder_aimage.model.loader import load_pipeline

    return load_pipeline(*tiny, dtype="float32")
