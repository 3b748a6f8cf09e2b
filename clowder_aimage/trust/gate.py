"""The one decision about content, by the policy of the user: every door asks it.

Rules apply to each name that content came by or has: another name does not lift a demand. What
admitted a manifest is recorded with its digest in the store, by the rule, and counts while that
rule is unchanged; then the signatures in the store are looked at again, and those in the registry.
A licence is read in the config, each time that a process meets a manifest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import Any

from clowder_aimage.content.gate import unchecked
from clowder_aimage.content.graph import list_documents, parse_content
from clowder_aimage.content.store import Reader, Source, WrappedSource, build_bytes_body
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import detect
from clowder_aimage.dialect.license import clean_licenses, list_stated_licenses
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    FormatError,
    LicenseError,
    SignatureError,
    UsageError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.layout.stored_aimage import MAX_CONFIG_SIZE
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, mediatype
from clowder_aimage.oci.artifact import EMPTY
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.trust import simple_signing
from clowder_aimage.trust.bundle import MAX_BUNDLE, MEDIA_TYPE
from clowder_aimage.trust.collection import (
    MAX_REFERRERS,
    RegistryPlace,
    SignaturePlace,
    StorePlace,
    find_signature,
    run_bounded,
)
from clowder_aimage.trust.lineage import is_statement
from clowder_aimage.trust.policy import LicenseRule, Mode, Policy, Rule, build_rule_name

# The private directory of the records of a store
RECORDS = "trust"
# Digests of admitted content in memory, about 200 bytes each
_MAX_ADMITTED = 500_000
# Indexes whose manifests are in memory
_MAX_INDEXES = 4096
_log = logging.getLogger("aimage.trust")


class PolicyGate:
    """The gate of a process. Thread-safe.

    ``read_policy`` returns the current policy, and ``connect`` the options for registries.
    """

    def __init__(self, policy: Policy, connect: Callable[[], ClientOptions]) -> None:
        self._policy, self._connect = policy, connect
        self._lock = threading.Lock()
        # The rules by which content was admitted: manifests, and the content that they list.
        self._admitted: dict[Digest, dict[str, dict[str, Any]]] = {}
        # The manifests among these, with the names that they came by: a manifest may also be
        # listed as a blob.
        self._manifests: dict[Digest, frozenset[str]] = {}
        # The manifests below indexes in stores, by the index
        self._listed: dict[Digest, frozenset[Digest]] = {}
        # The licences that manifests state; None for what is not an AImage
        self._licenses: dict[Digest, tuple[str, ...] | None] = {}
        # The licence in the annotation of a manifest whose config was not read
        self._annotated: dict[Digest, tuple[str, ...]] = {}
        # The accepted signatures of manifests: their manifest and their blob
        self._documents: dict[Digest, list[tuple[Descriptor, bytes]]] = {}
        self._warned: set[tuple[str, Digest]] = set()

    # In a registry

    def admit_remote(
        self,
        repository: Source,
        reference: Reference,
        content: Descriptor,
        raw: bytes,
        source: Source | None = None,
    ) -> None:
        """Decide about a manifest by the signatures in its repository, and its licence.

        Raises PolicyError.
        """
        document = parse_content(raw, content)
        if is_signature(document) or is_statement(document):
            self._admit(document, content.digest, None, {})
            return
        assert isinstance(repository, Repository)  # noqa: S101 - the only source that asks
        name, unchecked_repository = build_rule_name(reference), repository.without_gate()
        rule, evidence = self._policy.find(name), dict[str, Any]()
        if rule is None or rule.mode is Mode.OFF:
            rule = None
        elif rule.id in self._admitted.get(content.digest, ()):
            evidence = self._admitted[content.digest][rule.id]
        else:
            place = RegistryPlace(unchecked_repository, reference)
            evidence = self._decide(rule, place, content.digest, str(reference))
            if place.last and "warned" not in evidence:
                with self._lock:
                    self._documents[content.digest] = place.last
        self._check_licenses(source or unchecked_repository, document, [name], str(reference))
        self._admit(document, content.digest, rule, evidence, [name])

    def check_blob(self, name: str, content: Descriptor) -> None:
        """Raise SignatureError unless an admitted manifest lists the blob."""
        if content.digest in self._admitted:
            return
        if self._policy.refuses(build_rule_name(Reference.parse(name))):
            raise SignatureError(
                f"{content.digest} of {name} is of no manifest that the policy has accepted",
                hint="a blob has no signature or licence: pull the AImage by its name",
            )

    def demands(self, reference: Reference) -> bool:
        """Return True if a rule refuses manifests of a repository without a signature."""
        rule = self._policy.find(build_rule_name(reference))
        return rule is not None and rule.mode is Mode.ENFORCE

    def has_admitted(self, digest: Digest) -> bool:
        """Return False for content of no admitted manifest, if a rule refuses manifests."""
        return not self._policy.is_enforced or digest in self._admitted

    # In a store

    def admit_stored(self, store: Source, content: Descriptor) -> None:
        """Decide about a manifest by the names that it has and had. Raises PolicyError."""
        self.admit_named(store, content, ())

    def admit_named(
        self, store: Source, content: Descriptor, references: Sequence[Reference]
    ) -> None:
        """Decide about a manifest, also by names that it is to get. Raises PolicyError."""
        assert isinstance(store, ImageLayout)  # noqa: S101 - the only store that asks
        self._admit_named(store, content, references)

    def admit_asked(self, store: Source, content: Descriptor, reference: Reference) -> None:
        """Decide about a manifest, also by a name that is asked for. Raises PolicyError.

        With a digest it need not be a name that the manifest has. It is not recorded: clients could
        ask for any number of names.
        """
        # Other sources read from a layout.
        if isinstance(store, ImageLayout) and content.media_type in mediatype.DOCUMENTS:
            self._admit_named(store, content, (), asked=reference)

    def _admit_named(
        self,
        store: ImageLayout,
        content: Descriptor,
        references: Sequence[Reference],
        asked: Reference | None = None,
    ) -> None:
        document = parse_content(read_all(_Unchecked(store).open(content), content), content)
        if is_signature(document) or is_statement(document):
            self._admit(document, content.digest, None, {})
            return
        record = _read_record(store, content.digest)
        parents = self._list_parents(store, content.digest)
        known = [*references, *_list_names(store, content.digest)]
        own = set(map(build_rule_name, known)) | ({build_rule_name(asked)} if asked else set())
        # It came with the indexes that list it: a name of its own does not lift their demands.
        inherited = set(map(build_rule_name, _collect_names(store, parents)))
        judged = sorted(own | inherited)
        found = {rule.id: (rule, name) for name in judged if (rule := self._policy.find(name))}
        if not known and not inherited and content.digest not in self._manifests:
            self._refuse_unknown(content)
        accepted: dict[str, Any] = dict(record.get("accepted", {}))
        for rule, name in found.values():
            if rule.mode is Mode.OFF or rule.id in accepted:
                continue
            admitted = self._admitted.get(content.digest, {}).get(rule.id)
            accepted[rule.id] = admitted or self._decide_stored(
                store, rule, content.digest, record, parents, name
            )
        # What an index lists may have no name of its own.
        came_by = judged or self._manifests.get(content.digest, frozenset())
        self._check_licenses(_Unchecked(store), document, came_by, str(asked or ""))
        _add_origins(store, content.digest, known)
        if record.get("accepted", {}) != accepted:
            value = record | {"accepted": accepted, "policy": self._policy.version}
            _write_record(store, content.digest, value)
        for rule_id, evidence in accepted.items():
            rule, _ = found.get(rule_id, (None, ""))
            self._admit(document, content.digest, rule, evidence)
        self._admit(document, content.digest, None, {}, came_by)

    def record(self, store: Source, content: Descriptor, reference: Reference) -> None:
        """Record a name of a stored manifest, and what admitted it in this process."""
        if not isinstance(store, ImageLayout):
            return
        parents = self._list_parents(store, content.digest)
        # With those of the indexes that it came with: its own do not lift their demands.
        known = _collect_names(store, [content.digest, *parents])
        _add_origins(store, content.digest, [reference, *known])
        record = _read_record(store, content.digest)
        accepted = dict(record.get("accepted", {})) | self._admitted.get(content.digest, {})
        indexes = {entry["index"] for entry in accepted.values() if "index" in entry}
        value = {
            "accepted": accepted,
            "indexes": sorted(indexes.union(record.get("indexes", ()), map(str, parents))),
            "policy": self._policy.version,
        }
        is_decided = value["accepted"] or value["indexes"]
        if is_decided and value != {key: record.get(key) for key in value}:
            _write_record(store, content.digest, record | value)
        for subject in (content.digest, *map(Digest.parse, sorted(indexes))):
            with self._lock:
                documents = self._documents.pop(subject, None)
            if documents:
                _keep_signature(store, subject, reference, documents)

    def _list_parents(self, store: ImageLayout, digest: Digest) -> list[Digest]:
        """Return the indexes in a store that list a manifest, at any level."""
        indexes = {entry.digest: entry for _, entry in store.iter_indexes()}
        return [
            index
            for index, entry in indexes.items()
            if index != digest and digest in self._read_listed(store, entry)
        ]

    def _read_listed(self, store: ImageLayout, index: Descriptor) -> frozenset[Digest]:
        """Return the manifests below an index in a store."""
        if (listed := self._listed.get(index.digest)) is not None:
            return listed
        found, is_complete = list_documents(_Unchecked(store), index)
        if is_complete:
            with self._lock:
                if len(self._listed) > _MAX_INDEXES:
                    self._listed.clear()
                self._listed[index.digest] = found
        return found

    def _refuse_unknown(self, content: Descriptor) -> None:
        if self._policy.is_enforced:
            raise SignatureError(
                f"{content.digest} has no name in the store, so that no rule of the policy is "
                "for it",
                hint="use it by a name",
            )

    def _decide_stored(
        self,
        store: ImageLayout,
        rule: Rule,
        digest: Digest,
        record: dict[str, Any],
        parents: Sequence[Digest],
        judged: str,
    ) -> dict[str, Any]:
        """Return what admits a stored manifest: a signature in the store, or in its registry.

        The rule is for the name ``judged``.
        """
        # A manifest that an index lists may be admitted by the signature of that.
        recorded = (Digest.parse(each) for each in record.get("indexes", ()))
        subjects = list(dict.fromkeys((digest, *parents, *recorded)))
        failure: AImageError | None = None
        for subject in subjects:
            try:
                return _describe(
                    find_signature(_UncheckedPlace(store), subject, rule.signers, _now())
                )
            except (SignatureError, AccessError, FormatError) as error:
                failure = failure or error
        names = {reference.name for reference in _collect_names(store, [digest, *parents])}
        if not rule.signers.offline and names:
            try:
                # The deadline is that of all registries together.
                return run_bounded(partial(self._search, names, rule, subjects), digest)
            except UsageError:
                # No name has a registry
                pass
            except (AccessError, FormatError, SignatureError) as error:
                # It says more than that the store has none
                failure = error
        return self._fail(rule, digest, failure, f"{judged}@{digest}")

    def _search(
        self, names: Iterable[str], rule: Rule, subjects: Iterable[Digest]
    ) -> dict[str, Any]:
        """Return what admits one of ``subjects``, in the registries of names."""
        failure: AImageError | None = None
        for name, subject in product(sorted(names), subjects):
            try:
                return self._search_registry(name, rule, subject)
            except (AccessError, FormatError, SignatureError) as error:
                failure = error
            except UsageError as error:
                failure = failure or error
        raise failure or UsageError("there is no registry to ask")

    def _search_registry(self, name: str, rule: Rule, subject: Digest) -> dict[str, Any]:
        reference = Reference.parse(f"{name}@{subject}")
        if reference.registry is None:
            raise UsageError(f"{name} has no registry")
        with Repository(reference, self._connect()) as repository:
            place = RegistryPlace(repository.without_gate(), reference)
            return _describe(find_signature(place, subject, rule.signers, _now()))

    def explain(
        self, store: ImageLayout, reference: Reference, digest: Digest | None
    ) -> list[dict[str, Any]]:
        """Return each name that counts for a reference, with the rules that decide about it."""
        names = {build_rule_name(reference)}
        if digest is not None:
            parents = self._list_parents(store, digest)
            names |= set(map(build_rule_name, _collect_names(store, [digest, *parents])))
        entries = []
        for name in sorted(names):
            rule = self._policy.find(name)
            entry: dict[str, Any] = {"name": name, "mode": "none"}
            if rule is not None:
                entry |= {"mode": rule.mode.value, "rule": rule.source, "pattern": rule.pattern}
            entry["licenses"] = [
                {"mode": each.mode.value, "rule": each.terms.source, "pattern": each.pattern}
                for each in self._policy.find_licenses(name)
            ]
            entries.append(entry)
        return entries

    # The decision

    def find_licenses(self, digest: Digest) -> tuple[str, ...] | None:
        """Return the licences that a manifest states, None if none was asked for."""
        return self._licenses.get(digest) or self._annotated.get(digest)

    def _check_licenses(
        self, source: Source, document: Manifest | Index, names: Iterable[str], label: str
    ) -> None:
        """Decide by the licences that an AImage states. Raises LicenseError.

        The manifests of an index state their own. Of other artifacts than AImages, which cannot be
        used, the annotation is judged, if they have one.
        """
        rules = [
            (name, rule) for name in sorted(names) for rule in self._policy.find_licenses(name)
        ]
        if not rules or isinstance(document, Index):
            return
        annotated = clean_licenses([document.annotations.get(mediatype.LICENSES)])
        if annotated and document.digest not in self._licenses:
            with self._lock:
                if len(self._annotated) > _MAX_ADMITTED:
                    self._annotated.clear()
                self._annotated[document.digest] = annotated
            # All that it states apply: a refused one needs no request for the config.
            refusing = [(name, rule) for name, rule in rules if rule.mode is Mode.ENFORCE]
            self._judge_licenses(refusing, annotated, document.digest, label)
        if (stated := self._read_licenses(source, document)) is not None:
            self._judge_licenses(rules, stated, document.digest, label)

    def _judge_licenses(
        self,
        rules: Iterable[tuple[str, LicenseRule]],
        stated: Sequence[str],
        digest: Digest,
        label: str,
    ) -> None:
        """Warn about licences, or raise LicenseError, by the modes of the rules."""
        for name, rule in rules:
            if (fault := rule.terms.find_fault(stated)) is None:
                continue
            text = label if label.startswith(name) else f"{name}@{digest}"
            message = f"{text} is refused by the licences in {rule.terms.source}: {fault}"
            if rule.mode is Mode.ENFORCE:
                raise LicenseError(message, remedy="license_check")
            self._warn((rule.terms.id, digest), f"{text} would be refused: {fault}")

    def _read_licenses(self, source: Source, document: Manifest) -> tuple[str, ...] | None:
        if document.digest in self._licenses:
            return self._licenses[document.digest]
        licenses: tuple[str, ...] | None
        try:
            detect(document)
        except FormatError:
            stated = document.annotations.get(mediatype.LICENSES)
            licenses = None if stated is None else (stated,)
        else:
            config = read_all(source.open(document.config), document.config, MAX_CONFIG_SIZE)
            licenses = list_stated_licenses(document, config)
        with self._lock:
            if len(self._licenses) > _MAX_ADMITTED:
                self._licenses.clear()
            self._licenses[document.digest] = licenses
        return licenses

    def _warn(self, key: tuple[str, Digest], message: str) -> None:
        """Log a message once."""
        with self._lock:
            is_new = key not in self._warned
            self._warned.add(key)
        if is_new:
            _log.warning("%s", message)

    def _decide(
        self, rule: Rule, place: SignaturePlace, digest: Digest, name: str
    ) -> dict[str, Any]:
        try:
            return _describe(find_signature(place, digest, rule.signers, _now()))
        except (SignatureError, AccessError, FormatError) as error:
            return self._fail(rule, digest, error, name)

    def _fail(
        self, rule: Rule, digest: Digest, failure: AImageError | None, name: str
    ) -> dict[str, Any]:
        """Warn, or raise SignatureError, by the mode of the rule."""
        reason = failure.message if failure else f"{digest} has no signature"
        message = f"{name} is refused by {rule.source}, for {rule.pattern}: {reason}"
        if rule.mode is Mode.ENFORCE:
            raise SignatureError(message, remedy="trust_check")
        self._warn((rule.id, digest), f"{name} would be refused: {reason}")
        return {"warned": reason}

    def _admit(
        self,
        document: Manifest | Index,
        digest: Digest,
        rule: Rule | None,
        evidence: dict[str, Any],
        names: Iterable[str] = (),
    ) -> None:
        """Remember a manifest and the content that it lists; an index admits its manifests.

        ``names`` are those that it came by.
        """
        contents: Iterable[Digest] = (
            digest,
            *(child.digest for child in document.children),
        )
        with self._lock:
            if len(self._admitted) > _MAX_ADMITTED:
                self._admitted.clear()
                self._manifests.clear()
            for manifest in (digest, *(child.digest for child in _list_children(document))):
                known = self._manifests.get(manifest, frozenset())
                self._manifests[manifest] = known.union(names)
            for content in contents:
                entry = self._admitted.setdefault(content, {})
                if rule is not None and content == digest:
                    entry[rule.id] = evidence
                elif rule is not None and isinstance(document, Index):
                    entry[rule.id] = evidence | {"index": str(digest)}


def is_signature(document: Manifest | Index) -> bool:
    """Return True for an artifact with nothing but signatures: it is read to decide about others.

    No dialect reads it as an AImage (``dialect.detect``).
    """
    if not isinstance(document, Manifest) or len(document.layers) > MAX_REFERRERS:
        return False
    if document.artifact_type not in ("", MEDIA_TYPE):
        return False
    if any(child.size > MAX_BUNDLE for child in document.children):
        return False
    kinds, config = {layer.media_type for layer in document.layers}, document.config.media_type
    if kinds == {simple_signing.MEDIA_TYPE} and config == mediatype.OCI_CONFIG:
        return all(simple_signing.SIGNATURE in layer.annotations for layer in document.layers)
    return kinds == {MEDIA_TYPE} and config == mediatype.OCI_EMPTY


def _keep_signature(
    store: ImageLayout,
    subject: Digest,
    reference: Reference,
    documents: list[tuple[Descriptor, bytes]],
) -> None:
    """Store the signature that admitted a manifest, for later decisions without its registry."""
    (manifest, raw), *blobs = documents
    document = parse_content(raw, manifest)
    name = replace(reference, tag=None, digest=manifest.digest)
    if document.subject is None:
        name = replace(name, tag=simple_signing.build_signature_tag(subject), digest=None)
    contents = [*blobs, (manifest, raw)]
    if isinstance(document, Manifest) and document.config.media_type == mediatype.OCI_EMPTY:
        contents.insert(0, (document.config, EMPTY))
    try:
        with store.lease(*(content.digest for content, _ in contents)), unchecked():
            for content, data in contents:
                store.push(content, build_bytes_body(data))
            store.tag(manifest, name)
    except AccessError as error:
        _log.debug("cannot store the signature of %s: %s", subject, error)


def _list_children(document: Manifest | Index) -> tuple[Descriptor, ...]:
    return document.manifests if isinstance(document, Index) else ()


def _list_names(store: ImageLayout, digest: Digest) -> list[Reference]:
    """Return the names of a manifest in the index of a store, and those that it had or came by."""
    candidates = store.iter_candidates(Reference(None, "x", None, digest))
    names = {name for name, entry in candidates if entry.digest == digest and name}
    return list(map(_parse_name, sorted(names | store.list_origins(digest))))


def _collect_names(store: ImageLayout, digests: Iterable[Digest]) -> list[Reference]:
    """Return the names that manifests have and had."""
    return [name for digest in digests for name in _list_names(store, digest)]


def _parse_name(name: str) -> Reference:
    try:
        return Reference.parse(name)
    except UsageError:
        # Another tool's: a rule for all names decides
        return Reference(None, "unnamed")


def _add_origins(store: ImageLayout, digest: Digest, names: Sequence[Reference]) -> None:
    try:
        # Its names are durable until it loses them
        store.add_origins(digest, map(str, names), durable=False)
    except AccessError as error:
        # A store that only others write has the names of its index
        _log.debug("cannot record the names of %s: %s", digest, error)


def _describe(accepted: Any) -> dict[str, Any]:
    value: dict[str, Any] = accepted.to_json()
    return value


def _now() -> datetime:
    return datetime.now(UTC)


def _read_record(store: ImageLayout, digest: Digest) -> dict[str, Any]:
    """Return the record of a manifest, with the indexes in those of read-only stores.

    What admitted it counts in this store only, and, as the indexes that list it, only from a file
    that no other user may have written.
    """
    record, *lower = (
        MetadataFiles(root, RECORDS).get_protected(str(digest)) or {} for root in store.roots
    )
    indexes = {index for each in (record, *lower) for index in each.get("indexes", ())}
    return record | {"indexes": sorted(indexes)}


def _write_record(store: ImageLayout, digest: Digest, value: dict[str, Any]) -> None:
    files, key = MetadataFiles(store.root, RECORDS), str(digest)
    try:
        # One in a group's store is not believed, and would be written each time.
        if files.get(key) != {"key": key} | value:
            files.put(key, value, durable=True)
    except AccessError as error:
        # A store that only others write is decided about each time.
        _log.debug("cannot record the decision about %s: %s", digest, error)


class _Unchecked(WrappedSource):
    """A store whose documents are read to decide about them."""

    def __init__(self, store: ImageLayout) -> None:
        super().__init__(store)
        self._store = store

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        return self._store.open_unchecked(content, offset, length)


class _UncheckedPlace(StorePlace):
    def __init__(self, layout: ImageLayout) -> None:
        super().__init__(layout)
        self._source = _Unchecked(layout)
