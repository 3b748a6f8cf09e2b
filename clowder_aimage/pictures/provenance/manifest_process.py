"""The process that reads the manifest of a picture file with C2PA's library.

``python -m clowder_aimage.pictures.provenance.manifest_process`` answers a request of
``manifest_report`` within limits of time and memory: the file may be of anybody. It sends nothing
over the network.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.model.bounded_process import RefusedError, answer
from clowder_aimage.oci import read_json
from clowder_aimage.pictures.provenance.claim import GENERATION

# A manifest store, decompressed; the library's report in JSON; the assertion of this project
_MAX_MANIFEST_MIB, _MAX_REPORT, _MAX_STATEMENT = 16, 16 << 20, 1 << 18
_MAX_TEXT = 300
_MAX_LISTED = 100
_SIZE = 4


def encode_request(data: bytes, kind: str, roots: str) -> bytes:
    """Return the request to read a file of a kind (png, jpeg, webp).

    ``roots`` are certificates in PEM that signers are compared with; empty for none.
    """
    head = f"{kind}\n{roots}".encode()
    return len(head).to_bytes(_SIZE, "big") + head + data


def _prepare() -> Callable[[bytes], bytes]:
    import c2pa  # noqa: F401 (before the limits are set)

    return answer_request


def answer_request(request: bytes) -> bytes:
    """Return the report about a file as JSON. Raises RefusedError."""
    size = _SIZE + int.from_bytes(request[:_SIZE], "big")
    kind, _, roots = request[_SIZE:size].decode().partition("\n")
    read = _read(io.BytesIO(memoryview(request)[size:]), kind, roots)
    return json.dumps(_summarize(read)).encode()


def _read(file: io.BytesIO, kind: str, roots: str) -> dict[str, Any]:
    """Return what the library says about a file. Raises RefusedError."""
    from c2pa import C2paError, Context, Reader

    settings = {
        "core": {
            "allowed_network_hosts": [],
            "decode_identity_assertions": False,
            "max_decompressed_manifest_size_in_mb": _MAX_MANIFEST_MIB,
        },
        "verify": {
            "remote_manifest_fetch": False,
            "ocsp_fetch": False,
            "verify_trust": bool(roots),
            "verify_timestamp_trust": bool(roots),
        },
        "trust": {"trust_anchors": roots} if roots else {},
    }
    try:
        context = Context.from_dict(settings)
    except C2paError:
        raise RefusedError("the roots are not certificates in PEM") from None
    try:
        text = Reader(f"image/{kind}", file, context=context).json()
    except C2paError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise RefusedError(" ".join(reason.split())[:_MAX_TEXT]) from None
    try:
        read = read_json(text.encode(), "its report", _MAX_REPORT)
    except FormatError as error:
        raise RefusedError(error.message) from None
    if not isinstance(read, dict) or not read.get("active_manifest"):
        raise RefusedError("it has no active manifest")
    return read


def _summarize(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the library's report that people and verbs need."""
    manifests = read["manifests"]
    active = manifests[read["active_manifest"]]
    results = read.get("validation_results") or {}
    failures = (results.get("activeManifest") or {}).get("failure") or []
    inputs = [
        _summarize_input(entry, manifests)
        for entry in (active.get("ingredients") or [])[:_MAX_LISTED]
    ]
    deltas = [
        failure
        for delta in results.get("ingredientDeltas") or []
        for failure in (delta.get("validationDeltas") or {}).get("failure") or []
    ]
    return {
        "state": read.get("validation_state"),
        "faults": _list_codes([*failures, *deltas]),
        **_describe_signature(active),
        "inputs": inputs,
        "generation": _find_generation(active),
    }


def _describe_signature(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the signer of a manifest, its program, and its source types."""
    signature = manifest.get("signature_info") or {}
    generators = manifest.get("claim_generator_info") or [{}]
    name, version = (str(generators[0].get(key) or "") for key in ("name", "version"))
    return {
        "signer": _shorten(signature.get("common_name") or signature.get("issuer")),
        "organization": _shorten(signature.get("issuer")),
        # The library writes Es256 for ES256
        "algorithm": re.sub(r"^(Es|Ps)(?=\d)", _raise_case, _shorten(signature.get("alg"))),
        "time": _shorten(signature.get("time")),
        "agent": _shorten(f"{name} {version}".strip() or manifest.get("claim_generator")),
        "actions": [*_iter_actions(manifest)][:_MAX_LISTED],
    }


def _iter_actions(manifest: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for assertion in manifest.get("assertions") or []:
        if str(assertion.get("label")).startswith("c2pa.actions"):
            for action in (assertion.get("data") or {}).get("actions") or []:
                source_type = _shorten(action.get("digitalSourceType"))
                yield {"action": _shorten(action.get("action")), "sourceType": source_type}


def _summarize_input(entry: Mapping[str, Any], manifests: Mapping[str, Any]) -> dict[str, Any]:
    manifest = manifests.get(str(entry.get("active_manifest"))) or {}
    results = (entry.get("validation_results") or {}).get("activeManifest") or {}
    summary = {
        "title": _shorten(entry.get("title")),
        "relationship": _shorten(entry.get("relationship")),
    }
    if not manifest:
        return summary
    faults = _list_codes(results.get("failure") or [])
    return {**summary, "faults": faults, **_describe_signature(manifest)}


def _find_generation(manifest: Mapping[str, Any]) -> object:
    """Return the assertion of this project, or None without one, or with one that is too long."""
    for assertion in manifest.get("assertions") or []:
        if assertion.get("label") == GENERATION:
            data = assertion.get("data")
            return data if len(json.dumps(data)) <= _MAX_STATEMENT else None
    return None


def _list_codes(failures: list[Mapping[str, Any]]) -> list[str]:
    codes = (_shorten(failure.get("code")) for failure in failures)
    return [*dict.fromkeys(codes)][:_MAX_LISTED]


def _raise_case(found: re.Match[str]) -> str:
    return found[0].upper()


def _shorten(value: object) -> str:
    return "" if value is None else str(value)[:_MAX_TEXT]


if __name__ == "__main__":
    answer(_prepare)
