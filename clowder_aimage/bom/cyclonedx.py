"""A bill of materials as JSON of CycloneDX 1.6, without times and random numbers."""

from __future__ import annotations

import uuid
from typing import Any

from clowder_aimage.bom.material import Ancestor, Component, Material, encode_bill
from clowder_aimage.dialect import Layer
from clowder_aimage.document.license_expression import License
from clowder_aimage.oci import Digest

MEDIA_TYPE = "application/vnd.cyclonedx+json"
FILE_NAME = "bom.cdx.json"
_MODEL = "machine-learning-model"
_ALGORITHMS = {"sha256": "SHA-256", "sha512": "SHA-512", "sha384": "SHA-384"}
_Json = dict[str, Any]


def encode_cyclonedx(material: Material) -> bytes:
    """Return the document. Its serial number follows from its content."""
    main = _build_model(material)
    base = material.base
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "aimage"}]},
            "component": main,
        },
        "components": [
            *(_build_component(component) for component in material.components if component.name),
            *(
                _build_file(layer)
                for component in material.components
                if not component.name
                for layer in component.layers
            ),
            *([] if base is None else [_build_base(base)]),
        ],
        "dependencies": _build_dependencies(material),
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, f"{material.digest} {Digest.of(encode_bill(document))}")
    return encode_bill({"serialNumber": f"urn:uuid:{number}", **document})


def _build_model(material: Material) -> _Json:
    parameters = {
        "task": material.task,
        "architectureFamily": material.family,
        "modelArchitecture": material.architecture,
    }
    stated = {key: value for key, value in parameters.items() if value}
    url = material.source_url
    value = {
        "type": _MODEL,
        "bom-ref": str(material.digest),
        "name": material.name,
        "version": str(material.digest),
        "description": material.description,
        "hashes": _build_hashes(material.digest),
        "licenses": _build_licenses(material),
        "modelCard": {"modelParameters": stated} if stated else {},
        "pedigree": {"ancestors": [_build_ancestor(each) for each in material.ancestors]},
        "externalReferences": [{"type": "distribution", "url": url}] if url else [],
        "properties": [
            {"name": f"aimage:{name}", "value": text} for name, text in material.properties
        ],
    }
    if not material.ancestors:
        del value["pedigree"]
    return {key: item for key, item in value.items() if item}


def _build_licenses(material: Material) -> list[_Json]:
    declared = {"acknowledgement": "declared"}
    expression = material.expression
    if isinstance(expression, License) and expression == License(expression.id):
        return [{"license": {"id": expression.id} | declared}]
    if expression is not None:
        return [{"expression": str(expression)} | declared]
    return [{"license": {"name": text} | declared} for text in material.licenses]


def _build_ancestor(ancestor: Ancestor) -> _Json:
    value: _Json = {"type": _MODEL, "name": ancestor.name or str(ancestor.digest)}
    if ancestor.digest is not None:
        value |= {"version": str(ancestor.digest), "hashes": _build_hashes(ancestor.digest)}
    if ancestor.operation:
        value["properties"] = [{"name": "aimage:operation", "value": ancestor.operation}]
    return value


def _build_component(component: Component) -> _Json:
    value: _Json = {
        "type": _MODEL if component.is_network else "data",
        "bom-ref": f"component:{component.name}",
        "name": component.name,
    }
    if component.is_network and component.class_name:
        value["modelCard"] = {"modelParameters": {"modelArchitecture": component.class_name}}
    return value | {"components": [_build_file(layer) for layer in component.layers]}


def _build_file(layer: Layer) -> _Json:
    facts = {"size": str(layer.descriptor.size), "dtype": layer.dtype}
    if layer.shape is not None:
        facts["shape"] = "x".join(map(str, layer.shape))
    return {
        "type": "file",
        "mime-type": layer.descriptor.media_type,
        "bom-ref": f"layer:{layer.name}",
        "name": layer.name,
        "hashes": _build_hashes(layer.descriptor.digest),
        "properties": [
            {"name": f"aimage:{name}", "value": text} for name, text in facts.items() if text
        ],
    }


def _build_base(digest: Digest) -> _Json:
    value = {"type": _MODEL, "bom-ref": f"base:{digest}", "name": str(digest)}
    return value | {"version": str(digest), "hashes": _build_hashes(digest)}


def _build_dependencies(material: Material) -> list[_Json]:
    parts = [f"component:{each.name}" for each in material.components if each.name]
    base = [] if material.base is None else [f"base:{material.base}"]
    return [{"ref": str(material.digest), "dependsOn": [*parts, *base]}]


def _build_hashes(digest: Digest) -> list[_Json]:
    name = _ALGORITHMS.get(digest.algorithm)
    return [] if name is None else [{"alg": name, "content": digest.encoded}]
