"""A bill of materials as JSON-LD of SPDX 3.0.1: the AI package, its files, licences and ancestors.

SPDX wants a time of creation. It is that of the model, if that states one, else the first second of
1970: the same AImage has the same document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from clowder_aimage.bom.material import Material, encode_bill
from clowder_aimage.dialect import Layer
from clowder_aimage.document.license_expression import build_reference, list_licenses
from clowder_aimage.oci import Digest

MEDIA_TYPE = "application/spdx+json"
FILE_NAME = "bom.spdx.json"
_CONTEXT = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
_NAMESPACE = "https://clowder.dev/spdx"
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
# The only license that says that none is stated
_NO_ASSERTION = "https://spdx.org/rdf/3.0.1/terms/ExpandedLicensing/NoAssertionLicense"
_ALGORITHMS = {"sha256", "sha384", "sha512"}
_Json = dict[str, Any]


def encode_spdx(material: Material) -> bytes:
    """Return the document."""
    return _Document(material).encode()


class _Document:
    """The elements of one document."""

    def __init__(self, material: Material) -> None:
        self._material, self._elements = material, list[_Json]()

    def encode(self) -> bytes:
        material = self._material
        document, agent = self._build_id("document"), self._add_agent()
        model = self._add_model("ai_AIPackage", "model", self._describe_model())
        self._relate(model, "contains", self._add_files())
        self._add_licenses(model)
        ancestors = [
            self._add_model("ai_AIPackage", f"ancestor-{number}", _describe(each.name, each.digest))
            for number, each in enumerate(material.ancestors, 1)
        ]
        self._relate(model, "descendantOf", ancestors)
        if material.base is not None:
            base = self._add_model("ai_AIPackage", "base", _describe("", material.base))
            self._relate(model, "dependsOn", [base])
        root = {
            "type": "SpdxDocument",
            "spdxId": document,
            "creationInfo": "_:creation",
            "profileConformance": ["core", "software", "simpleLicensing"],
            "rootElement": [model],
            "element": [each["spdxId"] for each in self._elements],
        }
        created = material.created if _UTC.fullmatch(material.created) else _UNKNOWN_TIME
        creation = {
            "type": "CreationInfo",
            "@id": "_:creation",
            "specVersion": "3.0.1",
            "createdBy": [agent],
            "created": created,
        }
        return encode_bill({"@context": _CONTEXT, "@graph": [creation, root, *self._elements]})

    def _build_id(self, name: str) -> str:
        return f"{_NAMESPACE}/{self._material.digest}#{name}"

    def _add(self, kind: str, name: str, facts: _Json) -> str:
        identifier = self._build_id(name)
        head = {"type": kind, "spdxId": identifier, "creationInfo": "_:creation"}
        self._elements.append(head | {key: value for key, value in facts.items() if value})
        return identifier

    def _add_agent(self) -> str:
        return self._add("SoftwareAgent", "aimage", {"name": "aimage"})

    def _add_model(self, kind: str, name: str, facts: _Json) -> str:
        return self._add(kind, name, facts | {"software_primaryPurpose": "model"})

    def _describe_model(self) -> _Json:
        material = self._material
        types = dict.fromkeys(filter(None, (material.family, material.architecture)))
        return _describe(material.name, material.digest) | {
            "description": material.description,
            "software_downloadLocation": material.source_url,
            "ai_domain": [material.task] if material.task else [],
            "ai_typeOfModel": list(types),
            "ai_hyperparameter": [
                {"type": "DictionaryEntry", "key": key, "value": value}
                for key, value in material.properties
            ],
        }

    def _add_files(self) -> list[str]:
        layers = (layer for each in self._material.components for layer in each.layers)
        return [self._add_file(number, layer) for number, layer in enumerate(layers, 1)]

    def _add_file(self, number: int, layer: Layer) -> str:
        facts = {
            "name": layer.name,
            "verifiedUsing": _build_hashes(layer.descriptor.digest),
            "contentType": layer.descriptor.media_type,
        }
        return self._add("software_File", f"file-{number}", facts)

    def _add_licenses(self, model: str) -> None:
        material = self._material
        if material.expression is None and not material.licenses:
            self._relate(model, "hasDeclaredLicense", [_NO_ASSERTION])
            return
        texts = []
        if material.expression is None:
            # A text that is no expression is a licence of its own.
            references = {build_reference(text): text for text in material.licenses}
            expression = " AND ".join(references)
        else:
            own = [each.id for each in list_licenses(material.expression) if not each.is_listed]
            references = {name: name for name in own}
            expression = str(material.expression)
        for number, (name, text) in enumerate(references.items(), 1):
            facts = {"name": name, "simplelicensing_licenseText": text}
            element = self._add("simplelicensing_SimpleLicensingText", f"text-{number}", facts)
            texts.append({"type": "DictionaryEntry", "key": name, "value": element})
        declared: _Json = {
            "simplelicensing_licenseExpression": expression,
            "simplelicensing_customIdToUri": texts,
        }
        element = self._add("simplelicensing_LicenseExpression", "license", declared)
        self._relate(model, "hasDeclaredLicense", [element])

    def _relate(self, origin: str, kind: str, targets: Sequence[str]) -> None:
        if targets:
            facts = {"from": origin, "relationshipType": kind, "to": list(targets)}
            self._add("Relationship", f"relation-{kind}", facts)


def _describe(name: str, digest: Digest | None) -> _Json:
    return {
        "name": name or str(digest),
        "software_packageVersion": "" if digest is None else str(digest),
        "verifiedUsing": [] if digest is None else _build_hashes(digest),
    }


def _build_hashes(digest: Digest) -> list[_Json]:
    if digest.algorithm not in _ALGORITHMS:
        return []
    return [{"type": "Hash", "algorithm": digest.algorithm, "hashValue": digest.encoded}]
