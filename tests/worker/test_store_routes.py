"""The store of a worker as its API describes it: sizes, memory, referrers and adapters."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Manifest, Reference, mediatype
from clowder_aimage.oci.artifact import EMPTY
from tests.lora_file import write_lora
from tests.process import Aimage
from tests.store import copy_store
from tests.worker.conftest import LocalWorker


@pytest.fixture(scope="module")
def described(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker with ``tiny``, a quantized variant, adapters, and artifacts about it."""
    home = tmp_path_factory.mktemp("described")
    copy_store(stocked, home / "store")
    here = Aimage(home, home / "store")
    here("convert", "tiny", "tiny:int8", "--quantize", "int8", "--attach")
    file = write_lora(home / "a.safetensors", trigger_words="ink, wash", recommended_weight="0.8")
    here("create", "team/style", file, "--base", "tiny", "-q")
    here("create", "foreign", write_lora(home / "c.safetensors", width=64), "-q")
    write_lora(home / "loras" / "styles" / "ink.safetensors", 1)
    write_lora(home / "loras" / "wide.safetensors", width=64)
    attach(ImageLayout(home / "store"), "prints", mediatype.AIMAGE_PICTURE)
    attach(ImageLayout(home / "store"), "signed", "application/vnd.cncf.notary.signature")
    found = LocalWorker(here, "--lora-dir", home / "loras")
    yield found
    found.end()


def attach(layout: ImageLayout, name: str, artifact_type: str) -> None:
    """Store an artifact without layers whose subject is ``tiny``."""
    empty = Descriptor.of(mediatype.OCI_EMPTY, b"{}")
    subject = layout.resolve(Reference.parse("tiny"))
    value = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST, "layers": []}
    value |= {"artifactType": artifact_type, "config": empty.to_json()}
    bare = Descriptor(subject.media_type, subject.digest, subject.size)
    manifest = Manifest.build(value | {"subject": bare.to_json()})
    layout.push(empty, build_bytes_body(b"{}"))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse(name))


def names(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["names"][0]: one for one in found["data"]}


def test_sizes_are_those_of_the_command_line(described: LocalWorker) -> None:
    found = described.get("/v1/store")
    listed = json.loads(described.aimage("du", "--json").out)
    known = {share["digest"]: share for share in listed["manifests"]}
    for one in found["data"]:
        share = known[one["digest"]]
        assert (one["size"], one["unique"]) == (share["size"], share["unique"])
        assert one["shared"] == one["size"] - one["unique"]
        assert one["missing"] == {"blobs": 0, "size": 0}
    kinds = {name: one["kind"] for name, one in names(found).items()}
    assert kinds["tiny:latest"] == "image" and kinds["foreign:latest"] == "adapter"
    assert kinds["prints:latest"] == "other"
    whole, small = names(found)["tiny:latest"], names(found)["tiny:int8"]
    assert small["precision"] == "int8" and small["subject"] == whole["digest"]
    assert whole["defaults"] == small["defaults"] and whole["family"] == "z-image"
    # The statement of tiny:int8 has the empty config, as other attached artifacts.
    assert whole["shared"] == small["shared"] - len(EMPTY) > 0


def test_disk_and_memory_are_counted(described: LocalWorker) -> None:
    found = described.get("/v1/store")
    df = json.loads(described.aimage("df", "--json").out)[0]
    assert found["disk"]["store"] == df["size"] and found["disk"]["unneeded"] == 0
    assert 0 < found["disk"]["free"] < found["disk"]["total"]
    memory = found["memory"]
    assert memory["used"] == memory["planned"] == 0 < memory["budget"] and memory["models"] is None


def test_a_new_name_is_reported_at_once(described: LocalWorker) -> None:
    assert "other:latest" not in {
        n for one in described.get("/v1/store")["data"] for n in one["names"]
    }
    described.aimage("tag", "foreign", "other")
    assert names(described.get("/v1/store"))["foreign:latest"]["names"] == [
        "foreign:latest",
        "other:latest",
    ]


def test_a_store_that_does_not_exist_yet_is_empty(empty: LocalWorker) -> None:
    found = empty.get("/v1/store")
    assert found["data"] == [] and 0 < found["disk"]["free"] < found["disk"]["total"]
    assert empty.get("/v1/adapters")["data"] == []


def test_referrers_have_their_kinds(described: LocalWorker) -> None:
    found = described.get("/v1/referrers?model=tiny")
    assert found["subject"] == names(described.get("/v1/store"))["tiny:latest"]["digest"]
    kinds = {one["name"]: one["kind"] for one in found["data"]}
    assert kinds == {
        "tiny:int8": "variant",
        "team/style:latest": "adapter",
        "prints:latest": "pictures",
        "signed:latest": "signature",
    }
    types = {one["name"]: one["artifact_type"] for one in found["data"]}
    assert types["prints:latest"] == mediatype.AIMAGE_PICTURE
    assert described.get("/v1/referrers?model=foreign&registry=true")["data"] == []
    for query, status in ("", 400), ("?model=a%20b", 404), ("?model=absent", 404):
        with pytest.raises(urllib.error.HTTPError) as caught:
            described.get(f"/v1/referrers{query}")
        with caught.value as error:
            assert error.status == status


def test_adapters_say_whether_they_suit_a_model(described: LocalWorker) -> None:
    found = {one["id"]: one for one in described.get("/v1/adapters?model=tiny")["data"]}
    fits = {name: one["suitable"] for name, one in found.items()}
    assert fits["team/style:latest"] is True and fits["styles/ink"] is True
    assert fits["wide"] is False and fits["foreign:latest"] is False
    reason = found["wide"]["reason"]
    assert ("wide does not match" in reason and "[2, 64]" in reason) or "64" in reason
    assert str(described.store.parent) not in json.dumps(found)
    style = found["team/style:latest"]
    assert style["triggers"] == ["ink", "wash"] and style["weight"] == 0.8
    groups = {name: one["group"] for name, one in found.items()}
    assert groups["styles/ink"] == "styles" and groups["team/style:latest"] == "team"
    assert groups["wide"] == ""
    unknown = {one["suitable"] for one in described.get("/v1/adapters")["data"]}
    assert unknown == {None}
    with pytest.raises(urllib.error.HTTPError) as caught:
        described.get("/v1/adapters?model=absent")
    with caught.value as error:
        assert error.status == 404
