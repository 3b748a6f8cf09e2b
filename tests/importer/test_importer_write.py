"""Writing blobs to the store: one read, hashing while writing, and no leftovers."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.content.parallel import ParallelStoppedError
from clowder_aimage.create import create
from clowder_aimage.errors import ModelError, NoSpaceError, VerificationError
from clowder_aimage.importer import Recipe, blob_writer
from clowder_aimage.importer.range_reader import RangeReader
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.ingest import FileIngest
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.tensor.weight import SourceTensor
from tests.importer.valued import (
    ValuedModel,
    as_dtype,
    bf16_values,
    make_valued,
    read_back,
    transformer,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from clowder_aimage.importer.planned_layer import PlannedLayer
    from clowder_aimage.tensor.weight import FileRange


NAME = Reference.parse("m")
SMALL = 4096  # bytes; larger blobs are streamed


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the buffers so that the blobs of these models count as large."""
    monkeypatch.setattr(blob_writer, "MIN_BUFFER", SMALL)
    monkeypatch.setattr(blob_writer, "BUFFER", SMALL)


@pytest.fixture
def model(tmp_path: Path) -> ValuedModel:
    return make_valued(tmp_path / "model")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Count the reads of each span."""
    counted: Counter[object] = Counter()
    begin = RangeReader.__init__

    def counting(self: RangeReader, span: FileRange, stopped: threading.Event) -> None:
        counted[span] += 1
        begin(self, span, stopped)

    monkeypatch.setattr(RangeReader, "__init__", counting)
    return counted


@pytest.fixture
def ingests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Record the outcome of ingests without a known digest."""
    ends: Counter[str] = Counter()
    for name in ("commit", "abort"):
        method = getattr(FileIngest, name)

        def counting(self: Any, *arguments: Any, method: Any = method, name: str = name) -> Any:
            ends[name] += self._expected is None
            return method(self, *arguments)

        monkeypatch.setattr(FileIngest, name, counting)
    return ends


def left(store: Path) -> list[Any]:
    """Return the files in the store's directory for ingests."""
    return [path.name for path in (store / ".aimage" / "ingest").glob("*")]


