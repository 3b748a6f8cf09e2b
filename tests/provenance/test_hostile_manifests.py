"""Manifests of strangers: each ends with a sentence, within limits of time and memory."""

from __future__ import annotations

import functools
import http.server
import resource
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("c2pa", reason="c2pa is not installed")

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import AImageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor
from clowder_aimage.pictures.provenance.marked_input import MarkedInput
from clowder_aimage.pictures.provenance.marking import plan_marking
from clowder_aimage.pictures.provenance.picture_report import read_report
from tests.process import run
from tests.provenance.signing import (
    FACTS,
    MARK,
    get_store,
    join_png,
    make_file,
    open_signer,
    read_own,
    split_png,
    with_stores,
)

# Seconds of processor time, and bytes, of the processes for a file
SECONDS, MEMORY = 2.0, 200 << 20
STORE_TYPE = bytes.fromhex("63327061001100108000 00aa00389b71")


@functools.cache
def signed(kind: str = "png") -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        signer = open_signer(Path(directory))
        return signer.sign(make_file(kind), kind, MARK, (), FACTS)


@functools.cache
def edited() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        signer, path = open_signer(Path(directory)), Path(directory) / "input"
        path.write_bytes(signed())
        entry = MarkedInput("image", path, MARK, has_manifest=True, keeps_manifest=True)
        return signer.sign(make_file(), "png", MARK, (entry,), FACTS)


def box(kind: bytes, body: bytes, size: int | None = None) -> bytes:
    return struct.pack(">I", len(body) + 8 if size is None else size) + kind + body


def superbox(label: bytes, *boxes: bytes, kind: bytes = STORE_TYPE) -> bytes:
    return box(b"jumb", box(b"jumd", kind + b"\3" + label + b"\0") + b"".join(boxes))


def nested(depth: int) -> bytes:
    inner = superbox(b"x")
    head = box(b"jumd", STORE_TYPE + b"\3c2pa\0")
    whole = len(inner) + depth * (8 + len(head))
    parts = []
    for _ in range(depth):
        parts.append(struct.pack(">I", whole) + b"jumb" + head)
        whole -= 8 + len(head)
    return b"".join(parts) + inner


def replaced(old: bytes, new: bytes) -> bytes:
    """Return a picture whose store has other bytes of the same length."""
    store = get_store(signed())
    assert len(old) == len(new) and old in store
    return with_stores(signed(), store.replace(old, new))


def claim_of(cbor: bytes) -> bytes:
    """Return a store whose claim is other CBOR; the lengths of the boxes around it fit."""
    store = get_store(signed())
    label = store.index(b"c2pa.claim.v2\0")
    at = store.index(b"cbor", label) - 4
    end = at + int.from_bytes(store[at : at + 4], "big")
    changed = bytearray(store[: at + 8] + cbor + store[end:])
    around = (0, store.index(b"jumb", 8) - 4, store.rindex(b"jumb", 0, label) - 4, at)
    for start in around:
        (size,) = struct.unpack_from(">I", store, start)
        struct.pack_into(">I", changed, start, size + len(changed) - len(store))
    return bytes(changed)


def enlarge_box(store: bytes) -> bytes:
    """Return a store whose box of assertions has four gigabytes."""
    at = store.rindex(b"jumb", 0, store.index(b"c2pa.assertions\0")) - 4
    return store[:at] + b"\xff\xff\xff\xff" + store[at + 4 :]


def jpeg_segments(change: Callable[[bytes], bytes]) -> bytes:
    """Return a JPEG whose segment with the manifest is changed."""
    data = signed("jpeg")
    start = data.index(b"\xff\xeb")
    end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    return data[:start] + change(data[start:end]) + data[end:]


def webp_chunk() -> bytes:
    data = bytearray(signed("webp"))
    at = data.index(b"C2PA")
    data[at + 4 : at + 8] = struct.pack("<I", 1 << 31)
    return bytes(data)


