"""The contract of every store (content/store.py)."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from clowder_aimage.content import VerifyingReader, build_bytes_body, copy
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError, VerificationError
from clowder_aimage.oci import Descriptor, Digest, Reference
from tests.content.artifact import BLOB, blob, broken_body, index, manifest, put, put_artifact
from tests.memory_store import MemoryStore
from tests.store import read

DATA = bytes(range(256)) * 20
LARGE = bytes(range(251)) * 13_000  # over three mebibytes: more than one buffer


@pytest.mark.parametrize("data", [b"", DATA, LARGE], ids=["empty", "some", "large"])
def test_pushed_content_exists(target: Any, data: bytes) -> None:
    for algorithm in ("sha256", "sha512"):
        content = Descriptor(BLOB, Digest.of(data, algorithm), len(data))
        assert not target.exists(content)
        for _ in range(2):  # a second time changes nothing
            target.push(content, build_bytes_body(data))
            assert target.exists(content)
            assert read(target, content) == data
        assert not target.exists(replace(content, size=content.size + 1))


def test_open_reads_any_part(target: Any) -> None:
    content = put(target, DATA)
    for offset, length in ((0, None), (5120, None), (0, 0), (5000, 500)):
        end = None if length is None else offset + length
        assert read(target, content, offset, length) == DATA[offset:end]


def test_an_open_file_fills_a_buffer(target: Any) -> None:
    content = put(target, DATA)
    buffer = bytearray(len(DATA))
    with target.open(content, 20) as file:
        filled = 0
        while count := file.readinto(memoryview(buffer)[filled:]):
            filled += count
    assert bytes(buffer[:filled]) == DATA[20:]


def test_absent_content_is_not_found(target: Any) -> None:
    put(target, b"something else")
    absent = blob(b"absent")
    assert not target.exists(absent)
    with pytest.raises(NotFoundError):
        read(target, absent)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(build_bytes_body(DATA[:-1]), id="short"),
        pytest.param(build_bytes_body(DATA[:-1] + b"\0"), id="wrong"),
        pytest.param(build_bytes_body(DATA + b"x"), id="long"),
        pytest.param(broken_body(DATA, NetworkError("the line is dead")), id="broken-at-the-end"),
    ],
)
def test_push_of_other_content_leaves_nothing(target: Any, body: Any) -> None:
    content = blob(DATA)
    with pytest.raises((VerificationError, NetworkError)):
        target.push(content, body)
    assert not target.exists(content)
    with pytest.raises(NotFoundError):
        read(target, content)
    target.push(content, build_bytes_body(DATA))  # and does not stand in the way
    assert read(target, content) == DATA


def test_a_manifest_is_named_as_it_is_pushed(target: Any, name: str) -> None:
    """Its bytes are kept, with fields that are not known."""
    made = put_artifact(target, f"{name}:v1", b"layer", **{"x-mine": [1.50, {"a": None}]})
    for reference in (f"{name}:v1", f"{name}@{made.digest}"):
        found = target.resolve(Reference.parse(reference))
        assert (found.digest, found.size) == (made.digest, len(made.raw))
        assert found.media_type == made.media_type
        assert read(target, found) == made.raw


def test_the_digest_wins_over_the_tag(target: Any, name: str) -> None:
    first = put_artifact(target, f"{name}:v1", b"one")
    put_artifact(target, f"{name}:v2", b"two")
    found = target.resolve(Reference.parse(f"{name}:v2@{first.digest}"))
    assert found.digest == first.digest


def test_a_wrong_manifest_is_not_named(target: Any, name: str) -> None:
    config = put(target, b"{}")
    made = manifest(config, [])
    with pytest.raises(VerificationError):
        target.push(
            made.descriptor, build_bytes_body(made.raw + b" "), Reference.parse(f"{name}:v1")
        )
    with pytest.raises(NotFoundError):
        target.resolve(Reference.parse(f"{name}:v1"))


def test_unknown_names_are_not_found(target: Any, name: str) -> None:
    put_artifact(target, f"{name}:v1")
    for text in (f"{name}:v2", f"{name}@{Digest.of(b'other')}"):
        with pytest.raises(NotFoundError):
            target.resolve(Reference.parse(text))


def test_a_name_can_be_added_and_moved(target: Any, name: str) -> None:
    first = put_artifact(target, f"{name}:v1", b"one")
    second = put_artifact(target, f"{name}:v2", b"two")
    latest = Reference.parse(f"{name}:latest")
    target.tag(first.descriptor, latest)
    assert target.resolve(latest).digest == first.digest
    target.tag(second.descriptor, latest)
    assert target.resolve(latest).digest == second.digest
    assert target.resolve(Reference.parse(f"{name}:v1")).digest == first.digest


def test_tag_refuses_an_absent_manifest(target: Any, name: str) -> None:
    absent = manifest(blob(b"{}"), [])
    with pytest.raises(NotFoundError):
        target.tag(absent.descriptor, Reference.parse(f"{name}:v1"))
    with pytest.raises(NotFoundError):
        target.resolve(Reference.parse(f"{name}:v1"))


def test_an_index_can_be_named_too(target: Any, name: str) -> None:
    one = put_artifact(target, f"{name}:one", b"one")
    two = put_artifact(target, f"{name}:two", b"two")
    both = index([one.descriptor, two.descriptor])
    target.push(both.descriptor, build_bytes_body(both.raw), Reference.parse(f"{name}:both"))
    found = target.resolve(Reference.parse(f"{name}:both"))
    assert (found.digest, found.media_type) == (both.digest, both.media_type)


def test_many_pushes_of_one_content_at_once(target: Any) -> None:
    content = blob(LARGE)
    failures: list[BaseException] = []

    def push() -> None:
        try:
            target.push(content, build_bytes_body(LARGE))
        except AImageError as error:
            failures.append(error)

    threads = [threading.Thread(target=push) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert read(target, content) == LARGE


def test_a_copy_from_and_to_it_is_whole(target: Any, name: str) -> None:
    made = put_artifact(target, f"{name}:v1", b"one", LARGE, b"")
    memory = MemoryStore()
    reference = Reference.parse(f"{name}:v1")
    assert copy(target, reference, memory).digest == made.digest
    for child in (made.descriptor, *made.children):
        with VerifyingReader(memory.open(child), child) as reader:
            assert len(reader.readall()) == child.size
    copied = Reference.parse(f"{name}:copied")
    assert copy(memory, reference, target, copied).digest == made.digest
    assert target.resolve(copied).digest == made.digest
