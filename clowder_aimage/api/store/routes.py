"""The content of a worker's store, the disk and the memory, and the referrers of an AImage."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from clowder_aimage.api.model_catalog import build_unknown_error
from clowder_aimage.api.model_description import ModelDescription
from clowder_aimage.api.model_kind import classify_model
from clowder_aimage.api.request_body import read_query
from clowder_aimage.api.service import Service
from clowder_aimage.api.store import operation
from clowder_aimage.api.store.operation import MemoryFacts, Referrer
from clowder_aimage.content.graph import build_referrer_entry
from clowder_aimage.engine import machine
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import AImageError, NotFoundError, RegistryError, UsageError
from clowder_aimage.http.api_error import ApiError, convert_registry_error
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN, Route, share
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.snapshot import find_descriptor
from clowder_aimage.layout.stored_aimage import interpret, read_manifest
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.registry import Repository
from clowder_aimage.registry.referrers import build_tag
from clowder_aimage.usage import NameUsage, measure_disk_usage, measure_usage

# Seconds for which a report of an unchanged store is repeated at least
_FRESH = 5.0
# A report is repeated for this number of times the duration of its reading
_SHARE = 20
# Words in the types of artifacts, and the kinds that they mean
_KINDS = {
    "signature": ("cosign", "notary", "sigstore", ".sig."),
    "sbom": ("spdx", "cyclonedx"),
    "attestation": ("in-toto", "aimage.derivation"),
}
COSIGN = "application/vnd.dev.cosign.artifact.sig.v1+json"


def build_routes(service: Service) -> list[Route]:
    """Return the routes that describe the store."""
    report = StoreReport(service)
    return [
        share(operation.DESCRIBE, report.answer),
        share(operation.REFERRERS, partial(_list_referrers, service)),
    ]


class StoreReport:
    """The figures of a store, cached until its names change or they are too old."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cached: tuple[Hashable, float, dict[str, Any]] = (None, 0.0, {})

    async def answer(self, _: Request) -> web.StreamResponse:
        """Respond with all manifests that have a name, the disk and the memory."""
        content = await run_io(self._read_cached)
        return web.json_response({"object": "store", **content, "memory": self._measure_memory()})

    def _read_cached(self) -> dict[str, Any]:
        store = self._service.store
        fingerprint, (cached_fingerprint, until, content) = (
            store.compute_fingerprint(),
            self._cached,
        )
        started = time.monotonic()
        if fingerprint is None or fingerprint != cached_fingerprint or started > until:
            content = self._read(store)
            ended = time.monotonic()
            self._cached = fingerprint, ended + max(_FRESH, _SHARE * (ended - started)), content
        space = store.measure_space()
        free = {"free": space and space.free, "total": space and space.total}
        return content | {"disk": content["disk"] | free}

    def _read(self, store: ImageLayout) -> dict[str, Any]:
        report = measure_usage(store, store.roots)
        disk_report = measure_disk_usage(ImageLayout(store.root))
        entries = {descriptor.digest: descriptor for _, descriptor in store.iter_entries()}
        named_shares = [share for share in report.shares if any(share.names)]
        data = [self._describe_entry(share, entries[share.digest]) for share in named_shares]
        disk = {
            "store": disk_report.size,
            "unneeded": disk_report.unneeded_size,
            "unfinished": disk_report.partial_size,
        }
        return {"data": data, "disk": disk}

    def _describe_entry(self, share: NameUsage, descriptor: Descriptor) -> dict[str, Any]:
        return {
            "names": [name for name in share.names if name],
            "digest": str(share.digest),
            "size": share.size,
            "unique": share.unique,
            "shared": share.shared,
            "missing": {"blobs": share.missing, "size": share.missing_size},
            **_collect_metadata(self._service.descriptions.find(descriptor)),
        }

    def _measure_memory(self) -> MemoryFacts:
        engine = self._service.engine
        runners = [model.runner for model in engine.list_loaded() if model.runner is not None]
        # A GPU with its own memory does not share it with language models on the CPU
        on_device = any(runner.is_discrete for runner in runners)
        used = sum(runner.size for runner in runners if runner.is_discrete == on_device)
        budget, available = engine.budget, machine.read_available_memory()
        if on_device:
            available = None if budget is None else max(0, budget - used)
        return {
            "budget": budget,
            "available": available,
            "used": used,
            "planned": engine.planned,
            "models": engine.limits.models,
        }


