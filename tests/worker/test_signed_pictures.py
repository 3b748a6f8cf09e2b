"""Pictures that a worker signs, in every format, and its key, which nobody sees."""

from __future__ import annotations

import base64
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")
pytest.importorskip("c2pa", reason="c2pa is not installed")

from clowder_aimage.pictures.provenance.claim import GENERATION, restore_facts
from clowder_aimage.pictures.provenance.marking import read_mark
from tests.provenance.signing import authority, get_active, get_assertion, get_store, read_own
from tests.worker.conftest import LocalWorker, answer_to


def draw(url: str, **fields: Any) -> bytes:
    body = {"model": "tiny", "prompt": "a dog", "steps": 1, "seed": 2**63 + 7} | fields
    asked = urllib.request.Request(f"{url}/v1/images/generations", json.dumps(body).encode())
    status, _, answer = answer_to(asked)
    assert status == 200, answer
    return base64.b64decode(json.loads(answer)["data"][0]["b64_json"])


def configure(directory: Path, **changed: object) -> str:
    settings = authority().issue(directory)
    section = {"chain": settings.chain, "key": settings.key} | changed
    file = directory / "config.json"
    file.write_text(json.dumps({"picture": {"signing": section}}))
    return str(file)


@pytest.mark.integration
def test_a_worker_signs_pictures_and_shows_no_key(worker: LocalWorker, tmp_path: Path) -> None:
    config = configure(tmp_path)
    secrets = (tmp_path / "signer.key").read_text().splitlines()[1:-1]
    signing = worker.launch("--log-level", "debug", AIMAGE_CONFIG=config)
    for kind in ("png", "jpeg", "webp"):
        made = draw(signing.url, output_format=kind)
        found = read_own(made, kind, authority().pem)
        assert found["validation_state"] == "Trusted"
        facts = restore_facts(get_assertion(get_active(found), GENERATION))
        assert (facts["prompt"], facts["seed"]) == ("a dog", 2**63 + 7)
        assert read_mark(made, "it") is not None
    silent = get_active(read_own(draw(signing.url, png_facts=False), "png"))
    assert [one["label"] for one in silent["assertions"]] == ["c2pa.actions.v2"]
    seen = [
        urllib.request.urlopen(signing.url + path, timeout=30).read().decode()
        for path in ("/", "/metrics", "/openapi.json", "/v1/models")
    ]
    signed = draw(signing.url)
    fields = {"image": f"data:;base64,{base64.b64encode(signed).decode()}", "strength": 0.9}
    kept = read_own(draw(signing.url, **fields), "png")
    assert len(kept["manifests"]) == 2
    _, log = signing.stop()
    assert not [part for part in secrets if any(part in text for text in (*seen, log))]
    # A worker without the key says that an edit loses the signature
    body = {"model": "tiny", "prompt": "a dog", "steps": 1, **fields}
    asked = urllib.request.Request(f"{worker.url}/v1/images/generations", json.dumps(body).encode())
    _, _, answer = answer_to(asked)
    sentences = json.loads(answer)["warnings"]
    assert [one for one in sentences if "signed manifest (C2PA), which the result does" in one]
    assert not get_store(draw(worker.url))


def test_a_worker_does_not_start_with_a_key_that_cannot_sign(
    worker: LocalWorker, tmp_path: Path
) -> None:
    config = configure(tmp_path)
    (tmp_path / "signer.key").write_text("no key")
    here = worker.aimage
    here.environment["AIMAGE_CONFIG"] = config
    try:
        done = here.process("serve", "--addr", "127.0.0.1:0", code=2)
    finally:
        del here.environment["AIMAGE_CONFIG"]
    assert "signer.key is not a private key that can be used" in done.err
