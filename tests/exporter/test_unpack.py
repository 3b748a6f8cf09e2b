"""Decompressed layers: complete, verified, and no larger than declared."""

from __future__ import annotations

import builtins
import gzip
import hashlib
import random
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.decompress import MAX_RATIO, open_decompressed
from clowder_aimage.errors import FormatError, NotFoundError, UsageError, VerificationError
from clowder_aimage.oci import Descriptor, Digest, mediatype
from tests.memory_store import MemoryStore

KIND = "application/vnd.example.weights"
DATA = random.Random(5).randbytes(300_000) + bytes(500_000) + b"end"
PLAIN = Descriptor(KIND, Digest.of(DATA), len(DATA))


def zstd(data: bytes, **options: object) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor(**options).compress(data)


PACK: dict[str, Callable[..., bytes]] = {"gzip": gzip.compress, "zstd": zstd}


class MemoryBlobs(MemoryStore):
    """Blobs in memory for code that expects files."""

    def find_path(self, content: Descriptor, /) -> Path:
        raise NotFoundError(f"no file of {content.digest}")


def stored(data: bytes, compression: str = "gzip") -> tuple[MemoryBlobs, Descriptor]:
    store = MemoryBlobs()
    layer = Descriptor.of(f"{KIND}+{compression}" if compression else KIND, data)
    store.push(layer, build_bytes_body(data))
    return store, layer


def unpacked(
    data: bytes, compression: str = "gzip", content: Descriptor | None = None, **options: Any
) -> bytes:
    store, layer = stored(data, compression)
    with open_decompressed(store, layer, content, **options) as file:
        return b"".join(iter(lambda: file.read(70_001), b""))


