"""TorchScript archives, distinguished from pickled checkpoints by the zip directory."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import ContentError, FormatError, ModelError
from clowder_aimage.formats.torchscript import take
from clowder_aimage.oci.mediatype import AIMAGE_TORCHSCRIPT
from tests.importer.formats_mutate import cuts, memory_of, mutants, survives

MEMBERS = {
    "m/data/0": bytes(48),
    "m/data.pkl": b"\x80\x02}.",
    "m/code/__torch__.py": b"class M(Module):\n  pass\n" * 9,
    "m/constants.pkl": b"\x80\x02).",
    "m/version": b"3\n",
    "m/byteorder": b"little",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def archive(members: dict[str, bytes], *, comment: bytes = b"") -> bytes:
    """Return an archive as written by torch: code is compressed, other members are not."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.comment = comment
        for name, data in members.items():
            kind = zipfile.ZIP_DEFLATED if "/code/" in name else zipfile.ZIP_STORED
            made.writestr(zipfile.ZipInfo(name), data, kind)
    return file.getvalue()


def without(*names: str) -> dict[str, bytes]:
    return {name: data for name, data in MEMBERS.items() if name not in names}


def refused(
    path: Path, raw: bytes, *said: str, kind: type[ContentError] = FormatError
) -> ContentError:
    path.write_bytes(raw)
    with pytest.raises(kind) as caught:
        take(path)
    for word in (str(path), *said):
        assert word in caught.value.message
    return caught.value


# -- valid archives


@pytest.mark.parametrize("comment", [b"", b"said", bytes(60_000)])
def test_an_archive_is_marked_as_executable_code(path: Path, comment: bytes) -> None:
    path.write_bytes(archive(MEMBERS, comment=comment))
    taken = take(path)
    assert taken.facts == {"format": "torchscript", "pickled": True, "formatVersion": "3"}
    (file,) = taken.files
    assert (file.name, file.media_type) == ("model.pt", AIMAGE_TORCHSCRIPT)


def test_the_version_in_the_data_takes_precedence(path: Path) -> None:
    path.write_bytes(archive(MEMBERS | {"m/.data/version": b"10"}))
    assert take(path).facts["formatVersion"] == "10"


def test_nothing_is_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    evil = b"\x80\x02cos\nsystem\nX\x07\x00\x00\x00exit 99\x85R."
    path.write_bytes(archive(MEMBERS | {"m/data.pkl": evil, "m/constants.pkl": evil}))
    assert take(path).facts["pickled"] is True


def test_a_zip64_directory_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    raw = archive(MEMBERS)
    assert b"PK\x06\x06" in raw
    path.write_bytes(raw)
    assert take(path).facts["formatVersion"] == "3"


# -- invalid archives


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_is_refused_as_a_pickle(path: Path, protocol: int) -> None:
    error = refused(path, pickle.dumps({}, protocol), "pickled", "arbitrary code", kind=ModelError)
    assert "safetensors" in str(error.hint)


def test_a_checkpoint_is_refused_as_a_pickle(path: Path) -> None:
    members = without("m/code/__torch__.py", "m/constants.pkl")
    refused(path, archive(members), "is pickled", kind=ModelError)


def test_other_archives_are_refused(path: Path) -> None:
    refused(path, archive({"word/document.xml": b"x"}), "no TorchScript program")
    refused(path, archive({}), "not a zip archive")
    refused(path, b"GGUF" + bytes(100), "not a zip archive")
    refused(path, b"", "not a zip archive")


@pytest.mark.parametrize("name", ["data.pkl", "version"])
def test_missing_members_are_refused(path: Path, name: str) -> None:
    word = "has no version" if name == "version" else f"{name} not found"
    refused(path, archive(without(f"m/{name}")), word)


def test_members_in_two_directories_are_refused(path: Path) -> None:
    refused(path, archive(MEMBERS | {"n/x": b""}), "not in a single directory")


@pytest.mark.parametrize("version", [b"", b"9" * 65])
def test_an_invalid_version_is_refused(path: Path, version: bytes) -> None:
    refused(path, archive(MEMBERS | {"m/version": version}), "version")


def test_directories_and_missing_files_are_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ModelError, match="is a directory"):
        take(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        take(path)


# -- damaged archives


def test_a_duplicate_name_is_refused(path: Path) -> None:
    raw = archive(without("m/byteorder") | {"m/versioN": b"3"})
    refused(path, raw.replace(b"m/versioN", b"m/version"), "duplicate member names")


def test_an_encrypted_version_is_refused(path: Path) -> None:
    raw = archive(MEMBERS)
    flags = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"m/version")) + 8
    refused(path, raw[:flags] + b"\x01" + raw[flags + 1 :], "cannot be read")


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_an_oversized_directory_is_refused(path: Path, wide: bool) -> None:
    raw = archive(MEMBERS)
    span = 2**31 - 1
    record = b"PK\x06\x06" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 9, 9, span, 0)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, 2**31, 1)
    narrow = b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, 9, 9, 2**32 - 1 if wide else span, 0, 0)
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(2**31)
        file.seek(0, 2)
        file.write((record + locator if wide else b"") + narrow)
    assert memory_of(take, path) < 1 << 20


def test_a_truncated_archive_is_refused_wherever_it_ends(path: Path) -> None:
    took, refused = survives(take, path, cuts(archive(MEMBERS)))
    assert (took, refused > 100) == (0, True)


def test_damaged_archives_are_refused_with_a_message(path: Path) -> None:
    took, refused = survives(take, path, mutants(archive(MEMBERS), 400))
    assert took > 10
    assert refused > 100


# -- torch


def saved(path: Path, how: str) -> Any:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = torch.nn.Linear(3, 4)
        if how == "script":
            torch.jit.save(torch.jit.script(layer), path)
        elif how == "checkpoint":
            torch.save(layer.state_dict(), path)
        else:
            torch.save(layer.state_dict(), path, _use_new_zipfile_serialization=False)


@pytest.mark.integration
def test_torch_jit_archives_are_packed(path: Path) -> None:
    saved(path, "script")
    assert take(path).facts["formatVersion"].isdigit()


@pytest.mark.integration
@pytest.mark.parametrize("how", ["checkpoint", "legacy"])
def test_torch_save_archives_are_refused(path: Path, how: str) -> None:
    saved(path, how)
    refused(path, path.read_bytes(), "is pickled", kind=ModelError)
