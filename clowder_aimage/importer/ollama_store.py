"""Import of models from the local store of ollama.

``manifests/HOST/NAMESPACE/MODEL/TAG`` are registry manifests, ``blobs/sha256-HEX`` their blobs
(ollama, docs/faq.md and server/modelpath.go). The manifest and its digest are unchanged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.gate import find_gate
from clowder_aimage.errors import FormatError, NotFoundError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.ingest import LinkedBlob
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Manifest, Reference

HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")


@dataclass(frozen=True, slots=True)
class AdoptedModel:
    """The manifest of a model, and counts of linked, copied and already existing blobs."""

    descriptor: Descriptor
    linked: int
    copied: int
    existing: int
    size: int

    @property
    def blobs(self) -> int:
        return self.linked + self.copied + self.existing


def adopt(
    store: ImageLayout,
    reference: Reference,
    directory: Path,
    name: str,
    *,
    on_plan: Callable[[int], None] = lambda _: None,
    on_done: Callable[[int], None] = lambda _: None,
) -> AdoptedModel:
    """Add ollama's model ``name`` in ``directory`` (``~/.ollama/models``) as ``reference``.

    Raises:
        NotFoundError: There is no such model, or one of its blobs is missing.
        FormatError, VerificationError: The manifest is invalid, or a blob is damaged.
        PolicyError: The policy does not accept it, by its name in ollama or by ``reference``.
        StoreError, NoSpaceError: The store cannot be written; copied blobs remain, no links.
    """
    try:
        path = find_manifest(directory, name)
        if path.stat().st_size > MAX_MANIFEST_SIZE:
            raise FormatError(f"{path} is too large for a manifest")
        manifest = Manifest.parse(path.read_bytes())
        blobs = {blob.digest: blob for blob in manifest.children}
        size = sum(blob.size for blob in blobs.values())
        on_plan(size)
        copied = existing = 0
        links: list[LinkedBlob] = []
        with store.lease(manifest.digest, *blobs), contextlib.ExitStack() as stack:
            origin = _build_origin(path.relative_to(directory / "manifests"))
            if (gate := find_gate()) is not None:
                # Before any blob; the policy reads the manifest in the store.
                store.push(manifest.descriptor, build_bytes_body(manifest.raw))
                gate.admit_named(store, manifest.descriptor, [origin, reference])
            for blob in blobs.values():
                if store.exists(blob):
                    existing += 1
                elif (link := store.adopt(_find_blob(directory, blob, name), blob)) is not None:
                    stack.callback(link.abort)
                    links.append(link)
                else:
                    copied += 1
                on_done(blob.size)
            # Links are committed after all copies: a failure before leaves none.
            for link in links:
                link.commit()
            store.add_origins(manifest.digest, [str(origin)])
            store.push(manifest.descriptor, build_bytes_body(manifest.raw), reference)
        return AdoptedModel(manifest.descriptor, len(links), copied, existing, size)
    except OSError as error:
        raise StoreError(
            f"cannot read {error.filename or directory}: {error.strerror or error}",
            hint="the store of ollama is often owned by a separate user",
        ) from None


def _build_origin(path: Path) -> Reference:
    """Return the name of a model in ollama's registry, by the path of its manifest."""
    host, *names, tag = path.parts
    # A file system without case finds other spellings.
    return Reference(host, "/".join(names).lower(), tag)


def find_manifest(directory: Path, name: str) -> Path:
    """Return the manifest file of ``[HOST/][NAMESPACE/]MODEL[:TAG]``.

    Raises NotFoundError.
    """
    manifests = directory / "manifests"
    if not manifests.is_dir():
        raise NotFoundError(
            f"{directory} is not an ollama store: it has no manifests",
            hint="the store is ~/.ollama/models, or the directory in OLLAMA_MODELS",
        )
    *prefix, model_and_tag = name.split("/")
    model, _, tag = model_and_tag.partition(":")
    prefix = [*[HOST, NAMESPACE][: max(0, 2 - len(prefix))], *prefix]
    parts = [*prefix, model, tag or TAG]
    path = manifests.joinpath(*parts)
    if not all(_SEGMENT.fullmatch(segment) for segment in parts) or not path.is_file():
        names = sorted(_list_names(manifests))
        raise NotFoundError(
            f"model {name[:200]} not found in {directory}",
            hint=f"available: {', '.join(names[:10])}" if names else "the store is empty",
        )
    return path


def _list_names(manifests: Path) -> list[str]:
    names = []
    for path in manifests.glob("*/*/*/*"):
        *prefix, model, tag = path.relative_to(manifests).parts
        usual = zip(prefix, (HOST, NAMESPACE), strict=True)
        shown = [segment for segment, default in usual if segment != default]
        names.append("/".join([*shown, f"{model}:{tag}"]))
    return names


def _find_blob(directory: Path, blob: Descriptor, name: str) -> Path:
    """Return ollama's path of a blob; older releases have a colon. Raises NotFoundError."""
    for separator in "-:":
        path = directory / "blobs" / f"{blob.digest.algorithm}{separator}{blob.digest.encoded}"
        if path.is_file():
            return path
    raise NotFoundError(
        f"blob {blob.digest} of {name} not found in {directory}", hint="pull it again with ollama"
    )
