"""The search for signatures: bounds, lists that lie, and several signatures of which one counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import NotFoundError, RegistryError, SignatureError
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.artifact import build_artifact
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.sign import sign_with
from clowder_aimage.trust.acceptance import Format, Signers
from clowder_aimage.trust.bundle import MEDIA_TYPE
from clowder_aimage.trust.collection import (
    MAX_REFERRERS,
    SignaturePlace,
    find_signature,
    list_signatures,
    run_bounded,
)
from clowder_aimage.trust.statement import build_cosign_statement
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.trust.key_files import NOW, create_signer, get_public

SUBJECT = Descriptor.of(mediatype.OCI_MANIFEST, b"a manifest")
OTHER = Descriptor.of(mediatype.OCI_MANIFEST, b"another one")
SIGNERS = Signers(keys=(get_public("signer"),))


class _Place(SignaturePlace):
    """Signatures in memory; ``listed`` is what the place states."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        super().__init__(self.store)
        self.listed = list[Descriptor]()

    def add(self, raw: bytes, subject: Descriptor = SUBJECT) -> Manifest:
        layer = Descriptor.of(MEDIA_TYPE, raw)
        manifest = build_artifact(MEDIA_TYPE, [layer], subject, {})
        for content, data in ((layer, raw), (manifest.descriptor, manifest.raw)):
            self.store.push(content, build_bytes_body(data))
        self.listed.append(manifest.descriptor)
        return manifest

    def list_bundles(self, subject: Digest) -> Sequence[Descriptor]:
        return self.listed

    def find_tagged(self, subject: Digest) -> Descriptor | None:
        return None


def sign(content: Descriptor, name: str = "signer") -> bytes:
    statement = build_cosign_statement(content.digest)
    return sign_with(create_signer(name), Format.BUNDLE)(statement)


def test_one_good_signature_among_broken_ones_counts() -> None:
    place = _Place()
    place.add(b"broken")
    place.add(sign(SUBJECT, "other"))
    place.listed.append(OTHER)
    place.add(sign(SUBJECT))
    find_signature(place, SUBJECT.digest, SIGNERS, NOW)
    accepted, reasons = list_signatures(place, SUBJECT.digest, SIGNERS, NOW)
    assert (len(accepted), len(reasons)) == (1, 3)


def test_an_entry_of_the_list_whose_manifest_has_another_subject_does_not_count() -> None:
    place = _Place()
    place.add(sign(SUBJECT), OTHER)
    with pytest.raises(SignatureError, match="has another subject"):
        find_signature(place, SUBJECT.digest, SIGNERS, NOW)


def test_no_signature_is_an_error() -> None:
    with pytest.raises(SignatureError, match="has no signature"):
        find_signature(_Place(), SUBJECT.digest, SIGNERS, NOW)


def test_a_search_that_does_not_end_is_an_error() -> None:
    released = threading.Event()
    with pytest.raises(SignatureError, match="not read within"):
        run_bounded(released.wait, SUBJECT.digest, 0.01)
    released.set()


def test_an_endless_list_of_referrers_is_not_read_beyond_the_bound(tmp_path: Path) -> None:
    count = 100

    def answer(seen: Seen) -> Answer:
        start = int(seen.path.partition("last=")[2] or 0)
        entries = [
            Descriptor.of(mediatype.OCI_MANIFEST, str(number).encode()).to_json()
            | {"artifactType": MEDIA_TYPE}
            for number in range(start, start + count)
        ]
        body = encode({"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries})
        link = f'<{seen.path.partition("?")[0]}?last={start + count}>; rel="next"'
        return Answer(200, {"Content-Type": mediatype.OCI_INDEX, "Link": link}, body)

    with ScriptedRegistry(answer).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        with (
            Repository(reference, ClientOptions(docker_config=tmp_path)) as repository,
            pytest.raises(RegistryError, match=f"over {MAX_REFERRERS} referrers"),
        ):
            repository.list_referrers(SUBJECT.digest, limit=MAX_REFERRERS)
    assert len(registry.seen) == MAX_REFERRERS // count + 1


def test_a_missing_bundle_does_not_count() -> None:
    place = _Place()
    place.listed.append(OTHER)
    with pytest.raises(SignatureError, match="no signature of an expected signer"):
        find_signature(place, SUBJECT.digest, SIGNERS, NOW)
    with pytest.raises(NotFoundError):
        place.read_manifest(OTHER)
