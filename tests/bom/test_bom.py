"""Bills of materials, by the official schema of CycloneDX and the model of SPDX."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource
from spdx_python_model import load_data

from clowder_aimage.document.license_expression import list_identifiers, parse_license
from tests.abridged import abridge
from tests.lora_file import write_lora
from tests.process import Aimage


def load_schema(name: str) -> Any:
    path = files("cyclonedx.schema._res").joinpath(f"{name}.SNAPSHOT.schema.json")
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="session")
def cyclonedx() -> Any:
    """Return the validator of CycloneDX 1.6, with the schemas that it refers to."""
    parts = ("bom-1.6", "spdx", "jsf-0.82", "cryptography-defs")
    schemas = [load_schema(name) for name in parts]
    # They refer to each other by the names of their files.
    resources = [
        (f"http://cyclonedx.org/schema/{name}.SNAPSHOT.schema.json", Resource.from_contents(schema))
        for name, schema in zip(parts, schemas, strict=True)
    ]
    kind = jsonschema.Draft7Validator
    registry: Registry[Any] = Registry().with_resources(resources)
    return kind(schemas[0], registry=registry, format_checker=kind.FORMAT_CHECKER)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Aimage:
    """Return a store with a model, its variant, an adapter, and models of other licences."""
    home = tmp_path_factory.mktemp("stock")
    here, model = Aimage(home, home / "store"), abridge(tiny, home / "model")
    here(
        *("create", "model", model, "--license", "apache-2.0"),
        *("--source", "https://example.com/tiny", "-q"),
    )
    here("convert", "model", "model:int8", "--quantize", "int8", "--attach", "-q")
    here("create", "whole", tiny, "-q")
    here("create", "style", write_lora(home / "style.safetensors"), "--base", "whole", "-q")
    here("convert", "whole", "fused", "--lora", "style", "-q")
    here("create", "odd", model, "--license", "Some License, v1", "-q")
    here("create", "several", model, "--license", "MIT AND (gemma OR GPL-2.0+)", "-q")
    return here


NAMES = ("model", "model:int8", "style", "odd", "several")


def write(here: Aimage, name: str, form: str = "cyclonedx") -> Any:
    file = here.home / "bom.json"
    here("bom", name, "--format", form, "-o", file, "-q")
    return json.loads(file.read_bytes())


def list_components(bill: Any) -> list[Any]:
    found = [bill["metadata"]["component"]]
    for component in bill["components"]:
        found += [component, *component.get("components", ())]
    return found


def resolve(here: Aimage, name: str) -> str:
    digest: str = here("show", name, "--json").value["digest"]
    return digest


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_of_cyclonedx_accepts_each_bill(
    stock: Aimage, cyclonedx: Any, name: str
) -> None:
    bill = write(stock, name)
    assert [error.message for error in cyclonedx.iter_errors(bill)] == []
    references = [each["bom-ref"] for each in list_components(bill)]
    assert len(references) == len(set(references))
    assert set(bill["dependencies"][0]["dependsOn"]) < set(references)
    assert bill["metadata"]["component"]["bom-ref"] == resolve(stock, name)
    # All layers, with their digests
    layers = stock("show", name, "--json").value["layers"]
    files = [each for each in list_components(bill) if each["type"] == "file"]
    assert {(each["name"], "sha256:" + each["hashes"][0]["content"]) for each in files} == {
        (layer["name"], layer["digest"]) for layer in layers
    }


def test_the_schema_refuses_a_wrong_bill(stock: Aimage, cyclonedx: Any) -> None:
    bill = write(stock, "model")
    bill["metadata"]["component"]["licenses"] = [{"license": {"id": "apache-2.0"}}]
    assert list(cyclonedx.iter_errors(bill))
    bill = write(stock, "model")
    del bill["components"][0]["name"]
    assert list(cyclonedx.iter_errors(bill))


@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_spdx_accepts_each_bill(stock: Aimage, name: str) -> None:
    """The bindings check types, counts, values and patterns, as SPDX's SHACL states them."""
    document = write(stock, name, "spdx")
    _, found = load_data(document)
    (package,) = [
        each for each in found.foreach_type("ai_AIPackage") if str(each._id).endswith("#model")
    ]
    assert package.software_packageVersion == resolve(stock, name)
    layers = stock("show", name, "--json").value["layers"]
    hashes = {each.verifiedUsing[0].hashValue for each in found.foreach_type("software_File")}
    assert hashes == {layer["digest"].removeprefix("sha256:") for layer in layers}
    identifiers = [each["spdxId"] for each in document["@graph"] if "spdxId" in each]
    assert len(identifiers) == len(set(identifiers))
    used = {target for each in document["@graph"] for target in each.get("to", ())}
    assert used - set(identifiers) <= {
        "https://spdx.org/rdf/3.0.1/terms/ExpandedLicensing/NoAssertionLicense"
    }
    assert set(document["@graph"][1]["element"]) < set(identifiers)


