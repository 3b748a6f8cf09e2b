"""SavedModel directories: whole ones are taken, as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from clowder_aimage.errors import ContentError, FormatError, ModelError
from clowder_aimage.formats.format_result import FormatResult
from clowder_aimage.formats.savedmodel import take
from clowder_aimage.oci.mediatype import AIMAGE_SAVEDMODEL
from tests.importer import formats_protobuf as pb
from tests.importer.formats_mutate import cuts, memory_of, mutants, survives

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


def test_every_file_becomes_a_layer(model):
    taken = take(model)
    assert taken.format == "savedmodel"
    assert taken.facts == {"formatVersion": "2.16.1"}
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


def test_a_model_in_text(model):
    (model / "saved_model.pb").unlink()
    (model / "saved_model.pbtxt").write_text(TEXT)
    assert take(model).facts == {"formatVersion": "1.15.0"}
    for words in ("", "GGUF", "meta_graphs", "meta_graphs {\0"):
        (model / "saved_model.pbtxt").write_text(words)
        refused(model, "saved_model.pbtxt", "holds no graph")


def test_a_model_without_variables(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(pb.saved_model(has_saver=False, version=""))
    taken = take(tmp_path)
    assert [file.name for file in taken.files] == ["saved_model.pb"]
    assert taken.facts == {}


def test_missing_variables_are_told(model):
    shard = model / "variables" / "variables.data-00001-of-00002"
    shard.unlink()
    refused(model, "variables", "has 1 of 2 shards")
    (model / "variables" / "variables.data-00000-of-00002").unlink()
    refused(model, "the shards of the variables missing")
    (model / "variables" / "variables.index").unlink()
    refused(model, "variables/variables.index of the variables missing")
    (model / "variables").rmdir()
    refused(model, "variables/variables.index of the variables missing")


def test_an_index_that_is_missing(model):
    (model / "variables" / "variables.index").unlink()
    refused(model, "variables.index")


def test_shards_that_do_not_belong_together(model):
    shards = model / "variables"
    (shards / "variables.data-00000-of-00003").write_bytes(b"other")
    refused(model, "two sets")
    (shards / "variables.data-00000-of-00003").unlink()
    (shards / "variables.data-00000-of-00002").rename(shards / "variables.data-00002-of-00002")
    refused(model, "shards, or others")
    (shards / "variables.data-00000-of-00000").write_bytes(b"")
    for path in shards.glob("*-of-00002"):
        path.unlink()
    refused(model, "shards, or others")


def test_links_that_lead_out(model, tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (model / "assets" / "secret").symlink_to(tmp_path / "secret")
    refused(model, "leaves the model directory", kind=ModelError)


def test_a_directory_of_everything_is_not_packed(model, monkeypatch):
    monkeypatch.setattr("clowder_aimage.formats.format_result.MAX_FILES", 5)
    error = refused(model, "over 5 files", kind=ModelError)
    assert error.hint


def test_no_directory_and_no_model(tmp_path):
    path = tmp_path / "saved_model.pb"
    refused(tmp_path, "has no saved_model.pb")
    path.write_bytes(pb.saved_model())
    error = refused(path, "is not a directory", kind=ModelError)
    assert "saved_model.pb" in error.hint


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "holds no graph"),
        (pb.number(1, 1), "holds no graph"),
        (b"PK\x03\x04" + bytes(50), "at byte"),
        (pb.saved_model(schema=2), "version 2"),
        (pb.number(1, 1) + pb.number(2, 1), "wire type 0"),
        (pb.number(1, 1) + pb.message(2, pb.message(1, pb.message(5, b"\xff"))), "not UTF-8"),
        (pb.number(1, 1) + pb.message(2, b"\x08"), "does not end"),
        (pb.number(1, 1) + pb.message(2, b"") * 1001, "over 1000 graphs"),
    ],
)
def test_what_is_no_saved_model(model, raw, said):
    (model / "saved_model.pb").write_bytes(raw)
    refused(model, str(model / "saved_model.pb"), said)


def test_a_pointer_is_no_model(model):
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    (model / "variables" / "variables.data-00000-of-00002").write_bytes(pointer)
    refused(model, "Git LFS pointer", kind=ModelError)


def take_file(path: Path) -> FormatResult:
    return take(path.parent)


def test_a_truncated_file_is_refused_wherever_it_ends(model):
    took, refused = survives(take_file, model / "saved_model.pb", cuts(pb.saved_model()))
    assert (took, refused) == (0, len(pb.saved_model()))


def test_damaged_files_are_refused_in_words(model):
    took, refused = survives(take_file, model / "saved_model.pb", mutants(pb.saved_model(), 1500))
    assert took > 100
    assert refused > 300


def test_lies_cost_no_memory(model):
    path = model / "saved_model.pb"
    with path.open("wb") as file:
        file.write(pb.number(1, 1) + pb.varint(2 << 3 | 2) + pb.varint(2**31))
        file.truncate(2**30)
    assert memory_of(take_file, path) < 1 << 20
