"""The container by which KServe reads AImages, run as KServe runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.abridged import abridge
from tests.deploy.cluster import KUBERNETES, read
from tests.exporter.conftest import files_in
from tests.process import Aimage, run

pytestmark = pytest.mark.integration


def test_the_storage_container_fills_the_directory(
    aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path, repository: str
) -> None:
    name, here = f"{repository}:v1", aimage()
    here("create", name, abridge(tiny, tmp_path / "tiny"), "-q")
    here("push", name, "-q")
    here("export", name, tmp_path / "out", "-q")
    (resource,) = read(KUBERNETES / "kserve" / "storage-container.yaml")
    container = resource["spec"]["container"]
    (prefix,) = [entry["prefix"] for entry in resource["spec"]["supportedUriFormats"]]
    # KServe mounts an empty directory
    (models := tmp_path / "models").mkdir()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path / "home"),
        "AIMAGE_STORE": str(tmp_path / "fresh"),
    }
    done = run([*container["command"], f"{prefix}{name}", str(models)], env=environment, text=True)
    assert done.returncode == 0, done.stderr
    assert files_in(models) == files_in(tmp_path / "out")