FILES: dict[str, Callable[[], bytes]] = {
    "an empty store": lambda: with_stores(signed(), b""),
    "a store of four bytes": lambda: with_stores(signed(), get_store(signed())[:4]),
    "a store cut in its first box": lambda: with_stores(signed(), get_store(signed())[:60]),
    "a store cut in its claim": lambda: with_stores(signed(), get_store(signed())[:1500]),
    "a store without its last byte": lambda: with_stores(signed(), get_store(signed())[:-1]),
    "a huge box": lambda: with_stores(signed(), enlarge_box(get_store(signed()))),
    "a box of 64 bits": lambda: with_stores(
        signed(), b"\0\0\0\1jumb" + b"\x7f" + b"\xff" * 7 + get_store(signed())[8:]
    ),
    "a box without an end": lambda: with_stores(signed(), b"\0\0\0\0" + get_store(signed())[4:]),
    "boxes in boxes": lambda: with_stores(signed(), nested(20_000)),
    "many boxes": lambda: with_stores(signed(), superbox(b"c2pa", box(b"free", b"") * 400_000)),
    "zeros": lambda: with_stores(signed(), bytes(8 << 20)),
    "two manifests": lambda: with_stores(signed(), get_store(signed()), get_store(signed())),
    "the manifest of another picture": lambda: with_stores(
        make_file(facts=None), get_store(signed())
    ),
    "a store of another type": lambda: replaced(STORE_TYPE, b"c2px" + STORE_TYPE[4:]),
    "an array without an end in the claim": lambda: with_stores(
        signed(), claim_of(b"\x9b" + b"\x0f" + b"\xff" * 7)
    ),
    "arrays in arrays in the claim": lambda: with_stores(signed(), claim_of(b"\x81" * 500_000)),
    "a text of an exabyte in the claim": lambda: with_stores(
        signed(), claim_of(b"\xa1\x7b" + b"\x0f" + b"\xff" * 7)
    ),
    "an ingredient with a damaged manifest": lambda: with_stores(
        edited(), get_store(edited()).replace(b"c2pa.claim.v2\0", b"c2pa.claim.v3\0", 1)
    ),
    "an ingredient whose manifest is a bomb": lambda: with_stores(
        edited(), superbox(b"c2pa", nested(5000), get_store(edited())[38:])
    ),
    "a chunk longer than the file": lambda: signed().replace(
        struct.pack(">I", len(get_store(signed()))) + b"caBX", b"\x7f\xff\xff\xffcaBX"
    ),
    "a JPEG segment with another number": lambda: jpeg_segments(
        lambda segment: segment[:8] + b"\xff\xff\xff\xff" + segment[12:]
    ),
    "a JPEG segment twice": lambda: jpeg_segments(lambda segment: segment * 2),
    "a WebP chunk longer than the file": webp_chunk,
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_ends_with_a_sentence_within_limits(name: str) -> None:
    data = FILES[name]()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    sentence = ""
    try:
        report = read_report(data, "the picture")
    except AImageError as error:
        sentence = error.message
    else:
        manifest = report.manifest
        assert manifest is None or not manifest.is_valid
        sentence = report.fault or ("" if manifest is None else ", ".join(manifest.faults))
        # A file whose manifest is not found is one without a signature
        sentence = sentence or ("" if report.has_manifest else "not signed")
    assert sentence and len(sentence) < 600
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < SECONDS


# A program of its own: memory is measured of a process, and of its largest child
READ = """
import resource, sys
from pathlib import Path
from clowder_aimage.errors import AImageError
from clowder_aimage.pictures.provenance.picture_report import read_report
for path in Path(sys.argv[1]).iterdir():
    try:
        read_report(path.read_bytes(), "it")
    except AImageError:
        pass
# Not its ru_maxrss, which begins with the memory of the process that has started it
(peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
print(peak.split()[1], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_hostile_files_are_read_within_the_limit_of_memory(tmp_path: Path) -> None:
    for number, make in enumerate(FILES.values()):
        (tmp_path / str(number)).write_bytes(make())
    done = run([sys.executable, "-c", READ, tmp_path], check=True, text=True)
    here, child = (int(number) << 10 for number in done.stdout.split())
    assert max(here, child) < MEMORY


def test_a_bomb_in_the_picture_of_a_request_is_left_out_and_said(tmp_path: Path) -> None:
    bomb = with_stores(signed(), nested(20_000))
    store, content = ImageLayout(tmp_path / "store"), Descriptor.of("image/png", bomb)
    store.push(content, build_bytes_body(bomb))
    request = GenerateRequest.of("x", image=str(content.digest))
    marking = plan_marking(request, store, open_signer(tmp_path))
    (warning,) = marking.warnings
    assert warning.startswith("the image has a signed manifest (C2PA), which the result does not ")
    found = read_own(marking.sign(make_file(), "png", FACTS), "png")
    assert found["validation_state"] == "Valid" and len(found["manifests"]) == 1


def test_the_manifest_in_the_picture_of_a_request_is_kept_or_its_loss_said(tmp_path: Path) -> None:
    store, content = ImageLayout(tmp_path / "store"), Descriptor.of("image/png", signed())
    store.push(content, build_bytes_body(signed()))
    request = GenerateRequest.of("x", image=str(content.digest))
    marking = plan_marking(request, store, open_signer(tmp_path))
    assert marking.warnings == ()
    assert len(read_own(marking.sign(make_file(), "png", FACTS), "png")["manifests"]) == 2
    (warning,) = plan_marking(request, store).warnings
    assert warning.endswith("which the result does not keep: it is not signed")


def test_a_file_makes_no_request() -> None:
    """C2PA finds manifests elsewhere by an address in the XMP."""
    asked = list[str]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/manifest"
        xmp = (
            '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF '
            'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
            f'xmlns:dcterms="http://purl.org/dc/terms/" dcterms:provenance="{address}"/>'
            "</rdf:RDF></x:xmpmeta>"
        )
        text = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp.encode()
        head, *rest = split_png(make_file(facts=None))
        for stores in ([], [b""], [get_store(signed())]):
            chunks = [head, *((b"caBX", store) for store in stores), (b"iTXt", text)]
            data = join_png([*chunks, *(one for one in rest if one[0] != b"iTXt")])
            report = read_report(data, "it")
            assert report.manifest is None or not report.manifest.is_valid
        server.shutdown()
        thread.join()
    assert not asked