def test_the_model_of_spdx_refuses_a_wrong_bill(stock: Aimage) -> None:
    for key, value in (("software_primaryPurpose", "network"), ("verifiedUsing", [{"type": "x"}])):
        document = write(stock, "model", "spdx")
        (package,) = [each for each in document["@graph"] if each["type"] == "ai_AIPackage"]
        package[key] = value
        with pytest.raises((ValueError, TypeError, KeyError)):
            load_data(document)


def test_the_list_of_licences_is_that_of_the_schema() -> None:
    known = set(load_schema("spdx")["enum"])
    listed = set(list_identifiers())
    assert listed <= known
    # The others are exceptions.
    assert all(parse_license(f"MIT WITH {name}").is_listed for name in known - listed)


def test_the_same_aimage_has_the_same_bytes(stock: Aimage, tmp_path: Path) -> None:
    stock("tag", "model", "registry.example.com/team/other:v2", "-q")
    for form in ("cyclonedx", "spdx"):
        first, second = tmp_path / f"a.{form}", tmp_path / f"b.{form}"
        stock("bom", "model", "--format", form, "-o", first, "-q")
        stock(*("bom", "registry.example.com/team/other:v2", "--format", form, "-o", second, "-q"))
        assert first.read_bytes() == second.read_bytes()
    assert write(stock, "model")["serialNumber"] != write(stock, "odd")["serialNumber"]


def test_licences_are_stated_as_each_form_wants_them(stock: Aimage) -> None:
    def read(name: str) -> Any:
        return write(stock, name)["metadata"]["component"]["licenses"]

    declared = {"acknowledgement": "declared"}
    assert read("model") == [{"license": {"id": "Apache-2.0"} | declared}]
    assert read("odd") == [{"license": {"name": "Some License, v1"} | declared}]
    text = "MIT AND (LicenseRef-gemma OR GPL-2.0-or-later)"
    assert read("several") == [{"expression": text} | declared]
    graph = write(stock, "several", "spdx")["@graph"]
    (expression,) = [each for each in graph if "simplelicensing_licenseExpression" in each]
    assert expression["simplelicensing_licenseExpression"] == text
    assert [each["key"] for each in expression["simplelicensing_customIdToUri"]] == [
        "LicenseRef-gemma"
    ]


def test_ancestors_and_bases_are_stated(stock: Aimage) -> None:
    model = resolve(stock, "model")
    variant = write(stock, "model:int8")["metadata"]["component"]
    (parent,) = variant["pedigree"]["ancestors"]
    assert (parent["version"], parent["properties"][0]["value"]) == (model, "quantize")
    fused = write(stock, "fused")["metadata"]["component"]["pedigree"]["ancestors"]
    assert [(each["version"], each["properties"][0]["value"]) for each in fused] == [
        (resolve(stock, "whole"), "fuse"),
        (resolve(stock, "style"), "adapter"),
    ]
    assert fused[1]["name"] == "style"
    adapter = write(stock, "style")
    assert adapter["dependencies"][0]["dependsOn"][-1] == f"base:{resolve(stock, 'whole')}"
    kinds = {
        each["relationshipType"]: each["to"]
        for each in write(stock, "model:int8", "spdx")["@graph"]
        if each["type"] == "Relationship"
    }
    assert kinds["descendantOf"][0].endswith("#ancestor-1")


def test_a_bill_is_attached_once(
    stock: Aimage, repository: str, registry: Any, tmp_path: Path
) -> None:
    name = f"{repository}:v1"
    stock("tag", "model", name, "-q")
    stock("push", name, "-q")
    for form in ("cyclonedx", "spdx"):
        mark = registry.mark()
        digests = {stock("bom", name, "--attach", "--format", form, "-q").line for _ in range(2)}
        assert len(digests) == 1
        assert registry.count(mark, repository)["GET blob"] <= 2  # the config, each time
        stock("attach", "--get", f"{repository}@{digests.pop()}", "-o", tmp_path / form, "-q")
        (file,) = (tmp_path / form).iterdir()
        stock("bom", "model", "--format", form, "-o", tmp_path / "bom.json", "-q")
        assert file.read_bytes() == (tmp_path / "bom.json").read_bytes()
    kinds = {each["artifactType"] for each in stock("referrers", name, "--json").value}
    assert kinds == {"application/vnd.cyclonedx+json", "application/spdx+json"}
    remote = tmp_path / "remote.json"
    stock("bom", name, "--remote", "--format", "spdx", "-o", remote, "-q")
    assert remote.read_bytes() == (tmp_path / "bom.json").read_bytes()


def test_a_bill_is_printed(stock: Aimage) -> None:
    bill = json.loads(stock.process("bom", "model").out)
    assert bill == write(stock, "model")
    assert stock("bom", "model", "--json").value["bom"] == bill


def test_mistakes_are_named(stock: Aimage) -> None:
    assert "require --remote" in stock("bom", "model", "--plain-http", code=2).err
    stock("bom", "missing", code=3)
