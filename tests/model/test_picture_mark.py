"""The mark of picture files: what other programs read, what it costs, and which it is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clowder_aimage.client.picture import Picture, PictureFile
from clowder_aimage.content import build_bytes_body
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.picture import encode_picture, read_picture, render_contact_sheet
from clowder_aimage.model.picture_mark import AGENT, COMPOSITE, GENERATED, PictureMark, parse_mark
from clowder_aimage.oci import Descriptor
from clowder_aimage.pictures.provenance.marking import plan_marking, read_mark
from tests.process import run
from tests.program import find_program

PIXELS = np.zeros((16, 32, 3), np.uint8)
FACTS = {"prompt": "two red circles", "seed": 7}
MARK = PictureMark(GENERATED)
KINDS = ["png", "jpeg", "webp"]


@pytest.mark.parametrize("facts", [None, FACTS], ids=["silent", "facts"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_is_read_again_and_has_less_than_a_kilobyte(
    kind: str, facts: dict[str, object] | None
) -> None:
    plain = encode_picture(PIXELS, facts, kind)
    marked = encode_picture(PIXELS, facts, kind, mark=MARK)
    assert (read_mark(plain, "it"), read_mark(marked, "it")) == (None, MARK)
    assert len(marked) - len(plain) <= 1024
    assert marked == encode_picture(PIXELS, facts, kind, mark=MARK)
    before, after = (read_picture(data, "it") for data in (plain, marked))
    assert np.array_equal(before.pixels, after.pixels) and before.metadata == after.metadata
    with Image.open(io.BytesIO(marked)) as image:  # as Pillow finds it
        image.load()
        found = image.info.get("xmp") or image.info["XML:com.adobe.xmp"].encode()
    assert parse_mark(found) == MARK


@pytest.mark.integration
def test_exiftool_reads_the_source_type(tmp_path: Path) -> None:
    marks = {"generated": MARK, "composite": PictureMark(COMPOSITE)}
    for name, mark in marks.items():
        for kind in KINDS:
            path = tmp_path / f"{name}.{kind}"
            path.write_bytes(encode_picture(PIXELS, None, kind, mark=mark))
    command = [find_program("exiftool"), "-j", "-G1", "-validate", "-all", str(tmp_path)]
    read = json.loads(run(command, check=True).stdout)
    assert len(read) == len(marks) * len(KINDS)
    for found in read:
        mark = marks[Path(found["SourceFile"]).stem]
        assert found["XMP-iptcExt:DigitalSourceType"] == mark.source_type
        assert found["XMP-xmp:CreatorTool"] == AGENT
        assert not [text for name, text in found.items() if "Warning" in name]


@pytest.mark.parametrize(
    ("xmp", "source_type", "agent"),
    [
        (
            '<r:Description i:DigitalSourceType="http://x/digitalCapture"/>',
            "http://x/digitalCapture",
            "",
        ),
        ("<i:DigitalSourceType> http://x/a&amp;b </i:DigitalSourceType>", "http://x/a&b", ""),
        ("<i:DigitalSourceType rdf:resource='http://x/a'/>", "http://x/a", ""),
        (f"<i:DigitalSourceType>{GENERATED.replace('http', 'https', 1)}</>", GENERATED, ""),
        (f'i:DigitalSourceType="{GENERATED}" xmp:CreatorTool = "Tool 2"', GENERATED, "Tool 2"),
        (f'i:DigitalSourceType="{"x" * 5000}"', "x" * 300, ""),
    ],
)
def test_marks_of_other_programs_are_read(xmp: str, source_type: str, agent: str) -> None:
    assert parse_mark(xmp.encode()) == PictureMark(source_type, agent)


@pytest.mark.parametrize(
    "xmp", [b"", b"DigitalSourceType", b"<i:DigitalSourceType></i>", b'xmp:CreatorTool="Tool"']
)
def test_xmp_without_a_source_type_is_no_mark(xmp: bytes) -> None:
    assert parse_mark(xmp) is None


# -- pictures that begin with pictures


def mark_of(inputs: dict[str, bytes | list[bytes]], root: Path) -> PictureMark | None:
    """Return the mark of a request with pictures, by the names of its parameters."""
    store, named = ImageLayout(root), dict[str, str | tuple[str, ...]]()

    def keep(data: bytes) -> str:
        content = Descriptor.of("image/png", data)
        store.push(content, build_bytes_body(data))
        return str(content.digest)

    for name, found in inputs.items():
        named[name] = tuple(map(keep, found)) if isinstance(found, list) else keep(found)
    marking = plan_marking(GenerateRequest.of("x", **named), store)
    assert len(marking.inputs) == sum(len(x) if isinstance(x, list) else 1 for x in inputs.values())
    return marking.mark


OUTSIDE = encode_picture(PIXELS, None)
MADE = encode_picture(PIXELS, None, mark=MARK)
MIXED = encode_picture(PIXELS, None, "webp", mark=PictureMark(COMPOSITE))
CAPTURED = encode_picture(PIXELS, None, mark=PictureMark("http://x/digitalCapture", "a camera"))


@pytest.mark.parametrize(
    ("inputs", "source_type"),
    [
        ({}, GENERATED),
        ({"image": OUTSIDE}, COMPOSITE),
        ({"image": CAPTURED}, COMPOSITE),
        ({"image": MIXED}, COMPOSITE),
        ({"image": MADE}, GENERATED),
        ({"references": [MADE, MADE]}, GENERATED),
        ({"references": [MADE, OUTSIDE]}, COMPOSITE),
        ({"control": OUTSIDE}, GENERATED),
        ({"image": b"damaged"}, COMPOSITE),
    ],
)
def test_a_picture_with_parts_from_outside_is_a_composite(
    inputs: dict[str, bytes | list[bytes]], source_type: str, tmp_path: Path
) -> None:
    assert mark_of(inputs, tmp_path) == PictureMark(source_type)


def test_a_mark_that_is_lost_is_said(tmp_path: Path) -> None:
    store, content = ImageLayout(tmp_path), Descriptor.of("image/png", MADE)
    store.push(content, build_bytes_body(MADE))
    request = GenerateRequest.of("x", image=str(content.digest))
    marking = plan_marking(request, store, is_marked=False)
    assert marking.mark is None
    assert marking.warnings == (
        "the image has a mark of its origin, which the result does not keep",
    )
    assert plan_marking(GenerateRequest.of("x"), store, is_marked=False).warnings == ()


def test_a_sheet_keeps_the_mark_of_its_pictures() -> None:
    sheet = render_contact_sheet([(1, MADE)], MARK)
    assert read_mark(sheet, "it") == MARK
    assert read_mark(render_contact_sheet([(1, MADE)]), "it") is None


# -- the Python interface


def test_files_of_a_picture_in_python_have_its_mark() -> None:
    made = Picture(PIXELS, 7, FACTS, MARK)
    received = PictureFile(encode_picture(PIXELS, FACTS, mark=MARK), 7, FACTS)
    assert received.mark == MARK
    for picture in (made, received):
        for kind in KINDS:
            assert read_mark(picture.encode(kind), "it") == MARK
        picture.mark = None
        for kind in KINDS:
            data = picture.encode(kind)
            assert read_mark(data, "it") is None
            assert read_picture(data, "it").metadata["mark"] is False
