"""Pictures in requests to a live worker: edits, variations, bad input, and what is left of it."""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import json
import threading
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")
pytest.importorskip("openai")

import openai
from PIL import Image

from clowder_aimage.api.picture import body as picture_body
from clowder_aimage.api.picture import upload as picture_upload
from clowder_aimage.oci import Digest
from tests.picture_file import load_picture
from tests.wait import until
from tests.worker.conftest import answer_to

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker

EDITS, VARIATIONS = "/v1/images/edits", "/v1/images/variations"
GENERATIONS = "/v1/images/generations"
HEAD = "Content-Disposition: form-data; name="


def file(size: tuple[int, int] = (64, 48), kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return a picture file of stripes."""
    image = Image.new(mode, size, "navy" if mode != "L" else 0)
    image.paste("orange" if mode != "L" else 255, (8, 8, 24, 24))
    data = io.BytesIO()
    image.save(data, kind)
    return data.getvalue()


def clear(size: tuple[int, int] = (64, 48)) -> bytes:
    """Return a mask as OpenAI's: black, with a transparent hole."""
    image = Image.new("RGBA", size, (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (8, 8, 40, 40))
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def form(*parts: tuple[str, bytes | str, str]) -> tuple[bytes, dict[str, str]]:
    """Return a multipart body and its headers; a part with a type is a file."""
    body = b""
    for name, value, kind in parts:
        head = f'--x\r\n{HEAD}"{name}"'
        head += f'; filename="a"\r\nContent-Type: {kind}' if kind else ""
        data = value if isinstance(value, bytes) else value.encode()
        body += head.encode() + b"\r\n\r\n" + data + b"\r\n"
    return body + b"--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}


def send(
    worker: LocalWorker, path: str, data: bytes | dict[str, Any], **headers: str
) -> tuple[int, Any]:
    """Return the status and JSON of a response."""
    if isinstance(data, dict):
        data, headers = json.dumps(data).encode(), {"Content-Type": "application/json"} | headers
    status, _, body = answer_to(urllib.request.Request(worker.url + path, data, headers))
    return status, json.loads(body)


def edit(worker: LocalWorker, *parts: tuple[str, bytes | str, str]) -> tuple[int, Any]:
    """Send a form to ``/v1/images/edits`` with a model, a prompt and few steps."""
    known = {name for name, _, _ in parts}
    fixed = {"model": "tiny", "prompt": "a dog", "steps": "2", "seed": "7"}
    more = [(name, value, "") for name, value in fixed.items() if name not in known]
    body, headers = form(*parts, *more)
    return send(worker, EDITS, body, **headers)


def pictures(answer: Any) -> list[bytes]:
    return [base64.b64decode(one["b64_json"]) for one in answer["data"]]


def pixels(data: bytes) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB").tobytes()


def left(store: Path) -> set[str]:
    """Return the files of a store, except those about content and about the index."""
    files = (path.relative_to(store) for path in store.rglob("*") if path.is_file())
    others = [(".aimage", name) for name in ("used", "described", "measured", "index")]
    return {str(path) for path in files if path.parts[:2] not in others}


def collect(worker: LocalWorker) -> None:
    """Remove the pictures that ``run`` has left to a later collection."""
    blob = worker.store / "blobs/sha256" / Digest.of(file()).encoded

    def is_gone() -> bool:
        worker.aimage("gc", "--grace", 0)
        return not blob.exists()

    until(is_gone)


@pytest.fixture(autouse=True)
def nothing_is_left(worker: LocalWorker) -> Iterator[None]:
    """Check that a request leaves no blob of its pictures."""
    before = {name for name in left(worker.store) if "lease" not in name}
    yield

    def is_clean() -> bool:
        after = {name for name in left(worker.store) if "lease" not in name}
        return after - before <= {".aimage/gc.lock"}

    until(is_clean)


@pytest.fixture
def client(worker: LocalWorker) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as found:
        yield found


# -- OpenAI's SDK


def test_the_sdk_edits_a_picture_as_run_does(
    worker: LocalWorker, client: Any, tmp_path: Path
) -> None:
    (tmp_path / "in.png").write_bytes(file())
    made = client.images.edit(
        model="tiny",
        image=tmp_path / "in.png",
        prompt="a dog",
        extra_body={"seed": 7, "steps": 3, "strength": 0.7},
    )
    (data,) = pictures(made.model_dump())
    assert made.size == "64x48"
    command = ["tiny", "a dog", "--image", tmp_path / "in.png", "--seed", 7, "--steps", 3]
    worker.aimage("run", "-q", *command, "--strength", 0.7, "-o", tmp_path / "out.png", "--local")
    assert pixels(data) == pixels((tmp_path / "out.png").read_bytes())
    collect(worker)
    (tmp_path / "made.png").write_bytes(data)
    _, facts = load_picture(tmp_path / "made.png")
    assert facts["image"] == str(Digest.of(file())) and facts["strength"] == 0.7


def test_the_sdk_paints_what_is_transparent_in_a_mask(client: Any) -> None:
    made = client.images.edit(
        model="tiny",
        image=("in.png", file(), "image/png"),
        mask=("mask.png", clear(), "image/png"),
        prompt="a dog",
        n=2,
        extra_body={"seed": 7, "steps": 2, "paste": True},
    )
    whole = pixels(file())
    for data in pictures(made.model_dump()):
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == (64, 48)
            outside, inside = image.getpixel((50, 20)), image.crop((8, 8, 40, 40)).tobytes()
        assert outside == (0, 0, 128)
        assert pixels(data) != whole and inside not in whole


def test_the_sdk_streams_an_edit_with_previews(client: Any) -> None:
    with client.images.edit(
        model="tiny",
        image=[("in.png", file(), "image/png")],
        prompt="a dog",
        stream=True,
        partial_images=2,
        extra_body={"seed": 7, "steps": 4, "strength": 1},
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert events[-1].size == "64x48" and events[-1].usage.total_tokens == 0
    assert pixels(base64.b64decode(events[-1].b64_json))


def test_the_sdk_makes_variations(worker: LocalWorker, client: Any) -> None:
    with pytest.deprecated_call():  # by newer SDKs, as dall-e-2 is
        made = client.images.create_variation(
            image=file(kind="JPEG"), model="tiny", n=2, size="32x32", response_format="b64_json"
        )
    first, second = pictures(made.model_dump())
    assert pixels(first) != pixels(second) and made.size == "32x32"


def test_the_sdk_names_the_field_of_an_error(client: Any) -> None:
    two = [("a.png", file(), "image/png"), ("b.png", file(), "image/png")]
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.images.edit(model="tiny", image=two, prompt="a dog")
    assert caught.value.param == "image" and "one picture, not 2" in caught.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(model="tiny", image=b"text", prompt="a dog")
    assert (refused.value.param, refused.value.code) == ("image", "invalid_image")


# -- forms and JSON


def test_forms_and_json_give_the_same_picture(worker: LocalWorker) -> None:
    fields = {"model": "tiny", "prompt": "a dog", "steps": 2, "seed": 7, "strict": True}
    white = file(mode="L")
    fields |= {"image": url_of(file()), "mask": url_of(white)}
    answers = [
        edit(worker, ("image[]", file(), "image/png"), ("mask", white, "image/png")),
        edit(worker, ("images", file(), "image/png"), ("mask", white, "image/png")),
        edit(worker, ("image[0]", file(), "image/png"), ("mask", white, "")),
        edit(worker, ("image", file(), ""), ("mask", white, ""), ("prompt", "\ufeffa dog", "")),
        edit(worker, ("image", url_of(file()), ""), ("mask", url_of(white), "")),
        send(worker, EDITS, fields),
        send(worker, GENERATIONS, fields),
        send(worker, EDITS, {**fields, "image": None, "images": [{"image_url": fields["image"]}]}),
        send(worker, GENERATIONS, {**fields, "image": None, "images": [fields["image"]]}),
    ]
    assert [status for status, _ in answers] == [200] * 9, answers
    found = {pixels(pictures(answer)[0]) for _, answer in answers}
    assert len(found) == 1
    status, other = send(worker, GENERATIONS, {**fields, "mask": None})
    assert status == 200 and pixels(pictures(other)[0]) not in found


@pytest.mark.parametrize("painted", ["auto", "white", "transparent"])
def test_what_a_mask_means_can_be_set(worker: LocalWorker, painted: str) -> None:
    """A layer of a painting program: white strokes, transparent elsewhere."""
    layer = Image.new("RGBA", (64, 48), (0, 0, 0, 0))
    layer.paste((255, 255, 255, 255), (0, 0, 16, 48))
    data = io.BytesIO()
    layer.save(data, "PNG")
    status, answer = edit(
        worker,
        ("image", file(), "image/png"),
        ("mask", data.getvalue(), "image/png"),
        ("painted", painted, ""),
        ("paste", "true", ""),
    )
    assert status == 200, answer
    with Image.open(io.BytesIO(pictures(answer)[0])) as image:
        is_kept = image.crop((32, 0, 64, 48)).getcolors() == [(32 * 48, (0, 0, 128))]
    assert is_kept == (painted == "white")


def test_a_field_of_a_form_is_checked_as_in_json(worker: LocalWorker) -> None:
    image = ("image", file(), "image/png")
    for name, value in (
        ("strength", "nan"),
        ("strength", "0"),
        ("steps", "two"),
        ("n", "1025"),
        ("fit", "wide"),
        ("paste", "true"),  # without a mask
        ("loras", "[{}]"),
        ("loras", "x"),
        ("size", "50x50"),
        ("background", "transparent"),
        ("model", ""),
    ):
        status, answer = edit(worker, image, (name, value, ""))
        assert status == 400, (name, value, answer)
        assert name in (answer["error"]["param"], "loras"), answer
    status, answer = edit(worker, image, ("prompt", "a", ""), ("prompt", "b", ""))
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert edit(worker, image, ("background", "opaque", ""), ("n", "1", ""))[0] == 200


def test_fields_of_pictures_need_a_picture(worker: LocalWorker) -> None:
    for name, value in {
        "strength": 0.5,
        "fine": True,
        "fit": "pad",
        "mask": url_of(file()),
        "expand": "0,0,16,0",
        "upscale": 2,
        "controlnet": "union",
        "control_strength": 0.5,
    }.items():
        body: dict[str, Any] = {"model": "tiny", "prompt": "a dog", name: value}
        status, answer = send(worker, GENERATIONS, body)
        assert (status, answer["error"]["param"]) == (400, name), answer
        needed = "a control picture" if name.startswith("control") else "an image"
        assert f"requires {needed}" in answer["error"]["message"]
        if name != "mask":
            status, answer = send(worker, "/api/generate", body)
            assert status == 400 and name in answer["error"], answer
    for path, prompt in ((EDITS, "a dog"), (VARIATIONS, "")):
        status, answer = send(worker, path, {"model": "tiny", "prompt": prompt})
        assert (status, answer["error"]["code"]) == (400, "missing_required_parameter")
        assert answer["error"]["param"] == "image"


def test_an_edit_paints_what_is_transparent_in_its_image(worker: LocalWorker) -> None:
    def send_picture(path: str, **more: Any) -> tuple[str, dict[str, Any]]:
        fields = {"model": "tiny", "prompt": "a dog", "steps": 2, "seed": 7, **more}
        body = json.dumps({"image": url_of(clear()), **fields}).encode()
        headers = {"Content-Type": "application/json"}
        status, got, data = answer_to(urllib.request.Request(worker.url + path, body, headers))
        assert status == 200, data
        return str(got.get("X-Aimage-Warning")), json.loads(data)

    said, painted = send_picture(EDITS)
    assert said == "image has transparent parts, which are painted: it has no mask"
    assert painted["warnings"] == [said]
    _, masked = send_picture(EDITS, mask="alpha")
    assert pixels(pictures(painted)[0]) == pixels(pictures(masked)[0])
    assert "warnings" not in masked
    pasted = {"paste": True, "feather": 2}
    _, implied = send_picture(EDITS, **pasted)
    _, masked = send_picture(EDITS, mask="alpha", **pasted)
    assert pixels(pictures(implied)[0]) == pixels(pictures(masked)[0])
    white = Image.new("RGB", (64, 48))
    white.paste("white", (8, 8, 40, 40))
    for path, more in ((EDITS, {"strength": 0.5}), (GENERATIONS, {"strength": 0.5})):
        said, whole = send_picture(path, **more)
        assert "transparent parts, which are white for the model; the mask alpha" in said
        file = io.BytesIO()
        white.save(file, "PNG")
        _, same = send_picture(path, **more, image=url_of(file.getvalue()))
        assert pixels(pictures(whole)[0]) == pixels(pictures(same)[0])


def test_ollama_begins_with_the_first_image(worker: LocalWorker) -> None:
    body = {"model": "tiny", "prompt": "a dog", "steps": 3, "seed": 7, "stream": False}
    given = {"images": [base64.b64encode(file()).decode()]}
    status, plain = send(worker, "/api/generate", body)
    status, made = send(worker, "/api/generate", body | given | {"strength": 0.7})
    assert status == 200 and (made["width"], made["height"]) == (64, 48)
    fields = {"model": "tiny", "prompt": "a dog", "steps": 3, "seed": 7, "strength": 0.7}
    _, same = send(worker, EDITS, fields | {"image": url_of(file())})
    data = base64.b64decode(made["image"])
    assert pixels(data) == pixels(pictures(same)[0]) != pixels(base64.b64decode(plain["image"]))
    for wrong in ({"images": given["images"] * 2}, {"images": ["?"]}, {"images": [1]}):
        status, answer = send(worker, "/api/generate", body | wrong)
        assert status == 400 and "images" in answer["error"]
    mask = base64.b64encode(file(mode="L")).decode()
    for more, size in (({"mask": mask}, (64, 48)), ({"expand": [0, 0, 8, 0]}, (72, 48))):
        status, made = send(worker, "/api/generate", body | given | more)
        _, same = send(
            worker,
            EDITS,
            fields
            | {"images": [url_of(file())], "strength": 1}
            | more
            | ({"mask": url_of(file(mode="L"))} if "mask" in more else {}),
        )
        assert status == 200 and (made["width"], made["height"]) == size
        assert pixels(base64.b64decode(made["image"])) == pixels(pictures(same)[0])
    status, answer = send(worker, "/api/generate", body | {"mask": mask})
    assert status == 400 and "mask requires an image" in answer["error"]
    status, answer = send(worker, "/api/generate", given | {"model": "tiny"})
    assert status == 400 and "images requires prompt" in answer["error"]


def test_base64_is_decoded_outside_of_the_event_loop(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    decode = binascii.a2b_base64

    def noted(*given: Any, **options: Any) -> bytes:
        threads.append(threading.current_thread())
        return decode(*given, **options)

    url = url_of(file())
    with monkeypatch.context() as patch:
        patch.setattr(binascii, "a2b_base64", noted)
        for path, fields in (
            ("/api/generate", {"images": [url.partition(",")[2]], "mask": "?"}),
            (EDITS, {"image": url, "mask": url_of(b"text")}),
        ):
            status, _ = send(worker, path, {"model": "tiny", "prompt": "a dog", **fields})
            assert status == 400
    assert len(threads) >= 4 and worker._thread not in threads


# -- bad input


def chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return len(data).to_bytes(4, "big") + kind + data + check.to_bytes(4, "big")


def huge() -> bytes:
    """Return a PNG file whose header has 100,000 x 100,000 pixels."""
    side = (100_000).to_bytes(4, "big")
    head = chunk(b"IHDR", side + side + bytes((8, 2, 0, 0, 0)))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animated() -> bytes:
    data = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(data, "WEBP", save_all=True, append_images=frames[1:])
    return data.getvalue()


BAD: dict[str, tuple[bytes, str]] = {
    "text": (b"a text", "not a picture"),
    "nothing": (b"", "is an empty file"),
    "huge": (huge(), "more than 33554432 pixels"),
    "animated": (animated(), "animated"),
    "cut": (file()[:-30], "not a picture"),
    "gif": (file(kind="GIF"), "not a picture"),
    "polyglot": (b"GIF89a" + file(), "not a picture"),
    "page": (b"<html>" + file(), "not a picture"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("field", ["image", "mask", "control"])
def test_a_bad_picture_is_refused_with_its_field(
    worker: LocalWorker, name: str, field: str
) -> None:
    data, words = BAD[name]
    good = [("image", file(), "image/png")] if field != "image" else []
    status, answer = edit(worker, *good, (field, data, "image/png"))
    assert status in (400, 413), answer
    error = answer["error"]
    assert error["param"] == field and words in error["message"], error
    assert error["message"].startswith(field)
    assert edit(worker, ("image", file(), "image/png"))[0] == 200


@pytest.mark.parametrize("data", [file() + b"PK\3\4", file(kind="JPEG") + b"<?php"])
def test_bytes_after_a_picture_change_nothing(worker: LocalWorker, data: bytes) -> None:
    assert edit(worker, ("image", data, "image/png"))[0] == 200
    plain, after = (file(), data) if data.startswith(b"\x89") else (file(kind="JPEG"), data)
    assert pixels(plain) == pixels(after)


def test_masks_that_do_not_fit_are_refused(worker: LocalWorker) -> None:
    image = ("image", file(), "image/png")
    black = io.BytesIO()
    Image.new("L", (64, 48), 0).save(black, "PNG")
    for mask, words in (
        (file((32, 32), mode="L"), "32 x 32 pixels, the image has 64 x 48"),
        (black.getvalue(), "the mask is empty"),
    ):
        status, answer = edit(worker, image, ("mask", mask, "image/png"))
        assert (status, answer["error"]["param"]) == (400, "mask"), answer
        assert words in answer["error"]["message"]
    status, answer = edit(worker, image, ("mask", "alpha", ""))
    assert status == 400 and "no transparency" in answer["error"]["message"]
    white = ("mask", file(mode="L"), "image/png")
    status, answer = edit(worker, image, white, ("painted", "transparent", ""))
    assert status == 400 and "no transparency" in answer["error"]["message"]


def test_wrong_types_are_415(worker: LocalWorker) -> None:
    for value, kind in ((file(kind="GIF"), "image/gif"), (b"a text", "text/plain")):
        for part in (("image", value, kind), ("image", url_of(value, kind), "")):
            status, answer = edit(worker, part)
            assert (status, answer["error"]["param"]) == (415, "image"), answer
    for data, kind in ((file(kind="JPEG"), "image/png"), (file(kind="WEBP"), "image/jpg")):
        status, answer = edit(worker, ("image", url_of(data, kind), ""))
        assert (status, f"declared as {kind}" in answer["error"]["message"]) == (415, True)
    assert edit(worker, ("image", url_of(file(kind="JPEG"), "image/jpg"), ""))[0] == 200
    body, _ = form(("image", file(), "image/png"))
    for kind in ("application/octet-stream", "text/plain"):
        status, answer = send(worker, EDITS, body, **{"Content-Type": kind})
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
        assert "application/json or multipart/form-data" in answer["error"]["message"]
    nothing, headers = form(("prompt", "a dog", ""), ("image", b"", "image/png"))
    nothing = nothing.replace(b'filename="a"', b'filename=""')  # as of a browser
    answer = send(worker, EDITS, nothing, **headers)[1]
    assert answer["error"]["message"] == "image is required"


def test_too_large_bodies_are_413(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    big = 2 << 20
    monkeypatch.setattr(picture_body, "MAX_BYTES", big)
    monkeypatch.setattr(picture_body, "MAX_BODY", big + (1 << 20))
    status, answer = edit(worker, ("image", bytes(big + 1), "image/png"))
    assert (status, answer["error"]["param"]) == (413, "image"), answer
    status, answer = edit(worker, ("prompt", "x" * ((1 << 20) + 1), ""))
    assert (status, answer["error"]["param"]) == (413, "prompt"), answer
    half = bytes(big - 1)
    assert edit(worker, ("image", half, "image/png"), ("mask", half, "image/png"))[0] == 413
    fields = {"model": "tiny", "prompt": "x" * (1 << 20)}
    assert send(worker, GENERATIONS, fields)[0] == 413
    status, answer = send(worker, GENERATIONS, {**fields, "image": url_of(file())})
    assert (status, answer["error"]["param"]) == (400, "prompt"), answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x--\r\n",
        b"no form",
        b"--x\r\n\r\na\r\n--x--\r\n",
        f'--x\r\n{HEAD}"image"; filename="a"\r\n\r\nabc'.encode(),
        f'--x\r\n{HEAD}"a\7"\r\n\r\n1\r\n--x--\r\n'.encode(),
        f"--x\r\n{HEAD}a b;c\r\n\r\n1\r\n--x--\r\n".encode(),
        f'--x\r\n{HEAD}"prompt"\r\n\r\n'.encode() + b"\xff\r\n--x--\r\n",
        f'--x\r\n{HEAD}"a"\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y--'.encode(),
        b"".join(f'--x\r\n{HEAD}"a{n}"\r\n\r\n1\r\n'.encode() for n in range(200)) + b"--x--\r\n",
    ],
)
def test_malformed_forms_are_400(worker: LocalWorker, body: bytes) -> None:
    status, answer = send(
        worker, EDITS, body, **{"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert status == 400 and answer["error"]["message"], answer
    status, answer = send(worker, EDITS, body, **{"Content-Type": "multipart/form-data"})
    assert status == 400 and answer["error"]["message"], answer


def test_other_sources_of_pictures_need_a_permission(worker: LocalWorker) -> None:
    sources = {"https://a.example/x.png": 403, "/etc/passwd": 400, "file:///x": 400}
    for text, wanted in {**sources, "oci://127.0.0.1:1/a:b": 403}.items():
        status, answer = edit(worker, ("image", text, ""))
        assert (status, answer["error"]["param"]) == (wanted, "image"), answer


def test_a_client_that_disconnects_leaves_nothing(worker: LocalWorker) -> None:
    """At any moment: while its picture is stored, drawn, or removed."""
    image = ("image", file(), "image/png")
    slow = ("model", "tiny", ""), ("prompt", "a", ""), ("steps", "100", ""), ("stream", "true", "")
    body, headers = form(image, *slow)
    for number in range(12):
        line = http.client.HTTPConnection(worker.host, timeout=30)
        line.request("POST", EDITS, body, headers)
        if number % 3 == 0:
            line.getresponse().readline()
        threading.Event().wait(0.01 * number)
        line.close()
    assert edit(worker, image)[0] == 200


# -- load


@pytest.mark.worker_only("it has a limit of its own, which is not the queue of a worker")
def test_uploads_beyond_the_queue_are_refused_before_their_bodies(worker: LocalWorker) -> None:
    """The bodies of refused requests are not held; the worker keeps serving."""
    other = worker.start("--queue", "1", "--max-wait", "0")
    held: list[int] = []
    enter, end = picture_upload.PictureUploads.enter, picture_upload.PictureUploads._end
    lock = threading.Lock()
    count = 0

    def entered(uploads: picture_upload.PictureUploads) -> None:
        nonlocal count
        enter(uploads)
        with lock:
            count += 1
            held.append(count)

    def ended(uploads: picture_upload.PictureUploads, upload: Any) -> None:
        nonlocal count
        with lock:
            count -= 1
        end(uploads, upload)

    answers: list[Any] = []
    data = file((512, 512)) + bytes(1 << 20)

    def ask() -> None:
        body, headers = form(
            ("image", data, "image/png"),
            ("prompt", "a", ""),
            ("size", "64x64", ""),
            ("model", "tiny", ""),
            ("steps", "30", ""),
        )
        asked = urllib.request.Request(other.url + EDITS, body, headers)
        answers.append(answer_to(asked))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture_upload.PictureUploads, "enter", entered)
        patch.setattr(picture_upload.PictureUploads, "_end", ended)
        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    statuses = [status for status, _, _ in answers]
    assert len(answers) == 12 and set(statuses) <= {200, 503}, statuses
    assert statuses.count(200) >= 1 and statuses.count(503) >= 1
    for status, headers, _ in answers:
        assert status == 200 or int(headers["Retry-After"]) >= 1
    assert max(held) <= 2  # one is served, one waits
    assert edit(other, ("image", file(), "image/png"))[0] == 200


# -- run


def test_run_sends_its_pictures_to_a_worker(worker: LocalWorker, tmp_path: Path) -> None:
    """The picture and its facts are those that this process makes, also with a mask of a layer."""
    layer = Image.new("RGBA", (64, 48), (0, 0, 0, 0))
    layer.paste((255, 255, 255, 255), (8, 8, 40, 40))
    layer.save(tmp_path / "mask.png")
    (tmp_path / "in.png").write_bytes(file())
    here = worker.aimage
    said = ["a dog", "--seed", 7, "--steps", 3, "--image", tmp_path / "in.png", "--no-open"]
    masked = ["--mask", tmp_path / "mask.png", "--paste", "--feather", 4, "--strength", 0.9]
    for options in ([], masked, ["--size", "32x64", "--fit", "pad", "--fine"]):
        found = []
        for name, place in (("here", "--local"), ("there", "--remote")):
            here.environment["AIMAGE_HOST"] = worker.url
            try:
                here("run", "-q", "tiny", *said, *options, place, "-o", tmp_path / f"{name}.png")
            finally:
                del here.environment["AIMAGE_HOST"]
            _, facts = load_picture(tmp_path / f"{name}.png")
            found.append((pixels((tmp_path / f"{name}.png").read_bytes()), facts))
        assert found[0] == found[1]
    collect(worker)
