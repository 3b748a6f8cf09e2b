"""``aimage validate``: list all violations of a document with their positions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.tensor import encode_header
from tests.process import PROGRAM, Aimage, Done, run
from tests.store import unshare
from tests.vectors.vector import HERE

CONFIG = b'{"schemaVersion":1,"components":{"vae":{}}}'
FILE = Layer(Descriptor.of(mediatype.AIMAGE_FILE, b"{}"), "vae/config.json")
MEDIA_TYPES = {"clowder": mediatype.AIMAGE_CONFIG, "container": mediatype.OCI_CONFIG}


@pytest.fixture
def here(aimage: Callable[..., Aimage]) -> Aimage:
    return aimage()


def document(here: Aimage, name: str, text: str) -> Path:
    path = here.home / name
    path.write_text(text)
    return path


def named(here: Aimage, name: str, manifest: Any, *blobs: bytes) -> Descriptor:
    """Return a store in which ``name`` is a manifest (bytes or a value) with those blobs."""
    data = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    layout = ImageLayout(here.store)
    for blob in blobs:
        layout.push(Descriptor.of("application/vnd.example", blob), build_bytes_body(blob))
    content = Descriptor.of(json.loads(data)["mediaType"], data)
    layout.push(content, build_bytes_body(data), Reference.parse(name))
    return content


def written(
    dialect: str = "clowder", config: bytes = CONFIG, layers: tuple[Layer, ...] = (FILE,)
) -> tuple[Any, bytes]:
    manifest, config = DIALECTS[dialect].write(AImage(config, layers))
    return json.loads(manifest.raw), config


def pointers(done: Done) -> list[Any]:
    return [one["pointer"] for one in done.value["violations"]]


# -- files


@pytest.mark.parametrize(
    ("text", "violations"),
    [
        ('{"worker": {"queue": 1}}', []),
        ('{"$schema": "https://example.com/x", "registry": {"adr": "x"}}', ["/registry"]),
        ('{"node": {"low": 101}, "worker": {}}', ["/node/low"]),
    ],
)
def test_a_configuration_is_known_by_its_sections(
    here: Aimage, text: str, violations: list[str]
) -> None:
    done = here("validate", "--json", document(here, "x.json", text), code=5 if violations else 0)
    assert (done.value["schema"], pointers(done)) == ("config", violations)


def test_a_valid_file_passes(here: Aimage) -> None:
    done = here("validate", HERE / "oci-manifest.json")
    assert (done.line, done.err) == (f"{HERE / 'oci-manifest.json'}: valid oci-manifest", "")


def test_all_violations_are_listed_with_line_and_path(here: Aimage) -> None:
    path = document(
        here,
        "config.json",
        '{\n "schemaVersion": 1,\n "size": -1,\n "components": {\n'
        '  "vae": {"tensors": "3"},\n  "a b": {}\n },\n "context": 0\n}\n',
    )
    done = here("validate", path, code=5)
    assert [line.partition(": ")[0] for line in done.out.splitlines()] == [
        f"{path}:3:2",
        f"{path}:5:11",
        f"{path}:6:3",
        f"{path}:8:2",
    ]
    assert [line.split(": ")[1] for line in done.out.splitlines()] == [
        "/size",
        "/components/vae/tensors",
        "/components/a b",
        "/context",
    ]
    assert done.err == ""


def test_violations_as_json(here: Aimage) -> None:
    path = document(here, "c.json", '{"schemaVersion": 1, "components": {},\n "context": 0}')
    done = here("validate", path, "--json", code=5)
    assert done.value == {
        "valid": False,
        "document": str(path),
        "schema": "aimage-config",
        "violations": [
            {
                "document": str(path),
                "schema": "aimage-config",
                "pointer": "/context",
                "line": 2,
                "column": 2,
                "message": "0 is less than the minimum of 1",
            }
        ],
        "documents": [{"document": str(path), "schema": "aimage-config", "valid": False}],
    }
    good = here("--json", "validate", HERE / "oci-index.json").value
    assert (good["valid"], good["schema"], good["violations"]) == (True, "oci-index", [])


def test_stdin_is_validated(here: Aimage) -> None:
    done = here("validate", "-", stdin='{"schemaVersion":1,\n"components":[]}', code=5)
    assert done.line == "stdin:2:1: /components: [] is not of type 'object'"
    assert here("validate", "-", stdin=CONFIG.decode()).line == "stdin: valid aimage-config"


def test_a_file_that_is_not_json_fails(here: Aimage) -> None:
    path = document(here, "it.json", '{\n  "a": 1\n  "b": 2\n}')
    done = here("validate", path, code=5)
    assert (done.line, done.err) == (f"{path}:3:3: not valid JSON: Expecting ',' delimiter", "")


def test_a_duplicate_key_is_located(here: Aimage) -> None:
    text = (
        '{"schemaVersion": 1,\n "components": {"vae": {"size": 1,\n "size": 2}},\n'
        ' "components": {}}'
    )
    path = document(here, "it.json", text)
    assert here("validate", path, code=5).out.splitlines() == [
        f"{path}:3:2: /components/vae/size: duplicate key",
        f"{path}:4:2: /components: duplicate key",
    ]


def test_a_pointer_is_escaped(here: Aimage) -> None:
    path = document(here, "it.json", '{"schemaVersion":1,"components":{"a/b~c":{}}}')
    assert pointers(here("validate", path, "--json", code=5)) == ["/components/a~1b~0c"]


def test_two_layers_of_one_name_are_reported(here: Aimage) -> None:
    manifest, _ = written(layers=(FILE, Layer(FILE.descriptor, "vae/other.json")))
    manifest["layers"][1]["annotations"][mediatype.NAME] = FILE.name
    done = here("validate", document(here, "m.json", json.dumps(manifest)), code=5)
    assert f"/layers/1/annotations/{mediatype.NAME}: duplicate layer name" in done.line
    assert "/layers/0/" in done.line


def test_the_schema_can_be_given(here: Aimage) -> None:
    path = document(here, "it.json", "{}")
    done = here("validate", path, code=2)
    assert (done.out, "matches no known schema" in done.err) == ("", True)
    assert "--schema NAME" in done.err and "aimage-config" in done.err
    assert here("validate", path, "--schema", "config").line == f"{path}: valid config"
    assert len(here("validate", path, "--schema", "aimage-config", code=5).out.splitlines()) == 2


def test_an_unknown_schema_fails(here: Aimage) -> None:
    path = document(here, "it.json", "{}")
    for name in ("nonsense", "../config", ""):
        done = here("validate", path, "--schema", name, code=2)
        assert done.out == ""
    assert (
        "schema not found: ../config" in here("validate", path, "--schema", "../config", code=2).err
    )


def test_the_schema_of_a_damaged_document_is_detected(here: Aimage) -> None:
    """The violation is reported rather than an unknown document."""
    manifest, _ = written()
    for key, new in (("mediaType", "application/wrong"), ("artifactType", 7), ("config", None)):
        path = document(here, "m.json", json.dumps(manifest | {key: new}))
        done = here("validate", path, "--json", code=5)
        assert done.value["schema"] == "aimage-manifest"
        assert pointers(done) == [f"/{key}"]


def test_an_oversized_manifest_is_reported(here: Aimage) -> None:
    manifest, _ = written()
    manifest["x"] = "x" * (4 << 20)
    done = here("validate", document(here, "m.json", json.dumps(manifest)), code=5)
    assert "registries accept at most 4194304" in done.line


def test_an_endless_file_is_not_read_in_full(here: Aimage) -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("no /dev/zero")
    assert "too large for a document" in here("validate", "/dev/zero", code=5).line


def test_a_named_pipe_is_validated(here: Aimage) -> None:
    command = " ".join([*PROGRAM, "validate", "<(cat oci.json)"])
    document(here, "oci.json", (HERE / "oci-index.json").read_text())
    done = run(
        ["bash", "-c", command],
        cwd=here.home,
        env=here.env(),
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(": valid oci-index\n")


# -- safetensors


def test_a_safetensors_file_passes(here: Aimage, tiny: Path) -> None:
    (path,) = (tiny / "vae").glob("*.safetensors")
    assert here("validate", path).line == f"{path}: valid safetensors"
    blob = here.home / "blob"  # the layer's name is not used
    blob.write_bytes(path.read_bytes())
    assert here("validate", blob, "--json").value["schema"] == "safetensors"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"\x10" + b"\0" * 7 + b"{}", "header length of 16 bytes"),
        (encode_header([("a", "F32", [2])]) + b"1234", "the tensors have 8 bytes"),
    ],
)
def test_a_damaged_safetensors_file_fails(here: Aimage, data: bytes, why: str) -> None:
    path = here.home / "model.safetensors"
    path.write_bytes(data)
    done = here("validate", path, code=5)
    assert done.line.startswith(f"{path}: ") and why in done.line


# -- names


def test_a_name_is_validated_with_its_config(here: Aimage, tiny: Path) -> None:
    here("create", "tiny", tiny)
    done = here("validate", "tiny", "--json")
    assert done.value["document"] == "tiny:latest"
    assert [one["schema"] for one in done.value["documents"]] == [
        "aimage-manifest",
        "aimage-config",
    ]
    assert len(here("validate", "tiny").out.splitlines()) == 2


def test_a_violation_in_a_config_is_reported_with_its_digest(here: Aimage) -> None:
    manifest, config = written(config=b'{"schemaVersion":1,"components":{},"context":0}')
    named(here, "bad", manifest, config)
    done = here("validate", "bad", code=5)
    assert done.line == f"{manifest['config']['digest']}: /context: 0 is less than the minimum of 1"


@pytest.mark.parametrize("dialect", ["ollama", "container"])
def test_an_aimage_config_embedded_in_another_is_validated(here: Aimage, dialect: str) -> None:
    manifest, config = written(dialect, b'{"schemaVersion":1,"components":{},"context":0}')
    named(here, "bad", manifest, config)
    done = here("validate", "bad", "--json", code=5)
    (wrong,) = done.value["violations"]
    assert (wrong["schema"], wrong["pointer"]) == ("aimage-config", "/context")
    assert wrong["document"] == f"vnd.clowder.aimage.config in {manifest['config']['digest']}"


def test_a_container_with_layers_missing_in_its_config_fails(here: Aimage) -> None:
    manifest, config = written("container")
    manifest["layers"][0]["digest"] = "sha256:" + "0" * 64
    manifest["layers"].append(manifest["layers"][0])
    manifest["layers"][1] = manifest["layers"][1] | {"annotations": {}}
    named(here, "bad", manifest, config)
    assert "must have one diff_id for each layer" in here("validate", "bad", code=5).line


def test_a_foreign_container_image_passes(here: Aimage) -> None:
    config = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
    manifest = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": Descriptor.of(mediatype.OCI_CONFIG, config).to_json(),
        "layers": [],
    }
    named(here, "image", manifest, config)
    lines = here("validate", "image").out.splitlines()
    assert lines[0] == "image:latest: valid oci-manifest"
    assert "not checked, no schema for application/vnd.oci.image.config" in lines[1]


def test_a_config_of_another_size_and_digest_fails(here: Aimage) -> None:
    manifest, config = written()
    named(here, "bad", manifest, config)
    path = here.store / "blobs" / manifest["config"]["digest"].replace(":", "/")
    unshare(path)
    path.write_bytes(config + b" ")
    assert pointers(here("validate", "bad", "--json", code=5)) == ["/config/size", "/config/digest"]


def test_a_damaged_manifest_in_the_store_fails(here: Aimage) -> None:
    manifest, config = written()
    content = named(here, "bad", manifest, config)
    path = here.store / "blobs" / str(content.digest).replace(":", "/")
    unshare(path)
    path.write_bytes(path.read_bytes().replace(b'"size": 2', b'"size":-2'))
    done = here("validate", "bad", "--json", code=5)
    assert pointers(done) == ["/layers/0/size", ""]
    assert "digest mismatch" in done.value["violations"][1]["message"]


def test_an_index_is_validated_with_its_manifests(here: Aimage) -> None:
    good, config = written()
    bad, other = written(config=b'{"schemaVersion":1,"components":{},"size":-1}')
    blobs = [json.dumps(value).encode() for value in (good, bad)]
    entries = [Descriptor.of(mediatype.OCI_MANIFEST, blob).to_json() for blob in blobs]
    absent = Descriptor.of(mediatype.OCI_MANIFEST, b"elsewhere").to_json()
    index = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_INDEX,
        "manifests": [*entries, absent, entries[0]],
    }
    named(here, "both", index, config, other, *blobs)
    done = here("validate", "both", "--json", code=5)
    (wrong,) = done.value["violations"]
    assert (wrong["document"], wrong["pointer"]) == (bad["config"]["digest"], "/size")
    seen = [(one["document"], one["schema"], one.get("note")) for one in done.value["documents"]]
    assert seen == [
        ("both:latest", "oci-index", None),
        (entries[0]["digest"], "aimage-manifest", None),
        (entries[1]["digest"], "aimage-manifest", None),
        (absent["digest"], "oci-manifest", "not found in the store"),
        (good["config"]["digest"], "aimage-config", None),
        (bad["config"]["digest"], "aimage-config", None),
    ]


def test_an_index_that_references_itself_terminates(here: Aimage) -> None:
    """No digest can do so, but a damaged blob may."""
    index = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}
    content = named(here, "loop", index)
    path = here.store / "blobs" / str(content.digest).replace(":", "/")
    unshare(path)
    path.write_text(json.dumps(index | {"manifests": [content.to_json()]}))
    done = here("validate", "loop", "--json", code=5)
    assert pointers(done) == ["", ""]  # the size and the digest
    assert len(done.value["documents"]) == 1


def test_an_unknown_name_fails(here: Aimage) -> None:
    done = here("validate", "nothing", code=3)
    assert (done.out, "nothing:latest not found in the store" in done.err) == ("", True)
    assert "file not found: nothing" in done.err
    for what in ("nothing.json", "./nothing", "/no/such/place"):
        done = here("validate", what, code=3)
        assert f"file not found: {what}" in done.err


def test_a_file_takes_precedence_over_a_name(here: Aimage, tiny: Path) -> None:
    here("create", "tiny", tiny)
    document(here, "tiny", CONFIG.decode())
    assert here("validate", "tiny").line == "tiny: valid aimage-config"
    assert here("validate", "tiny:latest").out.startswith("tiny:latest: valid aimage-manifest")


def test_schema_is_refused_with_a_name(here: Aimage, tiny: Path) -> None:
    here("create", "tiny", tiny)
    assert "--schema" in here("validate", "tiny", "--schema", "oci-manifest", code=2).err


# -- layouts


def test_a_layout_passes(here: Aimage, tiny: Path) -> None:
    here("create", "tiny", tiny)
    lines = here("validate", here.store).out.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [
        "oci-layout",
        "oci-index",
        "aimage-manifest",
        "aimage-config",
    ]
    assert lines[1] == f"{here.store}/index.json: valid oci-index"
    assert f"{here.store}/blobs/sha256/" in lines[2]


def test_a_violation_in_the_index_is_located(here: Aimage) -> None:
    manifest, config = written()
    content = named(here, "tiny", manifest, config)
    path = here.store / "index.json"
    index = json.loads(path.read_bytes())
    index["manifests"][0]["size"] += 1
    index["manifests"].append(index["manifests"][0] | {"size": -1})
    path.write_text(json.dumps(index, indent=1))
    done = here("validate", here.store, "--json", code=5)
    assert pointers(done) == ["/manifests/1/size", "/manifests/0/size"]
    first = done.value["violations"][0]
    assert path.read_text().splitlines()[first["line"] - 1].strip() == '"size": -1,'
    assert str(content.digest.encoded) in done.value["documents"][2]["document"]


def test_a_layout_without_its_files_fails(here: Aimage) -> None:
    place = here.home / "layout"
    place.mkdir()
    (place / "index.json").write_text("{")
    lines = here("validate", place, code=5).out.splitlines()
    assert lines[0] == f"{place}/oci-layout: missing file, which an image layout requires"
    assert lines[1].startswith(f"{place}/index.json:1:2: not valid JSON")


def test_a_layout_with_a_named_pipe_does_not_block(here: Aimage) -> None:
    """The pipe has no writer: reading it would block forever."""
    place = here.home / "layout"
    place.mkdir()
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    os.mkfifo(place / "index.json")
    assert "index.json: missing file" in here("validate", place, code=5).line


def test_an_oversized_config_is_not_read(here: Aimage) -> None:
    manifest, _ = written()
    manifest["config"]["size"] = 1 << 40
    named(here, "large", manifest)
    assert "not checked, too large" in here("validate", "large").out


def test_a_directory_that_is_not_a_layout_fails(here: Aimage, tiny: Path) -> None:
    done = here("validate", tiny, code=2)
    assert "is a directory, but not an OCI image layout" in done.err


def test_validate_writes_nothing(here: Aimage) -> None:
    manifest, config = written()
    named(here, "tiny", manifest, config)
    before = sorted((path, path.stat().st_mtime_ns) for path in here.store.rglob("*"))
    here("validate", "tiny")
    here("validate", here.store)
    assert sorted((path, path.stat().st_mtime_ns) for path in here.store.rglob("*")) == before


def test_control_characters_of_a_document_are_not_printed(here: Aimage) -> None:
    path = document(
        here, "it.json", json.dumps({"schemaVersion": 1, "components": {"\x1b[2J": {}}})
    )
    assert "\x1b" not in here("validate", path, code=5).out


def test_help_does_not_import_jsonschema(here: Aimage) -> None:
    code = (
        "import sys, clowder_aimage.cli.verbs.validate as v, clowder_aimage.validate;"
        "print([m for m in sys.modules if m.startswith(('jsonschema', 'requests', 'mlx'))])"
    )
    done = run([sys.executable, "-c", code], env=here.env(), text=True)
    assert done.stdout == "[]\n", done.stderr
