"""Mirrors of a registry."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import urllib3

from clowder_aimage.errors import AImageError, VerificationError
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Digest
from clowder_aimage.registry.response import RegistryResponse

_DIGEST = re.compile(r"sha(?:256|512):[0-9a-f]+")


class MirrorSession(Protocol):
    """The requests to one mirror (``registry/session.py``)."""

    def url(self, path: str) -> str: ...

    def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None, read_timeout: float
    ) -> RegistryResponse: ...

    def close(self) -> None: ...


class Mirrors:
    """Other registries that are asked first for the content of a digest.

    One that fails or sends wrong content is not asked again; one where it is missing is. Mirrors
    receive no content, and no HEAD requests, which ask what the registry itself has.
    """

    def __init__(self, sessions: Sequence[MirrorSession], *, trust_tags: bool) -> None:
        self._sessions = sessions
        self._trusts_tags = trust_tags
        self._failed: set[MirrorSession] = set()
        self._sent: dict[str, set[MirrorSession]] = {}  # which of them sent what

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def avoid(self, target: str) -> None:
        """Exclude the mirrors that sent ``target``, whose content may still be right."""
        self._failed |= self._sent.get(target, set())

    def distrust(self, target: str) -> bool:
        """Exclude the mirrors that sent wrong content for ``target``; return whether any did."""
        senders = self._sent.pop(target, set())
        self._failed |= senders
        return bool(senders)

    def sent(self, target: str) -> bool:
        """Return whether a mirror that is not excluded sent ``target``."""
        return bool(self._sent.get(target))

    def request(
        self, method: str, path: str, headers: Mapping[str, str] | None, read_timeout: float
    ) -> RegistryResponse | None:
        """Return the response of the first mirror that has ``path``, or None."""
        kind, _, target = path.partition("/")
        if method not in ("GET", "HEAD"):
            self._trusts_tags = False  # we push: a mirror knows nothing of it yet
        if method != "GET":
            return None
        is_digest = _DIGEST.fullmatch(target) is not None
        if kind not in ("manifests", "blobs") or not (is_digest or self._trusts_tags):
            return None
        for session in self._sessions:
            if session in self._failed:
                continue
            try:
                url = session.url(path)
                response = session.request("GET", url, headers=headers, read_timeout=read_timeout)
                if response.status_code == 304:
                    return response
                if response.status_code in (200, 206):
                    self._sent.setdefault(target, set()).add(session)
                    return _checked(response, target) if kind == "manifests" else response
                response.finish()
                if response.status_code == 404:
                    continue
            except AImageError:
                pass  # where the session is closed, the registry's own says so
            self._failed.add(session)
        return None


def _checked(response: RegistryResponse, target: str) -> RegistryResponse:
    """Read a mirror's manifest and verify it where ``target`` is a digest.

    Raises:
        VerificationError: it has another digest.
    """
    raw = response.read(MAX_MANIFEST_SIZE)
    if _DIGEST.fullmatch(target):
        digest = Digest.parse(target)
        if Digest.of(raw, digest.algorithm) != digest:
            raise VerificationError(f"a mirror sent something else for {target}")
    body = urllib3.HTTPResponse(io.BytesIO(raw), headers=response.headers, preload_content=False)
    return replace(response, raw=body)
