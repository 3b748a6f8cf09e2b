"""GGUF models of all kinds of artifacts: pulled from a registry and asked, each verb a process."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.model.text.language_model import TextRequest
from clowder_aimage.oci import Digest
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.text.llama_models import GREEDY, load, text, write_plain
from tests.text.tiny_gguf import write_gguf, write_lora, write_projector
from tests.text.tiny_text import write_model

pytestmark = pytest.mark.integration
VECTORS = Path(__file__).parent.parent / "vectors"
ANSWER = ("the red ball", " is on", " the table")
DOCKER = "application/vnd.docker.ai."


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with one answer to every prompt."""
    root = tmp_path_factory.mktemp("gguf")
    directory = write_model(root / "model", "qwen2", says=ANSWER)
    return write_gguf(root / "model.gguf", directory)


def put(url: str, data: bytes, media_type: str) -> None:
    request = urllib.request.Request(url, data, {"Content-Type": media_type}, method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201


def publish(registry: RealRegistry, name: str, vector: str, blobs: dict[str, bytes]) -> str:
    """Push a manifest of the vectors with these blobs for its layers, by kind; leave out others.

    A layer's kind is the end of its media type.
    """
    base = f"http://{registry.host}/v2/{name}"
    manifest = json.loads((VECTORS / f"{vector}.json").read_bytes())
    config = (VECTORS / f"{vector}-config.json").read_bytes()
    layers = []
    for layer in manifest["layers"]:
        kind = layer["mediaType"].removeprefix("application/vnd.ollama.image.").removeprefix(DOCKER)
        if kind in blobs:
            layers.append(layer | upload(base, blobs[kind]))
    manifest |= {"layers": layers, "config": manifest["config"] | upload(base, config)}
    kind = manifest["mediaType"]
    put(f"{base}/manifests/latest", json.dumps(manifest).encode(), kind)
    return f"{registry.host}/{name}:latest"


def upload(base: str, data: bytes) -> dict[str, Any]:
    digest = str(Digest.of(data))
    with urllib.request.urlopen(urllib.request.Request(f"{base}/blobs/uploads/", b"")) as answer:
        place = answer.headers["Location"]
    separator = "&" if "?" in place else "?"
    put(f"{place}{separator}digest={digest}", data, "application/octet-stream")
    return {"digest": digest, "size": len(data)}


def test_created_model(aimage: Callable[..., Aimage], registry: RealRegistry, gguf: Path) -> None:
    name = f"{registry.host}/gguf/created:v1"
    author, user = aimage("author"), aimage("user")
    author.process("create", name, gguf)
    author.process("push", name, "--plain-http")
    user.process("pull", name, "--plain-http")
    assert user.process("run", name, "what is it?").out == "".join(ANSWER) + "\n"


def test_model_of_ollama(
    aimage: Callable[..., Aimage], registry: RealRegistry, tmp_path: Path
) -> None:
    directory = write_plain(tmp_path / "model")
    path = write_gguf(tmp_path / "model.gguf", directory)
    adapter = write_lora(tmp_path / "adapter.gguf", directory)
    params = json.dumps({"temperature": 0, "num_predict": 12}).encode()
    blobs = {
        "model": path.read_bytes(),
        "adapter": adapter.read_bytes(),
        "template": b"{{ .Prompt }}",
        "license": b"MIT",
        "params": params,
        "system": b"be short",
    }
    name = publish(registry, "gguf/ollama", "ollama-gguf", blobs)
    user = aimage("user")
    user.process("pull", name, "--plain-http")
    found = user.process("run", name, "what is it?").out
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "what is it?"},
    ]
    request = TextRequest(messages=tuple(messages), max_tokens=12, sampling=GREEDY)
    with_adapter, plain = (
        text(load(*paths).generate(request)) for paths in ((path, adapter), (path,))
    )
    assert found == with_adapter + "\n" != plain + "\n"


def test_model_of_docker_model_runner(
    aimage: Callable[..., Aimage], registry: RealRegistry, gguf: Path, tmp_path: Path
) -> None:
    blobs = {
        "gguf.v3": gguf.read_bytes(),
        "mmproj": write_projector(tmp_path / "mmproj.gguf").read_bytes(),
        "license": b"MIT",
        "chat.template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    name = publish(registry, "gguf/docker", "docker-model", blobs)
    user = aimage("user")
    user.process("pull", name, "--plain-http")
    done = user.process("run", name, "what is it?")
    assert done.out == "".join(ANSWER) + "\n"
    assert "not used by llama.cpp here: mmproj.gguf" in done.err
