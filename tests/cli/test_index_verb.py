"""``aimage index``, and verbs on a store whose index is written seldom."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from clowder_aimage.layout import ImageLayout, pending_names
from clowder_aimage.layout import index as index_module
from tests.content.artifact import put_artifact
from tests.process import Aimage


@pytest.fixture
def here(aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch) -> Aimage:
    """Return a store whose index is large, and not due for an hour."""
    monkeypatch.setattr(pending_names, "SMALL", 1)
    monkeypatch.setattr(index_module, "_MIN_INTERVAL", 3600.0)
    found = aimage()
    layout = ImageLayout(found.store)
    for name in ("a:v1", "b:v1", "c:v1"):
        put_artifact(layout, name, name.encode())
    found("index")
    return found


def read_written(here: Aimage) -> set[str]:
    """Return the names that other tools see."""
    entries = json.loads((here.store / "index.json").read_bytes())["manifests"]
    return {entry["annotations"]["org.opencontainers.image.ref.name"] for entry in entries}


def test_index_writes_new_and_removed_names(here: Aimage) -> None:
    here("tag", "a:v1", "new:v1")
    here("rm", "b:v1")
    assert read_written(here) == {"a:v1", "b:v1", "c:v1"}
    names = {row["reference"] for row in here("--json", "ls").value}
    assert names == {"a:v1", "c:v1", "new:v1"}
    here("verify", "b:v1", code=3)
    path = here.store / "index.json"
    assert here("--json", "index").value == {"index": str(path), "written": 2}
    assert read_written(here) == names
    assert here("index").out == f"{path}: 0 names written\n"


def test_other_verbs_see_the_names_of_the_list(here: Aimage) -> None:
    here("tag", "a:v1", "new:v1")
    here("rm", "a:v1", "b:v1")
    assert here("--json", "df").value[0]["names"] == 2
    assert here("verify", "new:v1").code == 0
    here("pin", "new:v1")
    here("save", "new:v1", "-o", str(here.home / "new.tar"))
    assert here("--json", "gc", "--grace", "0").value["blobs"] > 0
    assert here("verify").code == 0
    assert read_written(here) == {"c:v1", "new:v1"}


def test_index_of_a_missing_store_creates_nothing(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    assert here("--json", "index").value["written"] == 0
    assert not here.store.exists()