def _collect_metadata(description: ModelDescription | None) -> dict[str, Any]:
    """Return the metadata of an AImage; the kind is "other" without a readable config."""
    if description is None:
        return {"kind": "other", "family": None, "precision": None, "defaults": {}, "subject": None}
    return {
        "kind": description.kind,
        "family": description.family,
        "precision": description.precision,
        "defaults": description.stated,
        "subject": description.subject,
    }


async def _list_referrers(service: Service, request: Request) -> web.StreamResponse:
    """Respond with the artifacts whose subject is a model: in the store, and in its registry."""
    query = read_query(request, operation.ReferrersQuery)
    try:
        reference = Reference.parse(service.resolve_alias(query.model) or query.model)
    except UsageError:
        raise build_unknown_error(query.model) from None
    descriptor = await run_io(find_descriptor, service.store, reference)
    if descriptor is None:
        raise build_unknown_error(query.model)
    data = await run_io(lambda: list(_list_in_store(service.store, descriptor.digest)))
    if query.registry == "true":
        data += await _list_in_registry(service, request, reference, descriptor.digest, data)
    return web.json_response({"object": "list", "subject": str(descriptor.digest), "data": data})


def _list_in_store(store: ImageLayout, subject: Digest) -> Iterator[Referrer]:
    """Yield the referrers that have a name in the store; documents that are damaged have none."""
    for name, descriptor in sorted(store.list_tags(), key=lambda tag: tag[0]):
        try:
            manifest = read_manifest(store, descriptor)
        except AImageError:
            continue
        if manifest.subject is not None and manifest.subject.digest == subject:
            yield _describe(
                build_referrer_entry(descriptor, manifest),
                name,
                _classify_manifest(store, manifest),
            )


async def _list_in_registry(
    service: Service,
    request: Request,
    reference: Reference,
    subject: Digest,
    stored: list[Referrer],
) -> list[Referrer]:
    """Return the referrers in the registry of a name that the store does not have.

    Raises ApiError for a caller without the scope admin: the worker's credentials are used.
    """
    if request.get("scope") != ADMIN:
        raise ApiError(403, "asking a registry needs the scope admin", code="insufficient_scope")
    if reference.registry is None:
        return []
    connection, stored_digests = service.connection, {referrer["digest"] for referrer in stored}

    def list_descriptors() -> list[Descriptor]:
        with Repository(reference, connection) as repository:
            descriptors = repository.list_referrers(subject)
            try:
                # cosign stores a signature under a tag with the digest, not as a referrer
                signed = repository.resolve(
                    Reference(reference.registry, reference.repository, f"{build_tag(subject)}.sig")
                )
            except (NotFoundError, RegistryError):
                # Registries may refuse such a tag.
                return descriptors
            if signed.digest == subject:
                # GitLab takes such a tag for the digest.
                return descriptors
            return [*descriptors, replace(signed, extra={"artifactType": COSIGN})]

    try:
        descriptors = await run_io(list_descriptors)
    except AImageError as error:
        raise convert_registry_error(error) from None
    return [
        _describe(referrer, None, _classify_referrer(referrer))
        for referrer in descriptors
        if str(referrer.digest) not in stored_digests
    ]


def _describe(entry: Descriptor, name: str | None, kind: str) -> Referrer:
    return {
        "name": name,
        "digest": str(entry.digest),
        "kind": kind,
        "artifact_type": entry.extra.get("artifactType"),
        "size": entry.size,
        "annotations": dict(entry.annotations),
    }


def _classify_manifest(store: ImageLayout, manifest: Manifest) -> str:
    """Return the kind of a referrer in the store: an AImage is an adapter, or another word."""
    kind = _classify_referrer(build_referrer_entry(manifest.descriptor, manifest))
    if kind == "aimage":
        try:
            return classify_model(interpret(store, manifest.descriptor, manifest).aimage)
        except AImageError:
            return kind
    return kind


def _classify_referrer(entry: Descriptor) -> str:
    """Return the kind of a referrer by its artifact type: "pictures", "signature" and others."""
    artifact = str(entry.extra.get("artifactType") or "")
    if artifact == mediatype.AIMAGE_PICTURE:
        return "pictures"
    if artifact == mediatype.AIMAGE_MANIFEST:
        return "variant" if mediatype.VARIANT in entry.annotations else "aimage"
    kinds = (kind for kind, words in _KINDS.items() if any(word in artifact for word in words))
    return next(kinds, "other")