def test_digests_are_independent_of_buffer_sizes(
    model: ValuedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = model.recipe_digest()
    for size, jobs in ((509, 3), (SMALL, 1)):
        monkeypatch.setattr(blob_writer, "MIN_BUFFER", size)
        monkeypatch.setattr(blob_writer, "BUFFER", size)
        assert model.recipe_digest(jobs=jobs) == digest


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_streamed_blobs_match_their_digests(
    model: ValuedModel, small: None, ingests: Counter[str], algorithm: str
) -> None:
    made = create(ImageLayout(model.store), NAME, model.directory, algorithm=algorithm)
    assert ingests["commit"] > 20
    assert left(model.store) == []
    for written in made.layers:
        raw = ImageLayout(model.store).find_path(written.layer.descriptor).read_bytes()
        assert Digest.of(raw, algorithm) == written.layer.descriptor.digest


def test_every_source_is_read_once(model: ValuedModel, small: None, reads: Counter[Any]) -> None:
    model.make()
    assert set(reads.values()) == {1}
    reads.clear()
    model.make("other", quantize="int8")
    assert set(reads.values()) <= {1, 2}  # twice: kept matrices of a size that the store has


def test_packing_again_writes_nothing(
    model: ValuedModel, small: None, ingests: Counter[str]
) -> None:
    model.make()
    ingests.clear()
    again = model.make("again")
    assert not ingests
    assert all(written.existed for written in again.layers)


def test_a_streamed_blob_that_exists_is_discarded(
    model: ValuedModel, small: None, ingests: Counter[str]
) -> None:
    """Quantizing again: the digest is known only after the last byte."""
    model.make(quantize="int8")
    before = ingests["commit"]
    again = model.make("again", quantize="int8")
    assert ingests["commit"] == before
    assert ingests["abort"] > 10
    assert all(written.existed for written in again.layers)
    assert left(model.store) == []


def test_the_same_blob_twice_in_a_model_is_stored_once(
    tmp_path: Path, small: None, ingests: Counter[str]
) -> None:
    """A text encoder and a transformer with the same tensor."""
    values = as_dtype({"layers.0.same.weight": bf16_values("same", (64, 128))}, "BF16")
    model = make_valued(tmp_path / "model", text_encoder=values, transformer=values)
    made = model.make(jobs=8)
    found = [w for w in made.layers if w.layer.name.endswith("same.weight")]
    assert len({written.layer.descriptor for written in found}) == 1
    assert sorted(written.existed for written in found) == [False, True]
    assert left(model.store) == []


def test_a_blob_of_the_same_size_is_not_assumed_to_exist(tmp_path: Path, small: None) -> None:
    """Another model of the same shapes."""
    make_valued(tmp_path / "model").make("first")
    other = {name: value * 2 for name, value in transformer().items()}
    model = make_valued(tmp_path / "other", transformer=as_dtype(other, "BF16"))
    made = model.make("second")
    new = {written.layer.name for written in made.layers if not written.existed}
    assert new == {f"transformer/{name}" for name in other}


def test_leftovers_of_a_killed_create_are_removed_by_the_next(
    model: ValuedModel, small: None
) -> None:
    """Files of a running create and resumable downloads are kept."""
    store = ImageLayout(model.store)
    busy = store.ingest("create")
    busy.write_at(0, b"x")
    directory = model.store / ".aimage" / "ingest"
    before = set(left(model.store))
    (directory / f"create.{'0' * 16}").write_bytes(b"left behind")
    (directory / ("1" * 64)).write_bytes(b"a download")
    model.make()
    assert set(left(model.store)) == before | {"1" * 64}
    busy.abort()


# -- failures


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_file_that_changes_while_read_is_refused(
    model: ValuedModel, small: None, monkeypatch: pytest.MonkeyPatch, quantize: str | None
) -> None:
    """In the middle of a tensor, in its last bytes, or just before it."""
    path = model.weights("transformer")
    end = RangeReader.check_unchanged

    def meddle(self: RangeReader) -> None:
        os.utime(path, ns=(1, 1))
        end(self)

    with monkeypatch.context() as patch:
        patch.setattr(RangeReader, "check_unchanged", meddle)
        with pytest.raises(ModelError, match="changed while it was read"):
            model.make(quantize=quantize)
    assert left(model.store) == []
    assert list(ImageLayout(model.store).list_tags()) == []


def test_a_file_that_changes_between_hashing_and_storing_is_refused(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs that are hashed first must have the same content in the second read."""
    make_valued(tmp_path / "model").make("first")
    other = {name: value * 2 for name, value in transformer().items()}
    model = make_valued(tmp_path / "other", transformer=as_dtype(other, "BF16"))
    path = model.weights("transformer")
    hashed = blob_writer._Writer._digest

    def meddle(self: blob_writer._Writer, planned: PlannedLayer) -> Digest:
        digest = hashed(self, planned)
        status = path.stat()
        raw = path.read_bytes()
        header = 8 + int.from_bytes(raw[:8], "little")
        path.write_bytes(raw[:header] + bytes(len(raw) - header))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return digest

    monkeypatch.setattr(blob_writer._Writer, "_digest", meddle)
    with pytest.raises(ModelError, match="changed while it was read"):
        model.make("second", jobs=1)
    assert left(model.store) == []
    assert [name for name, _ in ImageLayout(model.store).list_tags()] == ["first:latest"]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_full_disk_leaves_no_ingest(
    model: ValuedModel, small: None, monkeypatch: pytest.MonkeyPatch, quantize: str | None
) -> None:
    real, calls = os.pwrite, []

    def full(fd: int, data: Buffer, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpaceError):
        model.make(quantize=quantize, jobs=2)
    monkeypatch.undo()
    assert list(ImageLayout(model.store).list_tags()) == []
    assert left(model.store) == []
    assert model.make(quantize=quantize)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_an_interrupt_stops_in_the_middle_of_a_tensor(
    model: ValuedModel, small: None, monkeypatch: pytest.MonkeyPatch, quantize: str | None
) -> None:
    """Ctrl-C ends the read between two chunks, however much is left."""
    reading = threading.Event()
    stopped = []
    readinto = RangeReader.readinto

    def endless(self: RangeReader, buffer: memoryview[int]) -> int:
        reading.set()
        try:
            while True:
                if self._stopped.wait(60):
                    return readinto(self, buffer)
        except ParallelStoppedError as error:
            stopped.append(error.message)
            raise

    def interrupted(*given: Any, **options: Any) -> Any:
        if waits:  # for running reads
            return wait(*given, **options)
        waits.append(1)
        assert reading.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(RangeReader, "readinto", endless)
    waits, wait = list[int](), concurrent.futures.wait
    monkeypatch.setattr(concurrent.futures, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.make(quantize=quantize, jobs=2)
    assert set(stopped) == {"stopped"}
    assert left(model.store) == []


def test_a_damaged_blob_is_not_converted(model: ValuedModel) -> None:
    from clowder_aimage.create import convert

    model.make()
    store = ImageLayout(model.store)
    layer = read_back(model.store).get_layer("transformer/layers.0.attention.to_q.weight")
    path = store.find_path(layer.descriptor)
    path.chmod(0o600)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(VerificationError):
        convert(store, NAME, Reference.parse("new"), Recipe.parse(quantize="int8"))
    assert [name for name, _ in store.list_tags()] == ["m:latest"]
    assert left(model.store) == []


class _Halves:
    """Rows of two bytes, computed in parts that end anywhere."""

    def decode(self, start: int, stop: int) -> Iterator[bytes]:
        data = bytes(range(2 * start, 2 * stop))
        yield from (data[:3], b"", data[3:])


def test_rows_of_a_decoded_tensor_are_read_in_any_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    codes = SourceTensor("w", "U8", (1,), path, 0, 1, path.stat().st_mtime_ns)
    whole = codes.with_decoder(_Halves(), "U8", (8, 2))
    part = whole.slice_rows("v", 2, 7).slice_rows("u", 1, 4)
    with RangeReader(part.file_range, threading.Event()) as reader:
        assert b"".join(map(bytes, reader.iter_chunks(4))) == bytes(range(6, 12))
        reader.check_unchanged()
    short = replace(whole, nbytes=17)
    with RangeReader(short.file_range, threading.Event()) as reader, pytest.raises(ModelError):
        reader.read()
