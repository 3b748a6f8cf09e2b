"""Verification of a byte stream while it is read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.content import VerifyingReader, build_bytes_body, build_file_body, read_all
from clowder_aimage.content.verified_reader import RawReader
from clowder_aimage.errors import VerificationError
from clowder_aimage.oci import Descriptor
from tests.content.artifact import BLOB, blob


class Drip(RawReader):
    """Returns few bytes at a time."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data = io.BytesIO(data)
        self._sizes = sizes

    def _fill(self, view: memoryview) -> int:
        return self._data.readinto(view[: self._sizes.pop() if self._sizes else 1])


@given(st.binary(max_size=200), st.lists(st.integers(1, 50)), st.integers(1, 64))
def test_correct_bytes_pass_in_reads_of_any_size(data: bytes, sizes: list[Any], size: int) -> None:
    with VerifyingReader(Drip(data, sizes), blob(data)) as reader:
        parts = []
        while part := reader.read(size):
            parts.append(part)
    assert b"".join(parts) == data


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_wrong_bytes_fail_before_the_end(promised: bytes, sent: bytes) -> None:
    if promised == sent:
        return
    with (
        VerifyingReader(io.BytesIO(sent), blob(promised)) as reader,
        pytest.raises(VerificationError),
    ):
        reader.readall()


def test_at_most_one_excess_byte_is_read() -> None:
    content = blob(b"x" * 10)
    source = io.BytesIO(b"x" * 1000)
    with VerifyingReader(source, content) as reader:
        assert reader.read(10) == b"x" * 10
        with pytest.raises(VerificationError, match="longer than the 10 bytes"):
            reader.read(1)
        assert source.tell() == 11


def test_the_error_of_a_short_source_has_both_sizes() -> None:
    reader = VerifyingReader(io.BytesIO(b"xx"), blob(b"xxx"))
    with pytest.raises(VerificationError, match="has 2 bytes, expected 3"):
        reader.readall()


def test_a_read_of_zero_bytes_is_not_the_end() -> None:
    with VerifyingReader(io.BytesIO(b"abc"), blob(b"abc")) as reader:
        assert reader.read(0) == b""
        assert reader.read(3) == b"abc"


def test_closing_closes_the_source() -> None:
    source = io.BytesIO(b"")
    VerifyingReader(source, blob(b"")).close()
    assert source.closed


def test_read_all_refuses_a_huge_size_before_reading() -> None:
    class Untouchable(io.BytesIO):
        def readinto(self, buffer: object) -> int:
            raise AssertionError("it was read")

    huge = Descriptor(BLOB, blob(b"").digest, 1 << 40)
    with pytest.raises(VerificationError, match="too large: 1099511627776 bytes"):
        read_all(Untouchable(), huge)
    with pytest.raises(VerificationError, match="the limit is 3"):
        read_all(source := io.BytesIO(b"1234"), blob(b"1234"), 3)
    assert source.closed
    assert read_all(io.BytesIO(b"123"), blob(b"123"), 3) == b"123"


def test_read_all_stops_at_an_endless_source() -> None:
    class Endless(io.BytesIO):
        given = 0

        def readinto(self, buffer: Any) -> int:
            size = memoryview(buffer).nbytes
            self.given += size
            return size

    source = Endless()
    with pytest.raises(VerificationError):
        read_all(source, blob(b"x"))
    assert source.given < 10_000_000


def test_bodies_can_be_opened_repeatedly_at_any_offset(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    for body in (build_file_body(path), build_bytes_body(b"0123456789")):
        for offset in (0, 3, 10, 0):
            with body(offset) as file:
                assert file.read() == b"0123456789"[offset:]
