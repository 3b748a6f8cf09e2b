"""create, push, pull into another store, and run, with a real registry and child processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.process import Aimage, run
from tests.real_registry import RealRegistry

PROMPT = "a red fox"


def test_create_push_pull_run_replay(
    aimage: Callable[..., Aimage], tiny: Path, repository: str
) -> None:
    here, there, elsewhere = aimage("here"), aimage("there"), aimage("elsewhere")
    reference = f"{repository}:v1"
    created = here("create", reference, tiny).line
    assert here("push", reference).line == created
    assert there("pull", reference).line == created
    assert there("-q", "show", reference, "--json").value["digest"] == created
    picture = there("run", reference, PROMPT, "--seed", 42, "--steps", 1, "-o", "it.png").line
    assert elsewhere("replay", picture).line == "equal"  # after a pull
    (name,) = [row["reference"] for row in elsewhere("ls", "--json").value]
    assert name == f"{repository}@{created}"


def test_a_repeated_push_sends_nothing_and_a_repeated_pull_one_request(
    aimage: Callable[..., Aimage], llm: Path, registry: RealRegistry, repository: str
) -> None:
    here, there = aimage("here"), aimage("there")
    here("create", repository, llm)
    here("push", repository)
    mark = registry.mark()
    here("push", repository)
    again = registry.count(mark, repository)
    assert again["PUT blob"] == again["POST blob"] == 0
    assert again["PUT manifest"] == 1
    there("pull", repository)
    mark = registry.mark()
    there("pull", repository)
    assert registry.count(mark, repository) == {"GET manifest": 1}


@pytest.mark.integration
def test_models_share_common_blobs(
    aimage: Callable[..., Aimage],
    llm: Path,
    registry: RealRegistry,
    repository: str,
    tmp_path: Path,
) -> None:
    """A push of a second model of which two tensors differ sends only those."""
    here = aimage("here")
    other = tmp_path / "other"
    shutil.copytree(llm, other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + header])
    changed = [tensors["lm_head.weight"], tensors["model.norm.weight"]]
    for info in changed:
        data[8 + header + info["data_offsets"][0]] ^= 1
    weights.write_bytes(data)

    one = here("create", f"{repository}:one", llm, "--json").value
    blobs = len(list((here.store / "blobs" / "sha256").iterdir()))
    two = here("create", f"{repository}:two", other, "--json").value
    assert one["alreadyThere"]["layers"] == 0
    assert two["alreadyThere"]["layers"] == two["tensors"] + two["files"] - len(changed)
    added = len(list((here.store / "blobs" / "sha256").iterdir())) - blobs
    assert added == len(changed) + 1  # and a manifest; both share one config

    here("push", f"{repository}:one")
    mark = registry.mark()
    here("push", f"{repository}:two")
    assert registry.count(mark, repository)["PUT blob"] == len(changed)


@pytest.mark.integration
@pytest.mark.parametrize("dialect", ["ollama", "container"])
def test_every_dialect_round_trips(
    dialect: str, aimage: Callable[..., Aimage], llm: Path, repository: str
) -> None:
    here, there = aimage("here"), aimage("there")
    created = here("create", repository, llm).line
    pushed = here("push", repository, "--dialect", dialect).line
    assert pushed != created
    assert there("pull", repository).line == pushed
    shown = there("show", repository, "--json").value
    assert shown["dialect"] == dialect
    assert shown["config"] == here("show", repository, "--json").value["config"]
    assert shown["layers"] == here("show", repository, "--json").value["layers"]
    there("tag", repository, f"{repository}:back")
    assert there("push", f"{repository}:back", "--dialect", "clowder").line == created


def test_a_refused_manifest_falls_back_on_the_real_registry(
    aimage: Callable[..., Aimage], llm: Path, repository: str
) -> None:
    here, there = aimage("here"), aimage("there")
    custom = here("create", repository, llm, "--manifest-type", "custom").line
    refused = here("push", repository, "--no-fallback", code=1)
    assert "rejected this type of manifest" in refused.err
    assert "MANIFEST_INVALID" in refused.err
    pushed = here("push", repository)
    assert "trying the clowder dialect" in pushed.err
    assert here("show", repository, "--json").value["digest"] == custom  # the local tag is kept
    assert there("pull", repository).line == pushed.line != custom
    plain = aimage("plain")("create", "plain", llm).line
    assert pushed.line == plain


def test_a_push_by_digest_never_falls_back(
    aimage: Callable[..., Aimage], llm: Path, repository: str
) -> None:
    here = aimage("here")
    custom = here("create", repository, llm, "--manifest-type", "custom").line
    done = here("push", f"{repository}@{custom}", code=1)
    assert "rejected this type of manifest" in done.err
    assert "trying" not in done.err
    done = here("push", f"{repository}@{custom}", "--dialect", "clowder", code=2)
    assert "push by tag" in done.err


def test_pull_by_digest(aimage: Callable[..., Aimage], llm: Path, repository: str) -> None:
    here, there = aimage("here"), aimage("there")
    digest = here("create", repository, llm).line
    assert here("push", f"{repository}@{digest}").line == digest
    assert there("pull", f"{repository}@{digest}").line == digest
    assert there("show", f"{repository}@{digest}", "--json").value["digest"] == digest
    assert there("pull", f"{repository}:untold", code=3).out == ""


@pytest.mark.integration
def test_skopeo_reads_the_layout_and_the_registry(
    aimage: Callable[..., Aimage], llm: Path, repository: str, skopeo: str, tmp_path: Path
) -> None:
    here = aimage("here")
    digest = here("create", repository, llm).line
    here("push", repository)
    layout, remote = f"oci:{here.store}:{repository}:latest", f"docker://{repository}:latest"
    raw = _skopeo(skopeo, "inspect", "--raw", layout)
    assert raw == _skopeo(skopeo, "inspect", "--raw", "--tls-verify=false", remote)
    assert raw == (here.store / "blobs" / "sha256" / digest[7:]).read_bytes()
    _skopeo(skopeo, "copy", "--src-tls-verify=false", remote, f"oci:{tmp_path / 'copy'}:x:v1")
    copied = aimage("copy")
    assert copied("show", "x:v1", "--json").value["digest"] == digest
    copied("verify")


@pytest.mark.integration
def test_a_container_compressed_by_skopeo_is_restored(
    aimage: Callable[..., Aimage], llm: Path, repository: str, skopeo: str
) -> None:
    """skopeo gzips the layers and drops their annotations; the AImage is still restored."""
    here, there = aimage("here"), aimage("there")
    here("create", f"{repository}:dressed", llm, "--dialect", "container")
    created = aimage("plain")("create", repository, llm).line
    squeezed = aimage("squeezed")
    target = f"oci:{squeezed.store}:{repository}:squeezed"
    _skopeo(skopeo, "copy", f"oci:{here.store}:{repository}:dressed", target)
    manifest = json.loads(_skopeo(skopeo, "inspect", "--raw", target))
    assert all(layer["mediaType"].endswith("+gzip") for layer in manifest["layers"])
    assert all("annotations" not in layer for layer in manifest["layers"])
    pushed = squeezed("push", f"{repository}:squeezed").line
    assert there("pull", f"{repository}:squeezed").line == pushed
    assert there("push", f"{repository}:squeezed", "--dialect", "clowder").line == created
    there("verify")


def test_a_foreign_manifest_survives_byte_for_byte(
    aimage: Callable[..., Aimage], registry: RealRegistry, repository: str
) -> None:
    """Unknown fields, unknown types and unusual spacing are not normalised."""
    import requests

    base = f"http://{registry.host}/v2/{repository.partition('/')[2]}"
    config, layer = b'{"a": 1}', b"weights"
    descriptors = []
    for media_type, data in (("application/vnd.example.config", config), ("text/plain", layer)):
        digest = _upload(requests, base, data)
        descriptors.append(
            {"mediaType": media_type, "digest": digest, "size": len(data), "x-unknown": [1]}
        )
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": "application/vnd.example.thing",
            "config": descriptors[0],
            "layers": descriptors[1:],
            "com.example.unknown": {"é": None},
        },
        indent=3,
    ).encode()
    put = requests.put(
        f"{base}/manifests/foreign",
        data=manifest,
        headers={"Content-Type": "application/vnd.oci.image.manifest.v1+json"},
        timeout=60,
    )
    assert put.status_code == 201
    here = aimage("here")
    digest = here("pull", f"{repository}:foreign").line
    assert (here.store / "blobs" / "sha256" / digest[7:]).read_bytes() == manifest
    here("tag", f"{repository}:foreign", f"{repository}:again")
    assert here("push", f"{repository}:again").line == digest
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    got = requests.get(f"{base}/manifests/again", headers=accept, timeout=60)
    assert got.content == manifest
    assert "not an AImage" in here("run", f"{repository}:foreign", "x", code=5).err


def _upload(requests: ModuleType, base: str, data: bytes) -> str:
    import hashlib

    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    begun = requests.post(f"{base}/blobs/uploads/", timeout=60)
    location = begun.headers["Location"]
    joint = "&" if "?" in location else "?"
    done = requests.put(f"{location}{joint}digest={digest}", data=data, timeout=60)
    assert done.status_code == 201
    return digest


def _skopeo(skopeo: str, *arguments: str) -> Any:
    done = run([skopeo, *arguments], timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
