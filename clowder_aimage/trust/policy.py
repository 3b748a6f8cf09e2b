"""The policy of a user or a machine: which signers and licences the AImages of repositories need.

A document has rules in order. Of those with signers, the first decides whose pattern matches; a
machine's rules come before those of its users. Of those with licences, the first decides, too, or
else the licences of the document; those of the machine and of its user must all be met. A document
that is unreadable, empty or contradictory is an error, so that nothing is accepted by mistake.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DOCKER_HUB
from clowder_aimage.trust.acceptance import Format, Signers
from clowder_aimage.trust.certificate import Identity, parse_certificates
from clowder_aimage.trust.key import MAX_FILE, PublicKey

if TYPE_CHECKING:
    from clowder_aimage.trust.license_terms import LicenseTerms

# The host of a registry alone, rather than a local name with a dot such as sd-v1.5
_BARE_HOST = re.compile(r"(?:localhost|(?:[a-z0-9-]+\.)+[a-z]{2,})(?::[0-9]+)?")
# The fields of a rule that decides about licences alone
_LICENSE_KEYS = {"pattern", "mode", "licenses"}
# What * may stand for: a part of a name, of a path, of a host, of a port
_EXAMPLES = ("x", "x/x", "x.example", "1")


class Mode(StrEnum):
    """The consequence of what is not accepted: a refusal, a warning, or nothing."""

    ENFORCE = "enforce"
    WARN = "warn"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the repositories whose names match a pattern.

    ``source`` is its file with its position, ``id`` a hash of what it demands, keys included, which
    are in ``files``.
    """

    pattern: str
    mode: Mode
    signers: Signers
    source: str
    id: str
    files: tuple[Path, ...]

    def matches(self, name: str) -> bool:
        """Return True if the rule is for a repository, by its name with the host."""
        return is_covered(name, self.pattern)


@dataclass(frozen=True, slots=True)
class LicenseRule:
    """The licences that are accepted from the repositories whose names match a pattern."""

    pattern: str
    mode: Mode
    terms: LicenseTerms


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules in order, and the ``version``: a hash of all of them.

    They are in ``documents``, which name the ``files`` of keys and certificates. ``licenses`` has
    the rules of each document.
    """

    rules: tuple[Rule, ...]
    version: str
    documents: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    licenses: tuple[tuple[LicenseRule, ...], ...] = ()

    def find(self, name: str) -> Rule | None:
        """Return the rule that decides about signatures of a repository, None if there is none."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def find_licenses(self, name: str) -> list[LicenseRule]:
        """Return the rules that decide about licences of a repository: all must be met."""
        found = (
            next((rule for rule in rules if is_covered(name, rule.pattern)), None)
            for rules in self.licenses
        )
        return [rule for rule in found if rule is not None and rule.mode is not Mode.OFF]

    def refuses(self, name: str) -> bool:
        """Return True if a rule may refuse what is in a repository."""
        rule = self.find(name)
        modes = [each.mode for each in self.find_licenses(name)]
        return Mode.ENFORCE in (*modes, rule.mode if rule else Mode.OFF)

    @property
    def is_enforced(self) -> bool:
        """True if a rule refuses."""
        modes = [rule.mode for rule in self.rules]
        modes += [rule.mode for group in self.licenses for rule in group]
        return Mode.ENFORCE in modes


def build_rule_name(reference: Reference) -> str:
    """Return the name of a repository, as rules are compared with it."""
    if reference.registry is None:
        return reference.name
    return replace(reference, registry=_normalize_host(reference.registry)).canonical.name


def _normalize_host(host: str) -> str:
    """Return the spelling of a registry's host in names: one for those that reach the same one.

    The ports of HTTPS and HTTP are left out, whichever is used: that depends on the configuration
    of a user, by whom no rule may be escaped.
    """
    host = re.sub(r":(?:80|443)$", "", host.lower())
    if host.startswith("["):
        with contextlib.suppress(ValueError):
            address, _, port = host[1:].partition("]")
            host = f"[{IPv6Address(address).compressed}]{port}"
    return "docker.io" if host in DOCKER_HUB else host


def is_covered(text: str, pattern: str) -> bool:
    """Return True if a text, which may be a pattern, is matched; ``*`` stands for any text."""
    first, *others = pattern.split("*")
    if not others:
        return text == pattern
    if not text.startswith(first):
        return False
    position = len(first)
    *middle, last = others
    for part in middle:
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return len(text) - len(last) >= position and text.endswith(last)


def build_policy(documents: Sequence[tuple[Path, dict[str, Any]]]) -> Policy:
    """Return the policy of documents in order, with the files that each names.

    Raises UsageError: a document is empty or contradicts itself, or a file cannot be used.
    """
    rules, licenses = list[Rule](), list[tuple[LicenseRule, ...]]()
    for path, document in documents:
        entries = document.get("rules") or []
        if not entries and "licenses" not in document:
            raise UsageError(f"the policy in {path} has no rules", remedy="trust_policy")
        default = Mode(document.get("mode", Mode.ENFORCE))
        numbered = list(enumerate(entries, 1))
        own = [
            _build_rule(path, number, default, entry)
            for number, entry in numbered
            if _needs_signers(entry)
        ]
        _check_reached([(rule.pattern, rule.source) for rule in own])
        rules += own
        licensed = [
            _build_license_rule(f"rule {number} of {path}", default, entry)
            for number, entry in numbered
            if "licenses" in entry
        ]
        _check_reached([(rule.pattern, rule.terms.source) for rule in licensed])
        if "licenses" in document:
            licensed.append(_build_license_rule(str(path), default, {"pattern": "*"} | document))
        licenses.append(tuple(licensed))
    texts = [rule.pattern + rule.id for rule in rules]
    texts += [f"{rule.pattern}{rule.mode}{rule.terms.id}" for group in licenses for rule in group]
    version = hashlib.sha256("".join(texts).encode())
    files = dict.fromkeys(file for rule in rules for file in rule.files)
    paths = tuple(path for path, _ in documents)
    return Policy(tuple(rules), version.hexdigest(), paths, tuple(files), tuple(licenses))


