"""Complete SavedModel directories are packed unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from clowder_aimage.errors import ContentError, FormatError, ModelError
from clowder_aimage.formats.savedmodel import take
from clowder_aimage.oci.mediatype import AIMAGE_SAVEDMODEL
from tests.importer import formats_protobuf as pb

TEXT = """saved_model_schema_version: 1
meta_graphs {
  meta_info_def {
    tags: "serve"
    tensorflow_version: "1.15.0"
  }
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    for name in ("variables", "assets", "assets.extra"):
        (root / name).mkdir(parents=True)
    (root / "saved_model.pb").write_bytes(pb.saved_model())
    (root / "fingerprint.pb").write_bytes(b"\x08\x01")
    (root / "variables" / "variables.index").write_bytes(b"index")
    for number in range(2):
        (root / "variables" / f"variables.data-0000{number}-of-00002").write_bytes(b"data")
    (root / "assets" / "vocab.bin").write_bytes(b"words")
    (root / "assets.extra" / "requests").write_bytes(b"warm up")
    return root


def refused(root: Path, *said: str, kind: type[ContentError] = FormatError) -> ContentError:
    with pytest.raises(kind) as caught:
        take(root)
    for word in said:
        assert word in caught.value.message
    return caught.value


def test_every_file_becomes_a_layer(model: Path) -> None:
    taken = take(model)
    assert taken.facts == {"format": "savedmodel"}
    assert [file.name for file in taken.files] == [
        "assets.extra/requests",
        "assets/vocab.bin",
        "fingerprint.pb",
        "saved_model.pb",
        "variables/variables.data-00000-of-00002",
        "variables/variables.data-00001-of-00002",
        "variables/variables.index",
    ]
    assert {file.media_type for file in taken.files} == {AIMAGE_SAVEDMODEL}


def test_a_text_format_model_is_packed(model: Path) -> None:
    (model / "saved_model.pb").unlink()
    (model / "saved_model.pbtxt").write_text(TEXT)
    assert "saved_model.pbtxt" in {file.name for file in take(model).files}
    for words in ("", "GGUF", "meta_graphs"):
        (model / "saved_model.pbtxt").write_text(words)
        refused(model, "saved_model.pbtxt", "contains no graph")


def test_a_model_without_variables_is_packed(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(pb.saved_model(has_saver=False, version=""))
    taken = take(tmp_path)
    assert [file.name for file in taken.files] == ["saved_model.pb"]
    assert taken.facts == {"format": "savedmodel"}


def test_missing_variables_are_reported(model: Path) -> None:
    shard = model / "variables" / "variables.data-00001-of-00002"
    shard.unlink()
    refused(model, "variables", "1 found, 2 expected")
    (model / "variables" / "variables.data-00000-of-00002").unlink()
    refused(model, "variable shards are missing")


def test_a_missing_index_is_refused(model: Path) -> None:
    (model / "variables" / "variables.index").unlink()
    refused(model, "variables.index")


def test_shards_of_different_sets_are_refused(model: Path) -> None:
    shards = model / "variables"
    (shards / "variables.data-00000-of-00003").write_bytes(b"other")
    refused(model, "several sets")
    (shards / "variables.data-00000-of-00003").unlink()
    (shards / "variables.data-00000-of-00002").rename(shards / "variables.data-00002-of-00002")
    refused(model, "missing or misnumbered")
    (shards / "variables.data-00000-of-00000").write_bytes(b"")
    for path in shards.glob("*-of-00002"):
        path.unlink()
    refused(model, "missing or misnumbered")


def test_links_out_of_the_directory_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (model / "assets" / "secret").symlink_to(tmp_path / "secret")
    refused(model, "outside the model directory", kind=ModelError)


def test_a_directory_of_too_many_files_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clowder_aimage.formats.model_tree.MAX_FILES", 5)
    error = refused(model, "more than 5 files", kind=ModelError)
    assert error.hint


def test_missing_directories_and_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved_model.pb"
    refused(tmp_path, "has no saved_model.pb")
    path.write_bytes(pb.saved_model())
    error = refused(path, "is not a SavedModel directory", kind=ModelError)
    assert "saved_model.pb" in str(error.hint)


@pytest.mark.parametrize(
    "raw",
    [b"", b"PK\x03\x04" + bytes(50), pb.saved_model(schema=2)],
    ids=["empty", "zip", "schema"],
)
def test_an_invalid_saved_model_is_refused(model: Path, raw: bytes) -> None:
    (model / "saved_model.pb").write_bytes(raw)
    refused(model, str(model / "saved_model.pb"), "not a SavedModel")
