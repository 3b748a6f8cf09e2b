"""Persistent records of a node's desired state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="pyyaml is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

from clowder_aimage.errors import StoreError
from clowder_aimage.node.model_spec import parse_specs
from clowder_aimage.node.pinner import SpecStore

DIGEST = "sha256:" + "ab" * 32


def files(root: Path) -> list[Any]:
    return sorted((root / ".aimage" / "wanted").iterdir())


def test_an_empty_store_has_no_records_and_stays_empty(tmp_path: Path) -> None:
    records = SpecStore(tmp_path)
    assert (records.read_own_names(), records.read_other_names(), records.is_damaged()) == (
        {},
        {},
        False,
    )
    assert records.read_last(tmp_path) is None
    records.forget("h.io/a:v1")
    assert list(tmp_path.iterdir()) == []


def test_remembered_names_persist_until_forgotten(tmp_path: Path) -> None:
    records = SpecStore(tmp_path)
    records.remember("h.io/a:v1")
    records.remember(f"h.io/b@{DIGEST}")
    assert set(SpecStore(tmp_path).read_own_names()) == {"h.io/a:v1", f"h.io/b@{DIGEST}"}
    records.forget("h.io/a:v1")
    assert set(SpecStore(tmp_path).read_own_names()) == {f"h.io/b@{DIGEST}"}


def test_remembering_a_known_name_writes_nothing(tmp_path: Path) -> None:
    records = SpecStore(tmp_path)
    records.remember("h.io/a:v1")
    (path,) = files(tmp_path)
    before = path.stat()
    records.remember("h.io/a:v1")
    assert path.stat() == before


def test_each_directory_has_its_own_list(tmp_path: Path) -> None:
    one, other = (SpecStore(tmp_path, tmp_path / name) for name in ("one", "other"))
    one.remember("h.io/a:v1", f"h.io/a@{DIGEST}")
    other.remember("h.io/a:v1")
    other.remember("h.io/b:v1")
    assert one.read_own_names() == {"h.io/a:v1": f"h.io/a@{DIGEST}"}
    assert (
        one.get_stored_name("h.io/a:v1") == f"h.io/a@{DIGEST}"
        and other.get_stored_name("h.io/a:v1") == ""
    )
    assert set(one.read_other_names()) == set(other.read_own_names()) == {"h.io/a:v1", "h.io/b:v1"}
    one.forget("h.io/a:v1")
    assert one.read_own_names() == {} and set(other.read_own_names()) == {"h.io/a:v1", "h.io/b:v1"}


def test_the_last_valid_specs_of_a_directory_are_kept(tmp_path: Path) -> None:
    specs = parse_specs([{"ref": "h.io/a:v1", "priority": 7}, {"ref": f"h.io/b@{DIGEST}"}])
    SpecStore(tmp_path).put_last(tmp_path / "one", specs)
    assert SpecStore(tmp_path).read_last(tmp_path / "one") == specs
    assert SpecStore(tmp_path).read_last(tmp_path / "other") is None
    (path,) = files(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"wants": [{"ref": 5}]}))
    assert SpecStore(tmp_path).read_last(tmp_path / "one") is None


@pytest.mark.parametrize("raw", [b"{", b'{"key": 5}'], ids=repr)
def test_damaged_records_are_skipped_and_reported(tmp_path: Path, raw: bytes) -> None:
    records = SpecStore(tmp_path)
    records.remember("h.io/a:v1")
    records.remember("h.io/b:v1")
    damaged = files(tmp_path)[0]
    damaged.write_bytes(raw)
    assert len(records.read_own_names()) == 1 and records.is_damaged()
    damaged.unlink()
    assert not records.is_damaged()


def test_a_symbolic_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "store" / ".aimage").mkdir(parents=True)
    (tmp_path / "store" / ".aimage" / "wanted").symlink_to(outside)
    with pytest.raises(StoreError, match="is a link"):
        SpecStore(tmp_path / "store").remember("h.io/a:v1")
    assert list(outside.iterdir()) == []
