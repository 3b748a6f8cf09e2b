"""A live worker as seen by OpenAI's unmodified SDK for node.

``AIMAGE_OPENAI_NODE`` is a directory in which ``npm install openai`` was run.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from PIL import Image

from tests.process import spawn
from tests.worker.conftest import Worker

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("openai_node.mjs")
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(worker: Worker) -> Iterator[Call]:
    """Return ``call(name, files, **arguments)`` of ``client.images``."""
    place = os.environ.get("AIMAGE_OPENAI_NODE")
    if not place:
        pytest.skip("AIMAGE_OPENAI_NODE names no directory with OpenAI's SDK for node")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"}
    node = shutil.which("node") or "node"
    with spawn([node, SCRIPT, place, worker.url], **pipes, env=environment) as process:

        def ask(name: str, files: dict[str, Path] | None = None, **arguments: Any) -> Any:
            said = {"model": "tiny", "size": "64x64", "seed": 5, "steps": 2, **arguments}
            paths = {key: str(path) for key, path in (files or {}).items()}
            message = {"name": name, "files": paths, "arguments": said}
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "start.png"
    Image.effect_noise((64, 64), 90).convert("RGB").save(path)
    return path


def size_of(item: dict[str, Any]) -> tuple[int, int]:
    with Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))) as image:
        image.load()
        return image.size


def test_generate(call: Call) -> None:
    made = call("generate", prompt="a fox", response_format="b64_json")["made"]
    assert [size_of(item) for item in made] == [(64, 64)]


def test_edit_and_variation(call: Call, picture: Path, tmp_path: Path) -> None:
    mask = tmp_path / "mask.png"
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (16, 16, 48, 48))
    image.save(mask)
    plain = call("edit", {"image": picture}, prompt="a fox")["made"]
    masked = call("edit", {"image": picture, "mask": mask}, prompt="a fox", n=2)["made"]
    again = call("edit", {"image": picture}, prompt="a fox")["made"]
    other = call("createVariation", {"image": picture})["made"]
    assert [size_of(item) for item in (*plain, *masked, *other)] == [(64, 64)] * 4
    assert plain[0]["b64_json"] == again[0]["b64_json"] != masked[0]["b64_json"]


def test_a_stream_of_edits(call: Call, picture: Path) -> None:
    events = call(
        "edit", {"image": picture}, prompt="a fox", steps=6, stream=True, partial_images=1
    )["made"]
    kinds = [event["type"] for event in events]
    assert kinds == ["image_edit.partial_image", "image_edit.completed"]
    assert size_of(events[-1]) == (64, 64)


def test_errors(call: Call, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    found = call("edit", {"image": text}, prompt="a fox")
    assert (found["status"], found["param"]) == (400, "image")
    assert call("generate", prompt="a fox", model="gone")["status"] == 404
