"""The schemas: one loader for a checkout and a wheel, messages that name the place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import clowder_aimage
from clowder_aimage.errors import FormatError
from clowder_aimage.schema import load, validate

SCHEMAS = Path(__file__).parent.parent / "schemas"
GOOD = {
    "schemaVersion": 1,
    "family": "z-image",
    "components": {"vae": {"class": "AutoencoderKL", "dtype": "BF16", "size": 1}},
}


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.schema.json")), ids=lambda p: p.name)
def test_every_schema_is_one(path):
    schema = load(path.name.removesuffix(".schema.json"))
    assert schema == json.loads(path.read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)


def test_an_unknown_schema_is_a_mistake_of_ours():
    with pytest.raises(FileNotFoundError, match="no-such"):
        load("no-such")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"x-mine": [1]},
        {"created": "2026-01-31T12:00:00Z"},
        {"created": "2026-01-31T12:00:00.5+01:00"},
        {"defaults": {"width": 64, "height": 1024, "steps": 8, "guidance": 0}},
        {"components": {}},
    ],
    ids=str,
)
def test_good_configs(change):
    validate("aimage-config", GOOD | change)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schemaVersion": 2}, "schemaVersion"),
        ({"family": "Z Image"}, "family"),
        ({"parameters": -1}, "parameters"),
        ({"size": 1.5}, "size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"components": []}, "components"),
        ({"components": {"../x": {}}}, "components"),
        ({"components": {"vae": {"size": "1"}}}, "components/vae/size"),
        ({"defaults": {"width": 65}}, "defaults/width"),
        ({"defaults": {"steps": 0}}, "defaults/steps"),
        ({"license": ""}, "license"),
        ({"created": "yesterday"}, "created"),
        ({"created": "2026-01-31"}, "created"),
    ],
    ids=str,
)
def test_bad_configs_are_refused_with_the_place(change, where):
    with pytest.raises(FormatError, match="not a valid aimage-config") as caught:
        validate("aimage-config", GOOD | change)
    assert caught.value.message.endswith(f"(at {where})")


@pytest.mark.parametrize("document", [None, [], {}, "x", {"schemaVersion": 1}])
def test_what_is_no_config_at_all(document):
    with pytest.raises(FormatError, match=r"\(at the top\)"):
        validate("aimage-config", document)


def test_an_installed_package_brings_its_own_copy(tmp_path):
    """As the wheel lays it out: schemas/ inside the package, nothing beside it."""
    package = Path(clowder_aimage.__file__).parent
    installed = tmp_path / "clowder_aimage"
    installed.mkdir()
    for name in ("__init__.py", "schema.py", "errors.py"):
        shutil.copy(package / name, installed)
    shutil.copytree(SCHEMAS, installed / "schemas")
    code = "from clowder_aimage.schema import load; print(load('aimage-config')['title'])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "AImage config\n", done.stderr