def _needs_signers(entry: dict[str, Any]) -> bool:
    """Return True for a rule that decides about signatures: one with licences alone does not."""
    return "licenses" not in entry or not entry.keys() <= _LICENSE_KEYS


def _build_license_rule(source: str, default: Mode, entry: dict[str, Any]) -> LicenseRule:
    # Most policies are about signatures alone: this takes 3 ms.
    from clowder_aimage.trust.license_terms import build_terms

    value = entry["licenses"]
    mode = Mode(value.get("mode", entry.get("mode", default)))
    pattern = "*" if entry["pattern"] == "*" else _build_pattern(source, entry["pattern"])
    return LicenseRule(pattern, mode, build_terms(source, value))


def _check_reached(rules: Sequence[tuple[str, str]]) -> None:
    """Raise UsageError for a rule that an earlier one of its document leaves without effect.

    Rules are given by their patterns and sources.
    """
    for number, (pattern, source) in enumerate(rules):
        for earlier_pattern, earlier in rules[:number]:
            if is_covered(pattern, earlier_pattern):
                raise UsageError(
                    f"{source} has no effect: {earlier} is for {earlier_pattern}, "
                    f"which includes {pattern}",
                    hint="put the rule for fewer repositories first, or remove one",
                )


def _build_rule(path: Path, number: int, default: Mode, entry: dict[str, Any]) -> Rule:
    source = f"rule {number} of {path}"
    mode = Mode(entry.get("mode", default))
    read = functools.partial(_read_file, path.parent)
    identities = tuple(
        Identity(each["subject"], each.get("issuer", "")) for each in entry.get("identities", ())
    )
    authority, root = entry.get("authority"), entry.get("trustedRoot")
    stamps = entry.get("timestampAuthority")
    if mode is not Mode.OFF and not entry.get("keys") and not identities:
        raise UsageError(f"{source} has neither keys nor identities", remedy="trust_policy")
    if any(not each.issuer for each in identities) != (authority is not None):
        raise UsageError(
            f"{source} must have both an authority and identities without an issuer, or neither"
        )
    if stamps is not None and authority is None:
        raise UsageError(
            f"{source} has a timestampAuthority without an authority",
            hint="it is for certificates of an authority; trustedRoot has those of sigstore",
        )
    formats = frozenset(map(Format, entry.get("formats", Format)))
    has_signer = bool(entry.get("keys") or authority)
    if formats == {Format.COSIGN_TAG} and mode is not Mode.OFF and not has_signer:
        raise UsageError(
            f"{source} accepts the form cosign-tag only, which needs keys or an authority"
        )
    keys = [read(name) for name in entry.get("keys", ())]
    roots = None if authority is None else read(authority)
    stamp_roots = None if stamps is None else read(stamps)
    trusted_root = None if root is None else path.parent / root
    signers = Signers(
        tuple(PublicKey.parse(data, name) for data, name in keys),
        () if roots is None else parse_certificates(*roots),
        identities,
        trusted_root,
        bool(entry.get("offline", False)),
        formats,
        () if stamp_roots is None else parse_certificates(*stamp_roots),
    )
    others = (roots, None if root is None else read(root), stamp_roots)
    material = [data for data, _ in (*keys, *filter(None, others))]
    demands = {key: value for key, value in entry.items() if key != "licenses"}
    text = json.dumps([demands, mode], sort_keys=True).encode()
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (text, *material)))
    named = (*entry.get("keys", ()), *filter(None, (authority, root, stamps)))
    files = tuple(path.parent / name for name in named)
    pattern = _build_pattern(source, entry["pattern"])
    return Rule(pattern, mode, signers, source, digest.hexdigest(), files)


def _build_pattern(source: str, text: str) -> str:
    """Return a pattern as names are spelt. Raises UsageError: no name can match it."""
    if (pattern := _normalize(text)) is not None:
        return pattern
    better = text.partition("://")[2] or text
    host, _, path = better.partition("/")
    path = re.sub(r"[:@].*", "", path).lower()
    better = f"{host}/{path if path and not path.endswith('/') else path + '*'}"
    hint = f"write {_normalize(better)}" if _normalize(better) else None
    raise UsageError(f"{source} is for {text!r}, which no repository can be named", hint=hint)


def _normalize(text: str) -> str | None:
    host, slash, path = text.partition("/")
    pattern = f"{_normalize_host(host)}{slash}{path}"
    if _BARE_HOST.fullmatch(pattern):
        return None
    if "*" not in pattern and path:
        # docker.io/alpine
        pattern = Reference(_normalize_host(host), path).canonical.name
    for example in _EXAMPLES:
        try:
            name = build_rule_name(Reference.parse(pattern.replace("*", example)))
        except UsageError:
            continue
        # It may have a tag.
        if is_covered(name, pattern):
            return pattern
    return None


def _read_file(directory: Path, name: str) -> tuple[bytes, str]:
    path = directory / name
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path} of the policy: {error.strerror or error}") from None
    if len(data) > MAX_FILE:
        raise UsageError(f"{path} has more than {MAX_FILE} bytes: it is not a file of keys")
    return data, str(path)
