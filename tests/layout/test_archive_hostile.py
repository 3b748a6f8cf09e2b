"""Foreign and malformed archives: accepted content, refusals and their messages."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.content import tar, tar_store
from clowder_aimage.errors import (
    ContentError,
    FormatError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UsageError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout, group_commit
from clowder_aimage.layout.ingest import FileIngest
from clowder_aimage.load import LoadResult, load
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Digest, Reference, mediatype
from tests.content import artifact

LAYOUT = ("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
LAYER = b"layer" * 1000
CONFIG = b"{}"
MADE = artifact.manifest(artifact.blob(CONFIG), [artifact.blob(LAYER)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.tar"


def path_of(data: bytes) -> str:
    return f"blobs/sha256/{Digest.of(data).encoded}"


def blob(data: bytes) -> tuple[str, bytes]:
    return path_of(data), data


def index(*entries: Any) -> tuple[str, bytes]:
    """Return index.json over (document, annotations) or JSON descriptors."""
    listed = [
        entry if isinstance(entry, dict) else {**entry[0].descriptor.to_json(), **entry[1]}
        for entry in entries
    ]
    return "index.json", json.dumps({"schemaVersion": 2, "manifests": listed}).encode()


def called(name: str, key: str = mediatype.REF_NAME) -> dict[Any, Any]:
    return {"annotations": {key: name}}


BLOBS = [blob(MADE.raw), blob(CONFIG), blob(LAYER)]
GOOD = [LAYOUT, index((MADE, called("x:v1"))), *BLOBS]


def tar_of(*members: tuple[Any, bytes], format_: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of (name, bytes), or of (TarInfo, bytes)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format_) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if not isinstance(name, tarfile.TarInfo):
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def entry(name: str, type_: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = type_
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def load_all(
    store: ImageLayout,
    file: Path,
    *members: tuple[Any, bytes],
    wanted: Reference | None = None,
    **options: Any,
) -> LoadResult:
    file.write_bytes(tar_of(*members, **options))
    return load(store, file, wanted)


def kept(store: ImageLayout) -> set[Any]:
    return {path.name for path in (store.root / "blobs").rglob("*") if path.is_file()}


def unfinished(store: ImageLayout) -> list[Any]:
    return list((store.root / ".aimage" / "ingest").glob("*"))


def assert_refused(
    store: ImageLayout, error: type[ContentError], match: str, call: Callable[..., LoadResult]
) -> None:
    with pytest.raises(error, match=match) as raised:
        call()
    assert type(raised.value) is error
    assert list(store.list_tags()) == []
    assert kept(store) <= {path_of(data).rpartition("/")[2] for _, data in BLOBS}
    assert unfinished(store) == []


# -- archives of other tools


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_load_accepts_archives_of_docker_save(store: ImageLayout, file: Path, format_: int) -> None:
    """docker save (25 and later): directories, then blobs, index.json and additional files."""
    folders = [(entry(name, tarfile.DIRTYPE), b"") for name in ("blobs", "blobs/sha256")]
    name = "docker.io/library/x:v1"
    both = {"annotations": {mediatype.CONTAINERD_NAME: name, mediatype.REF_NAME: "v1"}}
    others = [("manifest.json", b"[]"), ("repositories", b"{}")]
    members = [*folders, *BLOBS, index((MADE, both)), *others, LAYOUT]
    loaded = load_all(store, file, *members, format_=format_)
    assert [str(reference) for reference, _ in loaded.names] == [name]
    assert store.find_path(MADE.layers[0]).read_bytes() == LAYER


def test_load_accepts_a_macos_tar_of_a_directory(store: ImageLayout, file: Path) -> None:
    beside = [("./._index.json", b"x"), (f"./blobs/sha256/._{'0' * 64}", b"x")]
    members: list[tuple[object, bytes]] = [(f"./{name}", data) for name, data in GOOD]
    members += [(entry("./", tarfile.DIRTYPE), b""), ("./.aimage/lock", b"")]
    assert load_all(store, file, *beside, *members).blobs == 2


def test_a_missing_name_can_be_given(store: ImageLayout, file: Path) -> None:
    members = [LAYOUT, index((MADE, {})), *BLOBS]
    with pytest.raises(UsageError, match=f"no name for {MADE.digest}") as raised:
        load_all(store, file, *members)
    assert "--as NAME" in (format_advice(raised.value) or "")
    wanted = Reference.parse("y")
    assert load_all(store, file, *members, wanted=wanted).names[0][0] == wanted
    assert store.resolve(wanted).digest == MADE.digest


def test_one_name_for_two_manifests_is_refused(store: ImageLayout, file: Path) -> None:
    other = artifact.manifest(artifact.blob(CONFIG), [])
    both = index((MADE, called("a")), (other, called("b")))
    with pytest.raises(UsageError, match=r"only one name was given: .*'a'.*'b'"):
        load_all(store, file, both, *BLOBS, blob(other.raw), wanted=Reference.parse("y"))
    twice = index((MADE, called("a")), (MADE, called("b")))
    loaded = load_all(store, file, twice, *BLOBS, wanted=Reference.parse("y"))
    assert [name for name, _ in loaded.names] == [Reference.parse("y")]


def test_load_reports_unnamed_manifests(store: ImageLayout, file: Path) -> None:
    other = artifact.manifest(artifact.blob(CONFIG), [])
    both = index((MADE, called("a")), (other, called("Not A Name")))
    loaded = load_all(store, file, both, *BLOBS, blob(other.raw))
    assert [str(name) for name, _ in loaded.names] == ["a:latest"]
    assert loaded.unnamed == (f"{other.digest} ('Not A Name')",)
    assert store.exists(other.descriptor)


def test_load_reads_a_pipe_to_its_end(store: ImageLayout) -> None:
    data = tar_of(*GOOD) + bytes(100_000)
    read_end, write_end = os.pipe()
    failed = []

    def write() -> None:
        with os.fdopen(write_end, "wb") as out:
            try:
                out.write(data)
            except BrokenPipeError as error:
                failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    planned: list[Any] = []
    with os.fdopen(read_end, "rb", buffering=0) as stream:
        assert load(store, stream, on_plan=planned.append).names
    writer.join(60)
    assert not failed
    assert planned == [len(MADE.raw) + len(CONFIG) + len(LAYER)]


def test_load_of_other_compressions_gives_advice(store: ImageLayout, file: Path) -> None:
    import bz2
    import lzma

    for data, tool in (
        (bz2.compress(b"x"), "bzip2 -dc"),
        (lzma.compress(b"x"), "xz -dc"),
        (b"\x28\xb5\x2f\xfd....", "zstd -dc"),
    ):
        file.write_bytes(data)
        with pytest.raises(FormatError, match="which is unsupported") as raised:
            load(store, file)
        assert tool in (format_advice(raised.value) or "")


# -- incomplete archives


def test_load_names_only_complete_artifacts(store: ImageLayout, file: Path) -> None:
    other = artifact.manifest(artifact.blob(CONFIG), [artifact.blob(b"away")])
    away = artifact.manifest(artifact.blob(b"c"), [])
    both = index((other, called("a")), (MADE, called("b")), (away, called("c")))
    loaded = load_all(store, file, LAYOUT, both, *BLOBS, blob(other.raw))
    assert [str(name) for name, _ in loaded.names] == ["b:latest"]
    assert loaded.problem is not None
    assert loaded.problem.exit_code == 5
    assert f"a:latest is missing {Digest.of(b'away')}" in loaded.problem.message
    assert f"c:latest is missing {away.digest}" in loaded.problem.message
    assert [name for name, _ in store.list_tags()] == ["b:latest"]


def test_an_index_requires_at_least_one_manifest(store: ImageLayout, file: Path) -> None:
    away = artifact.manifest(artifact.blob(b"c"), [])
    both = artifact.index([MADE.descriptor, away.descriptor])
    none = artifact.index([away.descriptor])
    names = index((both, called("both")), (none, called("none")))
    loaded = load_all(store, file, names, *BLOBS, blob(both.raw), blob(none.raw))
    assert [str(name) for name, _ in loaded.names] == ["both:latest"]
    assert loaded.problem is not None
    assert f"none:latest is missing {away.digest}" in loaded.problem.message


def test_load_takes_missing_blobs_from_the_store(store: ImageLayout, file: Path) -> None:
    artifact.put(store, LAYER)
    assert load_all(store, file, *GOOD[:4]).problem is None


_CUT = "is truncated|is not a tar|is damaged|past its end"


@pytest.mark.parametrize("cut", [0, 700, -8000])
def test_a_truncated_archive_tags_nothing(store: ImageLayout, file: Path, cut: int) -> None:
    raw = tar_of(*GOOD)
    end = raw.rstrip(b"\0")
    raw = raw[: -(-len(end) // 512) * 512 + 1024]  # no padding after the end
    file.write_bytes(raw[:cut])
    assert_refused(store, FormatError, _CUT, lambda: load(store, file))


# -- invalid archives


def test_a_wrong_blob_is_refused(store: ImageLayout, file: Path) -> None:
    wrong = (path_of(LAYER), b"L" + LAYER[1:])
    late = [*BLOBS[:2], wrong, GOOD[1]]
    for members in ([*GOOD[:4], wrong], late):
        assert_refused(
            store,
            VerificationError,
            "digest mismatch",
            lambda m=members: load_all(store, file, *m),
        )


def test_a_blob_of_another_size_than_its_descriptor_is_refused(
    store: ImageLayout, file: Path
) -> None:
    longer = (path_of(LAYER), LAYER + b"x")
    assert_refused(
        store,
        VerificationError,
        "5001 bytes, expected 5000",
        lambda: load_all(store, file, *GOOD[:4], longer),
    )


def test_a_descriptor_with_a_wrong_size_is_refused(store: ImageLayout, file: Path) -> None:
    layer = {**artifact.blob(LAYER).to_json(), "size": 3}
    lying = artifact.manifest(artifact.blob(CONFIG), [Descriptor.from_json(layer)])
    loaded = load_all(
        store, file, blob(LAYER), blob(CONFIG), blob(lying.raw), index((lying, called("x")))
    )
    assert loaded.names == ()
    assert loaded.problem is not None


def test_a_duplicate_blob_is_refused(store: ImageLayout, file: Path) -> None:
    assert load_all(store, file, *GOOD, *BLOBS).names
    other = ImageLayout(store.root.parent / "other")
    wrong = (path_of(LAYER), b"L" + LAYER[1:])
    assert_refused(
        other, VerificationError, "digest mismatch", lambda: load_all(other, file, *GOOD, wrong)
    )


def test_a_duplicate_index_is_refused(store: ImageLayout, file: Path) -> None:
    other = index((MADE, called("y")))
    assert_refused(
        store, FormatError, "index.json twice", lambda: load_all(store, file, *GOOD, other)
    )
    assert load_all(store, file, *GOOD, GOOD[1]).names


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ((entry("blobs/sha256/x", tarfile.SYMTYPE, linkname="/etc/passwd"), b""), "symbolic link"),
        ((entry("x", tarfile.LNKTYPE, linkname="index.json"), b""), "hard link"),
        ((entry("x", tarfile.CHRTYPE), b""), "a device"),
        ((entry("x", tarfile.FIFOTYPE), b""), "named pipe"),
        ((entry("x", b"V"), b""), "of type b'V'"),
        (("/etc/cron.d/x", b"x"), "a path outside"),
        ((entry("../x", tarfile.DIRTYPE), b""), "a path outside"),
        ((f"blobs/sha256/{'A' * 64}", b"x"), "an invalid blob path"),
        ((f"{path_of(LAYER)}/x", b"x"), "an invalid blob path"),
        (("blobs", b"x"), "an invalid blob path"),
        (("oci-layout", b'{"imageLayoutVersion": "2.0.0"}'), "version 1.0.0"),
        (("oci-layout", b" " * 5000), "5000 bytes, over 4096"),
        (("index.json", b'{"manifests":' * 100_000), "not an OCI index"),
        (("index.json", b'{"manifests": []}'), "lists 0 manifests"),
        (index(*[{}] * 5000), "lists 5000 manifests"),
        (index({"digest": "sha256:../x", "size": 1}), "invalid sha256 digest"),
        (index({"digest": f"sha256:{'a' * 64}", "size": 1 << 60}), "size must be"),
        (index((MADE, called(f"x@sha256:{'a' * 64}"))), "another digest"),
        (
            index(
                (MADE, called("x")),
                (artifact.manifest(artifact.blob(CONFIG), []), called("x:latest")),
            ),
            "two manifests with the name",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_load_refuses_malformed_layouts(
    store: ImageLayout, file: Path, member: tuple[tarfile.TarInfo | str, bytes], said: str
) -> None:
    members = [member, *GOOD] if member[0] != "index.json" else [member, *BLOBS]
    assert_refused(store, FormatError, said, lambda: load_all(store, file, *members))


def test_an_oversized_index_is_refused(store: ImageLayout, file: Path) -> None:
    """The size is in the header; the content need not follow."""
    header = entry("index.json", size=MAX_MANIFEST_SIZE + 1).tobuf()
    with file.open("wb") as out:
        out.write(header)
        out.truncate(MAX_MANIFEST_SIZE * 2)
    assert_refused(store, FormatError, f"over {MAX_MANIFEST_SIZE}", lambda: load(store, file))


@pytest.mark.parametrize("size", [10**6, 1 << 70])
def test_an_absurd_size_is_refused(store: ImageLayout, file: Path, size: int) -> None:
    header = entry(path_of(LAYER), size=size).tobuf(tarfile.GNU_FORMAT)
    file.write_bytes(header + LAYER)
    assert_refused(store, FormatError, "past its end", lambda: load(store, file))
    read_end, write_end = os.pipe()
    os.write(write_end, header)
    os.close(write_end)
    with (
        os.fdopen(read_end, "rb", buffering=0) as stream,
        pytest.raises((FormatError, NoSpaceError)),
    ):
        load(store, stream)
    assert kept(store) == set()
    assert unfinished(store) == []


def test_a_negative_size_is_refused(store: ImageLayout, file: Path) -> None:
    block = bytearray(entry(path_of(LAYER), size=0).tobuf())
    block[124:136] = b"\xff" * 12  # base 256: minus one
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    file.write_bytes(bytes(block) + bytes(2048))
    # The second message is that of older releases of Python
    assert_refused(store, FormatError, "past its end|invalid offset", lambda: load(store, file))


@pytest.mark.parametrize(
    "pax",
    [
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "5000"},
        {"GNU.sparse.map": "0,1,5,6", "GNU.sparse.size": "5000"},
        {"GNU.sparse.map": "a,b"},
        {"size": "-1"},
        {"size": "9" * 5000},
        {"comment": "x" * 100_000},
    ],
    ids=str,
)
def test_load_refuses_deceptive_pax_headers(
    store: ImageLayout, file: Path, pax: dict[str, str]
) -> None:
    members = [*GOOD[:4], (entry(path_of(LAYER), size=len(LAYER), pax_headers=pax), LAYER)]
    file.write_bytes(tar_of(*members))
    try:
        loaded = load(store, file)
    except (FormatError, VerificationError):
        pass
    else:
        assert loaded.names == ()
    assert list(store.list_tags()) == []
    assert unfinished(store) == []


def test_a_sparse_file_of_old_gnu_tar_is_refused(store: ImageLayout, file: Path) -> None:
    block = bytearray(entry(path_of(LAYER), size=512).tobuf(tarfile.GNU_FORMAT))
    block[156:157] = tarfile.GNUTYPE_SPARSE
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[483:495] = b"%011o\0" % (1 << 30)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    file.write_bytes(bytes(block) + bytes(512) + bytes(1024))
    assert_refused(store, FormatError, "a sparse file", lambda: load(store, file))


def test_load_bounds_headers(store: ImageLayout, file: Path) -> None:
    """Each header extends the next; stack and memory stay bounded."""
    block = entry("x", tarfile.XHDTYPE, size=0).tobuf(tarfile.USTAR_FORMAT)
    file.write_bytes(block * 10_000)
    assert_refused(store, FormatError, "header of more than", lambda: load(store, file))


@pytest.mark.parametrize("is_packed", [False, True])
def test_load_counts_members_before_it_stores_any(
    store: ImageLayout, file: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    data = tar_of(*reversed(GOOD))
    file.write_bytes(gzip.compress(data) if is_packed else data)
    monkeypatch.setattr(tar, "MAX_MEMBERS", len(GOOD) - 1)
    with pytest.raises(FormatError, match=f"has more than {len(GOOD) - 1} members"):
        load(store, file)
    assert list(store.list_tags()) == unfinished(store) == []
    assert is_packed or kept(store) == set()  # a packed one is counted as it is read
    monkeypatch.setattr(tar, "MAX_MEMBERS", len(GOOD))
    assert len(load(store, file).names) == 1


def test_load_commits_small_blobs_and_manifests_together(
    store: ImageLayout, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [artifact.manifest(artifact.blob(CONFIG), [artifact.blob(b"%d" % n)]) for n in range(20)]
    listed = artifact.index([each.descriptor for each in made])
    calls: list[int] = []

    def synchronise(fd: int) -> bool:
        calls.append(fd)
        return True

    monkeypatch.setattr(group_commit, "sync_file_system", synchronise)
    monkeypatch.setattr(group_commit, "_MAX_AGE", 600.0)
    monkeypatch.setattr(FileIngest, "synchronise", lambda _: calls.append(-1))
    layers = [blob(b"%d" % n) for n in range(20)]
    documents = [blob(listed.raw), *(blob(each.raw) for each in made)]
    load_all(store, file, LAYOUT, index((listed, called("x"))), *documents, *layers, blob(CONFIG))
    assert len(calls) == 1
    assert len(kept(store)) == 42


def test_load_refuses_a_damaged_header(store: ImageLayout, file: Path) -> None:
    raw = bytearray(tar_of(*GOOD))
    second = 1024  # oci-layout takes two blocks
    raw[second] ^= 1
    file.write_bytes(raw)
    assert_refused(store, FormatError, "no header at byte", lambda: load(store, file))


@pytest.mark.parametrize("data", [b"", b"hello", b"x" * 5000, b"PK\x03\x04" + bytes(3000)])
def test_load_refuses_other_files(store: ImageLayout, file: Path, data: bytes) -> None:
    file.write_bytes(data)
    assert_refused(store, FormatError, "not a tar archive", lambda: load(store, file))


def test_an_empty_tar_and_the_old_docker_format_are_refused(store: ImageLayout, file: Path) -> None:
    for members in ([], [("manifest.json", b"[]"), ("abc/layer.tar", b"x")]):
        with pytest.raises(FormatError, match=r"no index\.json") as raised:
            load_all(store, file, *members)
        assert "docker-archive" in (format_advice(raised.value) or "")


@pytest.mark.parametrize(
    "raw",
    [b"[" * 100_000, b"{}", b'{"schemaVersion": 2, "config": 1, "layers": []}', b"\xff\xfe"],
    ids=["deep", "empty", "mistyped", "binary"],
)
@pytest.mark.parametrize("late", [False, True])
def test_an_invalid_manifest_is_refused(
    store: ImageLayout, file: Path, raw: bytes, late: bool
) -> None:
    descriptor = Descriptor.of(mediatype.OCI_MANIFEST, raw).to_json()
    members = [index({**descriptor, **called("x")}), blob(raw)]
    if late:
        loaded = load_all(store, file, *reversed(members))
        assert loaded.problem is not None and loaded.problem.exit_code == 5
    else:
        with pytest.raises(FormatError, match=descriptor["digest"]):
            load_all(store, file, *members)
    assert list(store.list_tags()) == []


def test_an_oversized_manifest_is_refused(store: ImageLayout, file: Path) -> None:
    raw = b" " * (5 << 20)
    descriptor = Descriptor.of(mediatype.OCI_MANIFEST, raw).to_json()
    members = [index({**descriptor, **called("x")}), blob(raw)]
    assert_refused(store, FormatError, "over 4194304", lambda: load_all(store, file, *members))


def test_a_layer_with_a_manifest_media_type_is_a_blob(store: ImageLayout, file: Path) -> None:
    odd = artifact.manifest(artifact.blob(CONFIG), [artifact.blob(LAYER, mediatype.OCI_MANIFEST)])
    members = [index((odd, called("x"))), blob(odd.raw), *BLOBS[1:]]
    assert load_all(store, file, *members).names


def test_deeply_nested_indexes_are_refused(store: ImageLayout, file: Path) -> None:
    made, members = artifact.index([MADE.descriptor]), list(BLOBS)
    for _ in range(8):
        members.append(blob(made.raw))
        made = artifact.index([made.descriptor])
    members.append(blob(made.raw))
    loaded = load_all(store, file, *members, index((made, called("x"))))
    assert loaded.names == ()
    assert loaded.problem is not None
    assert "nested" in loaded.problem.message


def test_a_decompression_bomb_is_refused(
    store: ImageLayout, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_store, "_MIN_UNPACKED", 1 << 20)
    zeros = bytes(8 << 20)
    file.write_bytes(gzip.compress(tar_of(*GOOD, blob(zeros))))
    with pytest.raises(FormatError, match="more than 200 times") as raised:
        load(store, file)
    assert "gzip -dc FILE | aimage load -" in (format_advice(raised.value) or "")
    assert list(store.list_tags()) == []
    assert unfinished(store) == []
    file.write_bytes(tar_of(*GOOD, blob(zeros)))
    assert load(store, file).names


def test_load_checks_the_free_space_first(
    store: ImageLayout, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageLayout, "measure_free", lambda self: 16 * 1024 * 1024 + 3000)
    with pytest.raises(NoSpaceError):
        load_all(store, file, *GOOD)
    assert kept(store) == {MADE.digest.encoded}  # declared by the manifest, before the config


def test_a_missing_file_is_reported(store: ImageLayout, file: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="archive not found"):
        load(store, file)
    with pytest.raises(UsageError, match="is a directory") as raised:
        load(store, tmp_path)
    assert "--store" in (format_advice(raised.value) or "")
    file.write_bytes(tar_of(*GOOD))
    store.root.write_text("in the way")
    with pytest.raises(StoreError):
        load(store, file)
