"""References: ``[registry/]repository[:tag][@digest]``.

Grammar of the repository and the tag: distribution-spec, "Pulling manifests". A first part that
contains ``.`` or ``:`` or is ``localhost`` is the registry's host, as in every OCI tool. Without a
host the name is local; it never refers to Docker Hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci.digest import PATTERN as DIGEST
from clowder_aimage.oci.digest import Digest

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
# A component that is not a host
_PLAIN = r"[a-z0-9]+(?:(?:_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
_IP = r"\[[0-9A-Fa-f]*[:.][0-9A-Fa-f:.]*\]"
_DOTTED = rf"{_LABEL}(?:\.{_LABEL})+"
_REGISTRY = re.compile(rf"(?:localhost|{_DOTTED}|{_IP})(?::(?:{_PORT}))?|{_LABEL}:(?:{_PORT})")
_LOOPBACK = re.compile(r"localhost|127(?:\.[0-9]{1,3}){3}|\[::1\]", re.IGNORECASE)
_HUB = re.compile(r"hf://|(?:https?://)?(?:hf\.co|huggingface\.co)/")
DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
# Registries that have repositories of one component below library/
_LIBRARIES = DOCKER_HUB | {"registry.ollama.ai"}
DEFAULT_TAG = "latest"
MAX_REPOSITORY = 255
# Longer than any valid reference.
_MAX_TEXT = 1024
_REMOTE = rf"(?:{_REGISTRY.pattern})/{_REPOSITORY.pattern}"
_NAME = rf"(?:{_REMOTE}|{_PLAIN}(?:/{_REPOSITORY.pattern})?|{_COMPONENT})"


def build_pattern(*, is_remote: bool = False, has_digest: bool = True) -> str:
    """Return the regular expression of references, for JSON Schema, which has no anchors.

    is_remote: with a registry. has_digest: a digest is allowed. The lengths are not part of it.
    """
    digest = f"(?:@(?:{DIGEST}))?" if has_digest else ""
    return f"(?:{_REMOTE if is_remote else _NAME})(?::{_TAG.pattern})?{digest}"


@dataclass(frozen=True, slots=True)
class Reference:
    """A name for a manifest; ``registry`` is None for a local one; a tag or a digest is set."""

    registry: str | None
    repository: str
    tag: str | None = None
    digest: Digest | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse a reference; the tag is ``latest`` if it has neither tag nor digest.

        Raises:
            UsageError: the text is invalid; the error suggests a correction if possible.
        """
        if len(text) > _MAX_TEXT:
            raise UsageError(f"invalid reference {text[:60]!r}...: it has {len(text)} characters")
        location, at, encoded = text.partition("@")
        digest = _parse_digest(text, encoded) if at else None
        registry, path = _split_registry(location)
        repository, colon, tag = path.partition(":")
        _check(text, registry, repository)
        if colon and _TAG.fullmatch(tag) is None:
            hint = "a tag is up to 128 letters, digits, '_', '.' and '-'"
            if "," in tag:
                base = f"{text.partition(':' + tag)[0]}:"
                hint = f"use several names: {base}{f' {base}'.join(tag.split(','))}"
            raise UsageError(f"invalid reference {text!r}: invalid tag {tag!r}", hint=hint)
        if not colon and digest is None:
            tag = DEFAULT_TAG
        return cls(registry, repository, tag or None, digest)

    @property
    def is_loopback(self) -> bool:
        """True if the registry is on this machine: there plain HTTP is the default."""
        if self.registry is None:
            return False
        host = re.sub(r":[0-9]+$", "", self.registry)
        return _LOOPBACK.fullmatch(host) is not None

    @property
    def canonical(self) -> Reference:
        """The reference with the repository's name in its registry.

        ``docker.io/alpine`` is ``docker.io/library/alpine``, as for docker and podman.
        """
        if self.registry not in _LIBRARIES or "/" in self.repository:
            return self
        return replace(self, repository=f"library/{self.repository}")

    @property
    def name(self) -> str:
        """Registry and repository, without tag and digest."""
        return f"{self.registry}/{self.repository}" if self.registry else self.repository

    @property
    def target(self) -> str:
        """The digest if there is one, else the tag."""
        return str(self.digest) if self.digest else (self.tag or DEFAULT_TAG)

    def with_digest(self, digest: Digest) -> Reference:
        """Return the same repository with only a digest."""
        return replace(self, tag=None, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.name}{tag}{digest}"


def _parse_digest(text: str, encoded: str) -> Digest:
    try:
        return Digest.parse(encoded)
    except FormatError as error:
        raise UsageError(f"invalid reference {text!r}: {error}", hint=error.hint) from None


def _split_registry(location: str) -> tuple[str | None, str]:
    # The rule of Docker and distribution/reference: "a/b" is a path, "a.b/c" has a host.
    host, slash, path = location.partition("/")
    if slash and ("." in host.strip(".") or ":" in host or host == "localhost"):
        return host, path
    return None, location


def _check(text: str, registry: str | None, repository: str) -> None:
    hub = _HUB.match(text)
    if hub and ("://" in hub[0] or repository != repository.lower()):
        raise UsageError(
            f"{text!r} is a model of the Hugging Face hub, and not a reference",
            remedy="create_from_hub",
            model=text[hub.end() :],
        )
    if registry is not None and _REGISTRY.fullmatch(registry) is None:
        scheme, separator, location = text.partition("://")
        hint = f"omit {scheme}://, as in {location}" if separator else None
        raise UsageError(f"invalid reference {text!r}: invalid host {registry!r}", hint=hint)
    if _REPOSITORY.fullmatch(repository) and len(repository) <= MAX_REPOSITORY:
        return
    hint = "names are lower-case letters and digits, with single '.', '_', '-' or '/' between them"
    is_hub_name = False
    lower = text.replace(repository, repository.lower(), 1)
    if _REPOSITORY.fullmatch(repository.lower()):
        hint = f"use lower case: {lower}"
        is_hub_name = registry is None and repository.count("/") == 1
    detail = "" if repository == text else f": invalid repository {repository!r}"
    raise UsageError(
        f"invalid reference {text!r}{detail}",
        hint=hint,
        remedy="lower_case_or_hub" if is_hub_name else "",
        name=lower,
        model=repository,
    )
