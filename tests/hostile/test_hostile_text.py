"""Texts of strangers in listings: each verb prints its own rows, without control characters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.oci import mediatype
from tests.hostile.hostile_world import World, described, digest_of, entry, plant, write_index
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.scripted_worker import ScriptedWorker, says

PLAIN = "plain"
EVIL = "x\nfake:latest  0123456789ab  1 B\r\x1b[2J\x9b2J\u2028\u2029\x85\u202e\u2066"
VERBS = ("ls", "ls -q", "show x", "show x --layers", "du", "df", "diff x y", "verify", "pin")


def filled(store: Path, text: str) -> None:
    """Write a store whose documents have ``text`` wherever a text may stand."""
    part = {
        "class": text,
        "dtype": text,
        "tensors": 1,
        "quantization": {"type": text, "tensors": 1},
    }
    config: dict[str, Any] = {
        "schemaVersion": 1,
        "components": {"vae": part, text: part},
        "adapter": {"type": text, "rank": text, "triggerWords": [text], "base": text},
        "adapters": {text: {"type": text, "weight": text}},
        "parameters": 5,
        "dtype": text,
    }
    for key in ("family", "pipeline", "format", "name", "architecture", "license", "source"):
        config[key] = text
    config |= {"quantization": text, "context": text, "formatVersion": text, "created": text}
    entries = []
    for name, data in (("x:latest", b"1"), ("y:latest", b"22"), (f"{text}:latest", b"1")):
        raw = json.dumps(config | {"license": f"{text} {len(data)}"}).encode()
        layer = described(data, mediatype.AIMAGE_FILE)
        manifest = {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_MANIFEST,
            "config": described(raw, mediatype.AIMAGE_CONFIG),
            "layers": [{**layer, "annotations": {mediatype.NAME: "vae/a.json", text: text}}],
            "annotations": {text: text * len(data)},
        }
        document = json.dumps(manifest).encode()
        for blob in (data, raw, document):
            plant(store, blob)
        entries.append(entry(document, name))
    write_index(store, *entries)


def check(out: str, clean: str) -> None:
    assert out.replace("\n", "").isprintable(), repr(out)
    assert out.count("\n") == clean.count("\n"), repr(out)


@pytest.mark.parametrize("verb", VERBS)
def test_a_text_makes_no_row(world: World, verb: str) -> None:
    outputs = []
    for text in (PLAIN, EVIL):
        filled(world.store, text)
        outputs.append(world.aimage(*verb.split()).out)
        as_json = world.aimage(*verb.split(), "--json").out
        assert as_json.count("\n") == 1 and as_json[:-1].isprintable()
    check(outputs[1], outputs[0])


@pytest.mark.parametrize("verb", ["referrers", "referrers -r"])
def test_a_referrer_is_one_row(world: World, verb: str) -> None:
    subject = digest_of(b"subject")

    def listing(text: str) -> bytes:
        one = {**described(b"1", mediatype.OCI_MANIFEST), "annotations": {text: text}}
        one["artifactType"] = f"application/{text}"
        return json.dumps({"schemaVersion": 2, "manifests": [one, one | {"size": 2}]}).encode()

    def answer(seen: Seen) -> Answer:
        headers = {"Content-Type": mediatype.OCI_INDEX}
        is_asked = seen.path.partition("?")[0].endswith(f"referrers/{subject}")
        return Answer(200, headers, listing(text)) if is_asked else Answer(404)

    outputs = []
    for text in (PLAIN, EVIL):  # noqa: B007 - used by answer
        with ScriptedRegistry(answer).running() as registry:
            name = f"{registry.host}/a/b@{subject}"
            outputs.append(world.aimage(*verb.split(), name).out)
            assert world.aimage(*verb.split(), name, "--json").out[:-1].isprintable()
    check(outputs[1], outputs[0])


@pytest.mark.parametrize(("verb", "path"), [("ps", "/api/ps"), ("ls --remote", "/api/tags")])
def test_a_model_of_a_worker_is_one_row(
    world: World, verb: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def models(text: str) -> Iterator[dict[str, Any]]:
        for size in (1, 2):
            details = {"family": text, "quantization_level": text, "device": text}
            yield {"name": text, "digest": f"sha256:{text}", "size": size, "details": details}

    outputs = []
    for text in (PLAIN, EVIL):
        listed = list(models(text))
        with ScriptedWorker(lambda _: says({"models": listed})).running() as worker:  # noqa: B023
            monkeypatch.setenv("AIMAGE_HOST", worker.host)
            outputs.append(world.aimage(*verb.split()).out)
            assert world.aimage(*verb.split(), "--json").out[:-1].isprintable()
    check(outputs[1], outputs[0])
