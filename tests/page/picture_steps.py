"""Steps of tests of the page with pictures: make them, drop and paste files, read the form."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Page

_MAKE = """async (fields) => {
    const { generate } = await import('/page/generation.js');
    const { EMPTY } = await import('/page/state.js');
    const made = await generate({ ...EMPTY, model: 'shapes:latest', ...fields, previews: 0 });
    return made.map((entry) => [entry.id, entry.facts]);
}"""
_DRAFT = """async () => {
    const { draft } = await import('/page/state.js');
    const text = (buffer) => btoa(String.fromCharCode(...new Uint8Array(buffer)));
    const read = async (blob) => blob && text(await blob.arrayBuffer());
    const { images, mask, control, ...rest } = draft.value;
    const pictures = { mask: await read(mask), control: await read(control) };
    return { ...rest, ...pictures, images: await Promise.all(images.map(read)) };
}"""
_BLOB = """async (id) => {
    const { get } = await import('/page/gallery_store.js');
    const { blob } = await get(id);
    return btoa(String.fromCharCode(...new Uint8Array(await blob.arrayBuffer())));
}"""
_GIVE = """([selector, kind, files]) => {
    const transfer = new DataTransfer();
    for (const { name, type, data } of files) {
        const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
        transfer.items.add(new File([bytes], name, { type }));
    }
    const how = { bubbles: true, cancelable: true };
    const event = kind === 'paste' ? new ClipboardEvent(kind, { ...how, clipboardData: transfer })
        : new DragEvent(kind, { ...how, dataTransfer: transfer });
    document.querySelector(selector).dispatchEvent(event);
}"""
File = tuple[str, str, bytes]  # name, type, content


def make(page: Page, prompt: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Make a picture as the page does; return its id in the gallery and its facts."""
    ((number, facts),) = page.evaluate(_MAKE, {"prompt": prompt, "seed": 7, "steps": 2} | fields)
    assert number is not None
    return number, facts


def draft(page: Page) -> dict[str, Any]:
    """Return the form's fields; pictures as bytes."""
    found: dict[str, Any] = page.evaluate(_DRAFT)
    found["images"] = [base64.b64decode(one) for one in found["images"]]
    for name in ("mask", "control"):
        found[name] = found[name] and base64.b64decode(found[name])
    return found


def kept(page: Page, number: int) -> bytes:
    """Return the file of a picture in the gallery."""
    return base64.b64decode(page.evaluate(_BLOB, number))


def give(page: Page, selector: str, *files: File, kind: str = "drop") -> None:
    """Drop or paste files."""
    sent = [
        {"name": name, "type": media, "data": base64.b64encode(data).decode()}
        for name, media, data in files
    ]
    page.evaluate(_GIVE, [selector, kind, sent])


def png(colour: str = "red", size: tuple[int, int] = (128, 96)) -> bytes:
    """Return a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    """Return a picture file."""
    return Image.open(io.BytesIO(data))


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def with_chunk(data: bytes, kind: bytes, content: bytes) -> bytes:
    """Return a PNG with one more chunk, after its header."""
    chunk = struct.pack(">I", len(content)) + kind + content
    chunk += struct.pack(">I", zlib.crc32(kind + content))
    return data[:33] + chunk + data[33:]


def with_facts(data: bytes, facts: dict[str, Any]) -> bytes:
    """Return a PNG that states facts as the worker writes them."""
    return with_chunk(data, b"iTXt", b"aimage\0\0\0\0\0" + json.dumps(facts).encode())
