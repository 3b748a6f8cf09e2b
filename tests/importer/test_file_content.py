"""The kind of a file is decided by its bytes: names do not count, and nothing is unpickled."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.formats.file_content import FileContent, identify
from clowder_aimage.formats.pickle_stream import is_pickle
from tests.importer import formats_protobuf as pb
from tests.importer.conftest import safetensors
from tests.importer.formats_gguf import gguf
from tests.importer.test_importer_torchscript import MEMBERS, archive, without

PICKLED = FileContent("pickle", True)
WEIGHTS = {"weight": np.arange(30_000.0), "name": "é" * 9000}


def zipped(members: Mapping[str, bytes]) -> bytes:
    return archive(dict(members))


def tarred(*names: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 700
            made.addfile(member, io.BytesIO(bytes(700)))
    return file.getvalue()


def saved(array: Any, *, is_archive: bool = False) -> bytes:
    file = io.BytesIO()
    if is_archive:
        np.savez(file, first=np.zeros(3), second=array)
    else:
        np.save(file, array, allow_pickle=True)
    return file.getvalue()


OBJECTS = np.array([{}, None], object)
RECORDS = np.zeros(2, [("a", "f4"), ("b", object)])
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
CASES: dict[str, tuple[bytes, FileContent]] = {
    "torch zip": (zipped(without("m/code/__torch__.py")), PICKLED),
    "torch zip, truncated": (zipped({"m/data.pkl": bytes(900)})[:200], PICKLED),
    "torch before zips": (LEGACY, PICKLED),
    "torch before 0.1.10": (tarred("sys_info", "pickle", "tensors", "storages"), PICKLED),
    "checkpoint in a tar": (tarred("config.yaml", "model_weights.ckpt"), PICKLED),
    "packed tar": (gzip.compress(tarred("./model.pkl")), PICKLED),
    "pickle in a zip": (zipped({"data": b"{}", "policy.pth": b"x"}), PICKLED),
    **{
        f"joblib {pack.__module__}": (pack(pickle.dumps(WEIGHTS, 4)), PICKLED)
        for pack in (gzip.compress, zlib.compress, bz2.compress, lzma.compress)
    },
    "object array": (saved(OBJECTS), PICKLED),
    "array of records": (saved(RECORDS), PICKLED),
    "objects in an npz": (saved(OBJECTS, is_archive=True), PICKLED),
    "calls without a protocol": (b"cos\nsystem\n(S'x'\ntR.", PICKLED),
    "calls by INST": (b"(S'ls'\nios\nsystem\n.", PICKLED),
    "calls after nothing": (b"N0cos\nsystem\n(S'x'\ntR." + bytes(99), PICKLED),
    "TorchScript": (zipped(MEMBERS), FileContent("TorchScript", True)),
    "array": (saved(np.zeros(3)), FileContent()),
    "npz": (saved(np.zeros(3), is_archive=True), FileContent()),
    "zip": (zipped({"word/document.xml": b"x"}), FileContent()),
    "tar": (tarred("a.txt"), FileContent()),
    "packed text": (gzip.compress(b"words\n" * 99), FileContent()),
    "Keras": (zipped({"config.json": b"", "model.weights.h5": b""}), FileContent("Keras")),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(90), FileContent("HDF5")),
    "TFLite": (b"\x1c\0\0\0TFL3" + bytes(30), FileContent("TensorFlow Lite")),
    "CTranslate2": (b"\6\0\0\0\x0c\0WhisperSpec\0" + bytes(90), FileContent("CTranslate2")),
    "GGUF": (gguf(), FileContent("GGUF")),
    "ONNX": (pb.plain_model(), FileContent("ONNX")),
    "safetensors": (safetensors([("a", "F32", (2,))]), FileContent("safetensors")),
    "msgpack of spaCy": (b"\x82\xa6tables\x80\xa4size\x00" + bytes(40), FileContent()),
    "an empty map": (b"\x80", FileContent()),
    "nothing": (b"", FileContent()),
    "labels": (b"cat\ndog\nbird\n" * 9000, FileContent()),
    "labels with one letter": ("\n".join(["cat", "cow", "crab"] * 9000).encode(), FileContent()),
    "a sentence": (b"This is a text (see below).\n" * 9000, FileContent()),
    "half of a zip": (b"PK\3\4" + bytes(60), FileContent()),
}


@pytest.mark.parametrize("case", CASES)
def test_contents_are_identified(tmp_path: Path, case: str) -> None:
    data, expected = CASES[case]
    for name in ("model.bin", "labels.txt", "none"):
        path = tmp_path / name
        path.write_bytes(data)
        assert identify(path) == expected


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_recognised(protocol: int) -> None:
    values = [WEIGHTS, {}, {"a": [1, 2]}, [1], OrderedDict(a=1), print, (1, "x"), {1, 2}]
    for value in [*values, FileContent("x"), [FileContent(str(n)) for n in range(9999)]]:
        data = pickle.dumps(value, protocol)
        assert is_pickle(data[:65536], is_whole=len(data) <= 65536)


def test_arrays_between_the_opcodes_do_not_hide_a_pickle() -> None:
    data = pickle.dumps(WEIGHTS, 4)
    assert is_pickle(data[:60] + b"\xff" * 900, is_whole=True)


@given(st.text(max_size=400).filter(lambda text: "." not in text))
def test_texts_are_not_pickles(text: str) -> None:
    assert not is_pickle(text.encode(), is_whole=True)


def test_members_of_a_damaged_archive_are_not_read(tmp_path: Path) -> None:
    raw = bytearray(saved(np.zeros(3), is_archive=True))
    start = raw.index(b"\x93NUMPY")
    raw[start : start + 4] = b"????"
    path = tmp_path / "x.npz"
    path.write_bytes(bytes(raw))
    assert identify(path) == FileContent()
    assert zipfile.is_zipfile(path)