@pytest.fixture(params=mediatype.COMPRESSIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("content", [None, PLAIN], ids=["unsaid", "said"])
def test_open_decompressed_decompresses(kind: str, content: Descriptor | None) -> None:
    assert unpacked(PACK[kind](DATA), kind, content) == DATA


def test_open_decompressed_returns_an_uncompressed_layer_unchanged() -> None:
    packed = gzip.compress(DATA)
    assert unpacked(packed, "") == packed


def test_open_decompressed_of_empty_content(kind: str) -> None:
    assert unpacked(PACK[kind](b""), kind) == b""


def test_several_gzip_members_are_one_file(kind: str) -> None:
    assert unpacked(PACK[kind](b"one") + PACK[kind](b"") + PACK[kind](DATA), kind) == b"one" + DATA


@pytest.mark.parametrize("count", [1, 3_000_000])
def test_trailing_zeros_after_gzip_are_accepted(count: int) -> None:
    assert unpacked(gzip.compress(DATA) + bytes(count)) == DATA


def test_a_skippable_zstd_frame_is_skipped() -> None:
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00....\x51\x2a\x4d\x18\x00\x00\x00\x00"
    assert unpacked(skipped + zstd(DATA) + skipped, "zstd") == DATA


def test_zstd_without_a_size_and_with_a_checksum_is_read() -> None:
    data = zstd(DATA, write_content_size=False, write_checksum=True)
    assert unpacked(data, "zstd") == DATA
    with pytest.raises(FormatError, match="is not valid zstd"):
        unpacked(data[:-1] + bytes([data[-1] ^ 1]), "zstd")


@pytest.mark.parametrize(
    ("cut", "content"),
    [(0, None), (17, PLAIN), (200_000, None), (-1, PLAIN)],
)
def test_open_decompressed_refuses_truncated_data(
    kind: str, cut: int, content: Descriptor | None
) -> None:
    with pytest.raises(FormatError, match=f"is truncated: incomplete {kind}"):
        unpacked(PACK[kind](DATA)[:cut], kind, content)


@pytest.mark.parametrize("junk", [b"x", b"\0\0x" * 500])
def test_open_decompressed_refuses_trailing_data(kind: str, junk: bytes) -> None:
    with pytest.raises(FormatError, match=f"is not valid {kind}|is truncated"):
        unpacked(PACK[kind](DATA) + junk, kind)


def test_another_format_is_refused(kind: str) -> None:
    other = PACK["zstd" if kind == "gzip" else "gzip"]
    for data in (other(DATA), DATA, zlib.compress(DATA)):
        with pytest.raises(FormatError, match=f"layer sha256:\\w+ is not valid {kind}") as caught:
            unpacked(data, kind)
        assert caught.value.exit_code == 5


@pytest.mark.parametrize("position", [3, 100_000, -6])
def test_any_damage_to_gzip_is_detected(position: int) -> None:
    store, layer = stored(gzip.compress(DATA, mtime=0))
    data = bytearray(store._blobs[layer.digest])
    data[position] ^= 0x40
    store._blobs[layer.digest] = bytes(data)
    with (
        pytest.raises((VerificationError, FormatError)) as caught,
        open_decompressed(store, layer, None) as file,
    ):
        file.read()
    assert caught.value.exit_code == 5


def test_a_damaged_blob_is_reported_as_damaged(kind: str) -> None:
    """It is not reported as another format, since it can be fetched again."""
    store, layer = stored(PACK[kind](DATA), kind)
    store._blobs[layer.digest] = b"\xff" * layer.size
    with pytest.raises(VerificationError), open_decompressed(store, layer, None) as file:
        file.read()


@pytest.mark.parametrize(
    "content",
    [
        Descriptor(KIND, Digest.of(b"x"), len(DATA)),
        Descriptor(KIND, PLAIN.digest, len(DATA) + 1),
        Descriptor(KIND, PLAIN.digest, len(DATA) - 1),
    ],
    ids=["digest", "larger", "smaller"],
)
def test_content_that_differs_from_the_manifest_is_refused(kind: str, content: Descriptor) -> None:
    with pytest.raises(VerificationError):
        unpacked(PACK[kind](DATA), kind, content)


def test_a_missing_blob_is_reported(kind: str) -> None:
    _, layer = stored(PACK[kind](DATA), kind)
    with pytest.raises(NotFoundError):
        open_decompressed(MemoryBlobs(), layer, None)


def bomb(kind: str) -> bytes:
    """Return a gigabyte of zeros, in members or frames of 16 MiB."""
    return 64 * PACK[kind](bytes(16 << 20))


def test_a_decompression_bomb_is_refused_early_without_memory(kind: str) -> None:
    data = bomb(kind)
    store, layer = stored(data, kind)
    before, given = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    with (
        pytest.raises(FormatError, match="decompresses to more than 67108864") as caught,
        open_decompressed(store, layer, None) as file,
    ):
        while chunk := file.read(1 << 20):
            given += len(chunk)
    assert given <= 64 << 20
    assert caught.value.hint
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 300 << 20


def test_bomb_of_stated_size_is_unpacked(kind: str) -> None:
    zeros = bytes(65 << 20)
    content = Descriptor(KIND, Digest.of(zeros), len(zeros))
    data = PACK[kind](zeros)
    assert len(zeros) > MAX_RATIO * len(data)
    assert len(unpacked(data, kind, content)) == len(zeros)


def test_bomb_of_understated_size_is_stopped(kind: str) -> None:
    content = Descriptor(KIND, Digest("sha256", hashlib.sha256(bytes(9)).hexdigest()), 9)
    with pytest.raises(VerificationError, match="decompresses to more than the 9 bytes"):
        unpacked(PACK[kind](bytes(9_000_000)), kind, content)


def test_open_decompressed_keeps_the_limit_of_the_caller(kind: str) -> None:
    with pytest.raises(FormatError, match="decompresses to more than 799999"):
        unpacked(PACK[kind](DATA), kind, limit=799_999)
    with pytest.raises(FormatError, match="decompresses to more than 799999"):
        unpacked(PACK[kind](DATA), kind, PLAIN, limit=799_999)


def test_a_zstd_window_over_the_limit_is_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = packer.compress(DATA) + packer.flush()
    with pytest.raises(FormatError, match="too much memory"):
        unpacked(data, "zstd")


def test_a_missing_zstd_package_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x28\xb5\x2f\xfd"
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> ModuleType:
        if name == "zstandard":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"zstd needs the extra \[zstd\]") as caught:
        unpacked(data, "zstd")
    assert "install" in (format_advice(caught.value) or "") and "[zstd]" in (
        format_advice(caught.value) or ""
    )
    assert caught.value.exit_code == 2
