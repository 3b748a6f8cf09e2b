"""The gate of a process over small stores, without a registry."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import io
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.config import trust_policy
from clowder_aimage.config.trust_policy import UserFiles, _CurrentGate, read_policy
from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.gate import GATES, find_gate, unchecked
from clowder_aimage.content.graph import MAX_DEPTH
from clowder_aimage.create import create
from clowder_aimage.dialect.modelpack import CONFIG, MANIFEST
from clowder_aimage.engine import admission
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.model_fetch import find
from clowder_aimage.errors import (
    FormatError,
    LicenseError,
    ManifestRefusedError,
    SignatureError,
    UnauthorizedError,
    UsageError,
)
from clowder_aimage.importer.hub_model import HubName
from clowder_aimage.importer.ollama_store import adopt
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.metadata import MetadataFiles, build_file_name
from clowder_aimage.layout.origin import ORIGINS
from clowder_aimage.layout.stored_aimage import lease_manifest, read_aimage, read_stored
from clowder_aimage.load import load
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.artifact import EMPTY
from clowder_aimage.oci.manifest import encode
from clowder_aimage.pull import pull, resolve_changed
from clowder_aimage.push import MOUNTABLE, push, transfer, transfer_tags
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.session import Session
from clowder_aimage.save import save
from clowder_aimage.sign import _attach_bundle, sign, sign_with
from clowder_aimage.trust import collection, lineage
from clowder_aimage.trust.acceptance import Format
from clowder_aimage.trust.collection import RegistryPlace
from clowder_aimage.trust.gate import RECORDS, PolicyGate
from clowder_aimage.trust.lineage import (
    Derivation,
    DerivationRecipe,
    Operation,
    build_referrer,
    keep_derivation,
    list_statements,
    read_derivation,
)
from clowder_aimage.trust.signer import KeySigner
from clowder_aimage.trust.simple_signing import build_signature_tag
from clowder_aimage.trust.statement import COSIGN_SIGN, build_cosign_statement
from tests.node.nodes import TOKEN, Node
from tests.registry_app import RegistryThread
from tests.store import copy_store
from tests.trust.key_files import (
    DAY,
    NOW,
    create_authority,
    create_certificate,
    create_key,
    create_signer,
    encode_der,
    get_public,
    write_key,
)
from tests.trust.own_timestamp import OwnTimestampAuthority
from tests.trust.place import write_policy

HOST = "registry.example.com"
NAME = f"{HOST}/team/x:v1"
FILES = UserFiles(lambda: None, lambda: False)


class Machine:
    """A store, and the policy of its machine, which is used in this process."""

    def __init__(self, home: Path, policy: Path) -> None:
        self.home, self.policy = home, policy
        self.store = ImageLayout(home / "store")
        self.public = write_key(policy.parent, "signer")[1]

    def enforce(self, pattern: str = f"{HOST}/team/*", **rule: Any) -> None:
        write_policy(self.policy, pattern, self.public, **{"offline": True} | rule)

    def push(self, media_type: str, data: bytes) -> Descriptor:
        content = Descriptor.of(media_type, data)
        self.store.push(content, build_bytes_body(data))
        return content

    def create(self, name: str = NAME, data: bytes = b"weights") -> Descriptor:
        """Store an AImage with one file under a name."""
        layer = self.push(mediatype.AIMAGE_FILE, data).to_json()
        layer["annotations"] = {mediatype.NAME: "a"}
        # Not the empty config that signatures have
        config = self.push(mediatype.AIMAGE_CONFIG, b"{ }")
        return self.write(name, mediatype.AIMAGE_MANIFEST, config, layer)

    def write(self, name: str, kind: str, config: Descriptor, *layers: Any) -> Descriptor:
        document: dict[str, Any] = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST}
        document |= {"config": config.to_json(), "layers": list(layers)}
        if kind:
            document["artifactType"] = kind
        return self.write_document(name, mediatype.OCI_MANIFEST, encode(document))

    def write_document(self, name: str, media_type: str, raw: bytes) -> Descriptor:
        manifest = self.push(media_type, raw)
        with unchecked():
            self.store.tag(manifest, Reference.parse(name))
        return manifest

    def sign(self, name: str = NAME, signer: str = "signer") -> None:
        with unchecked():
            statement = sign_with(create_signer(signer), Format.BUNDLE)
            sign(self.store, Reference.parse(name), None, statement)

    def read(self, name: str = NAME) -> Any:
        return read_aimage(self.store, Reference.parse(name))

    def use_policy(self) -> None:
        """Use the policy in this process from now on."""
        gate = _CurrentGate(FILES, lambda: ClientOptions(docker_config=self.home))
        GATES[:] = [gate.find_gate]


@pytest.fixture
def machine(tmp_path: Path, without_machine_policy: Path) -> Machine:
    machine = Machine(tmp_path, without_machine_policy)
    machine.use_policy()
    return machine


@pytest.mark.parametrize("layer_type", [mediatype.SIGSTORE_BUNDLE, mediatype.SIMPLE_SIGNING])
@pytest.mark.parametrize("kind", [MANIFEST, mediatype.SIGSTORE_BUNDLE, ""])
@pytest.mark.parametrize(
    "config_type", [mediatype.OCI_EMPTY, mediatype.OCI_CONFIG, mediatype.DOCKER_CONFIG, CONFIG]
)
def test_a_model_dressed_as_a_signature_is_not_read(
    machine: Machine, layer_type: str, kind: str, config_type: str
) -> None:
    layer = machine.push(layer_type, b"weights").to_json()
    layer["annotations"] = {
        mediatype.NAME: "transformer/w",
        mediatype.DTYPE: "BF16",
        mediatype.MEDIATYPE: mediatype.AIMAGE_SAFETENSORS,
        "dev.cosignproject.cosign/signature": "AAAA",
    }
    machine.write(NAME, kind, machine.push(config_type, b"{}"), layer)
    # Without a policy, too
    with pytest.raises(FormatError, match="is not an AImage"):
        machine.read()
    machine.enforce()
    with pytest.raises((SignatureError, FormatError)):
        machine.read()
    if kind == MANIFEST or config_type in (mediatype.DOCKER_CONFIG, CONFIG):
        with pytest.raises(SignatureError):
            machine.read()


@pytest.fixture
def node(machine: Machine) -> Iterator[Node]:
    found = Node(machine.store.root).start()
    yield found
    found.stop()


def fetch_range(node: Node, repository: str, method: str = "GET") -> tuple[int, bytes]:
    """Return the answer to a node's request for the bytes of ``create``."""
    path = f"/v2/{repository}/blobs/{Digest.of(b'weights')}?ns={HOST}&size=7"
    headers = {"Range": "bytes=0-6", "Authorization": f"Bearer {TOKEN}", "Aimage-Node": "9" * 32}
    connection = http.client.HTTPConnection(node.address, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def test_a_node_gives_ranges_of_accepted_models_only(machine: Machine, node: Node) -> None:
    machine.create()
    machine.enforce("*")
    for repository in ("team/x", "no/such"):
        assert fetch_range(node, repository)[0] == 403
        assert fetch_range(node, repository, "HEAD")[0] == 403
    machine.sign()
    assert fetch_range(node, "team/x") == (206, b"weights")


def test_a_model_in_memory_is_decided_about_again(machine: Machine) -> None:
    machine.create()
    engine: Any = Engine.__new__(Engine)
    engine.store = machine.store
    engine._scheduler = SimpleNamespace(find_loaded=lambda _: "loaded")
    request: Any = SimpleNamespace(
        reference=Reference.parse(NAME), pull=admission.NEVER, stored=None
    )
    assert asyncio.run(engine._find(request)) == "loaded"
    machine.enforce()
    with pytest.raises(SignatureError):
        asyncio.run(engine._find(request))


def replace_file(path: Path, data: bytes) -> None:
    """Put another file at a path, with the times of the one before."""
    before, new = path.stat(), path.with_suffix(".new")
    new.write_bytes(data)
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)


def test_an_expired_certificate_counts_for_a_rule_with_an_authority_of_stamps(
    machine: Machine,
) -> None:
    machine.create()
    authority, stamps = create_authority(), OwnTimestampAuthority()
    certificate = create_certificate(authority, create_key("expired"), days=(-30, -20))
    for name, root in (("ca.pem", authority), ("stamps.pem", stamps.root)):
        (machine.policy.parent / name).write_bytes(root.pem)
    with unchecked():
        signer = KeySigner(
            create_key("expired"),
            "expired",
            (encode_der(certificate),),
            lambda signature: stamps.stamp(signature, NOW - 25 * DAY),
        )
        statement = sign_with(signer, Format.BUNDLE)
        sign(machine.store, Reference.parse(NAME), None, statement)
    rule: dict[str, Any] = {"authority": "ca.pem", "identities": [{"subject": "signer@*"}]}
    machine.enforce(**rule)
    with pytest.raises(SignatureError, match="its time stamp is not by an expected authority"):
        machine.read()
    machine.enforce(**rule, timestampAuthority="stamps.pem")
    machine.read()
    # Another authority of stamps is another rule, which is decided about again.
    other = OwnTimestampAuthority("other").root.pem
    replace_file(machine.policy.parent / "stamps.pem", other)
    with pytest.raises(SignatureError):
        machine.read()


@pytest.mark.parametrize("file", ["signer.pub", "ca.pem"])
def test_a_replaced_file_of_a_policy_counts_at_once(machine: Machine, file: str) -> None:
    machine.create()
    machine.sign()
    (machine.policy.parent / "ca.pem").write_bytes(create_authority().pem)
    machine.enforce(authority="ca.pem", identities=[{"subject": "*"}])
    machine.read()
    before = find_gate()
    if file == "ca.pem":
        replace_file(machine.policy.parent / file, create_authority("other").pem)
        assert find_gate() is not before
        return
    replace_file(machine.public, get_public("other").pem)
    with pytest.raises(SignatureError):
        machine.read()
    machine.sign(signer="other")
    machine.read()


@pytest.mark.parametrize("kind", ["absent", "broken link", "broken directory", "not readable"])
def test_a_policy_that_disappears_opens_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    machine.create()
    machine.enforce()
    text = machine.policy.read_text()
    with pytest.raises(SignatureError):
        machine.read()
    take_away(machine.policy, kind, monkeypatch)
    # The second read, too
    for _ in range(2):
        with pytest.raises(UsageError, match=r"disappeared|cannot use the policy"):
            machine.read()
    monkeypatch.undo()
    if machine.policy.parent.is_symlink():
        machine.policy.parent.unlink()
        machine.policy.parent.mkdir()
    machine.policy.unlink(missing_ok=True)
    machine.policy.write_text(text)
    write_key(machine.policy.parent, "signer")
    monkeypatch.setattr(trust_policy, "SYSTEM_FILES", [machine.policy])
    with pytest.raises(SignatureError):
        machine.read()


def take_away(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "not readable":
        for name in ("open", "stat"):
            call = getattr(Path, name)

            def refuse(self: Path, *args: Any, call: Any = call, **options: Any) -> Any:
                if self == path:
                    raise PermissionError(errno.EACCES, "Permission denied", str(self))
                return call(self, *args, **options)

            monkeypatch.setattr(Path, name, refuse)
    elif kind == "broken directory":
        path.parent.rename(path.parent.with_name("moved"))
        path.parent.symlink_to("missing")
    else:
        path.unlink()
        if kind == "broken link":
            path.symlink_to(path.parent / "..data" / path.name)


@pytest.mark.parametrize("kind", ["broken link", "broken directory", "not readable"])
def test_a_policy_that_cannot_be_read_opens_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nor does one that appears in a process which had none."""
    machine.create()
    machine.read()
    if kind != "not readable":
        machine.policy.write_text("")
    take_away(machine.policy, kind, monkeypatch)
    with pytest.raises(UsageError, match="cannot use the policy"):
        find_gate()


def test_the_name_that_is_asked_by_is_judged(machine: Machine) -> None:
    """A digest is found under any name: that of the request need not be one of them."""
    content = machine.create("other.example/u/x:v1")
    machine.enforce()
    asked = Reference.parse(f"{HOST}/team/x@{content.digest}")
    engine: Any = Engine.__new__(Engine)
    engine.store = machine.store
    with machine.store.lease() as lease:
        for door in (
            lambda: read_aimage(machine.store, asked),
            lambda: find(machine.store, asked),
            lambda: engine._resolve(asked),
            lambda: lease_manifest(machine.store, asked, lease),
        ):
            with pytest.raises(SignatureError):
                door()
    # The request gives it no name.
    machine.enforce("asked.example/*", mode="warn")
    machine.read(f"asked.example/u/x@{content.digest}")
    machine.read("other.example/u/x:v1")
    machine.enforce("asked.example/*")
    machine.read("other.example/u/x:v1")


def test_a_manifest_that_is_listed_as_a_blob_is_not_of_an_index(machine: Machine) -> None:
    """A manifest without a name, as other tools leave them."""
    content = machine.create("temporary:v1")
    index = machine.store.root / "index.json"
    document = json.loads(index.read_text())
    for entry in document["manifests"]:
        del entry["annotations"]
    index.write_text(json.dumps(document))
    shutil.rmtree(machine.store.root / ".aimage")
    machine.store = ImageLayout(machine.store.root)
    machine.enforce("*")
    name = f"x@{content.digest}"
    with pytest.raises(SignatureError):
        read_stored(machine.store, content)
    layer = {"mediaType": mediatype.SIGSTORE_BUNDLE, "digest": str(content.digest), "size": 9}
    config = machine.push(mediatype.OCI_EMPTY, b"{}")
    signature = machine.write("signature:v1", mediatype.SIGSTORE_BUNDLE, config, layer)
    machine.store.open(signature).close()
    with pytest.raises(SignatureError, match="no name in the store"):
        read_stored(machine.store, content)
    with pytest.raises(SignatureError):
        machine.read(name)


def write_ollama_model(directory: Path) -> bytes:
    """Write ollama's store with the model ``llama3``; return its manifest."""

    def write(data: bytes) -> dict[str, Any]:
        digest = Digest.of(data)
        (directory / "blobs" / f"sha256-{digest.encoded}").write_bytes(data)
        return {"digest": str(digest), "size": len(data)}

    (directory / "blobs").mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model"} | write(b"GGUF")
    config = {"mediaType": mediatype.DOCKER_CONFIG} | write(b"{}")
    document = {"schemaVersion": 2, "mediaType": mediatype.DOCKER_MANIFEST}
    raw = encode(document | {"config": config, "layers": [layer]})
    path = directory / "manifests/registry.ollama.ai/library/llama3/latest"
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    return raw


def test_a_model_of_ollama_is_judged_by_its_name_there(machine: Machine) -> None:
    directory, mine = machine.home / "ollama", Reference.parse("mine:v1")
    raw = write_ollama_model(directory)
    machine.enforce("registry.ollama.ai/library/*")
    with pytest.raises(SignatureError):
        adopt(machine.store, mine, directory, "llama3")
    assert not machine.store.exists(Descriptor("", Digest.of(b"GGUF"), 4))
    assert not list(machine.store.list_tags())
    # It is signed by its digest; the name that it came by counts afterwards, too.
    machine.write_document("signed:v1", mediatype.DOCKER_MANIFEST, raw)
    machine.sign("signed:v1")
    adopt(machine.store, mine, directory, "llama3")
    machine.read("mine:v1")
    machine.public.write_bytes(get_public("other").pem)
    with pytest.raises(SignatureError):
        machine.read("mine:v1")


def test_another_name_in_a_lower_store_does_not_lift_a_demand(machine: Machine) -> None:
    content = machine.create()
    machine.enforce()
    mine = Reference.parse("mine:v1")
    machine.store.tag(content, mine)
    machine.store.untag(Reference.parse(NAME))
    upper = LayeredStore([machine.home / "upper", machine.store.root])
    for store in (machine.store, upper):
        with pytest.raises(SignatureError):
            read_aimage(store, mine)
    # What admitted it there does not count here.
    policy = read_policy(FILES)
    assert policy
    accepted: dict[str, Any] = {"accepted": {policy.rules[0].id: {}}}
    MetadataFiles(machine.store.root, RECORDS).put(str(content.digest), accepted, durable=True)
    read_aimage(machine.store, mine)
    with pytest.raises(SignatureError):
        read_aimage(upper, mine)


MINE = Reference.parse("mine:v1")


@pytest.mark.parametrize("loss", ["removed", "moved"])
def test_a_name_that_was_lost_before_there_was_a_policy_counts(machine: Machine, loss: str) -> None:
    GATES.clear()
    content = machine.create()
    machine.store.tag(content, Reference.parse("first:v1"))
    machine.store.tag(content, MINE)
    if loss == "removed":
        machine.store.untag(Reference.parse(NAME))
    else:
        other = machine.create("newer:v1", b"newer weights")
        machine.store.tag(other, Reference.parse(NAME))
    machine.store.untag(Reference.parse("first:v1"))
    assert machine.store.list_origins(content.digest) == {f"{HOST}/team/x", "first"}
    collect(machine)
    machine.use_policy()
    machine.enforce()
    with pytest.raises(SignatureError):
        read_aimage(machine.store, MINE)
    if loss != "removed":
        with pytest.raises(SignatureError):
            machine.read()
    # Nor in a store above it
    upper = LayeredStore([machine.home / "upper", machine.store.root])
    with pytest.raises(SignatureError):
        read_aimage(upper, MINE)
    machine.enforce(f"{HOST}/other/*")
    read_aimage(machine.store, MINE)


def collect(machine: Machine) -> None:
    Collector(machine.store, grace=0).run()


def test_the_names_of_content_in_a_lower_store_are_kept(machine: Machine) -> None:
    GATES.clear()
    content = machine.create("below:v1")
    upper = LayeredStore([machine.home / "upper", machine.store.root])
    for name in (Reference.parse(NAME), MINE):
        upper.tag(content, name)
    upper.untag(Reference.parse(NAME))
    Collector(upper, grace=0).run()
    machine.use_policy()
    machine.enforce()
    with pytest.raises(SignatureError):
        read_aimage(upper, MINE)


def test_a_damaged_record_of_names_is_read_as_far_as_it_goes(machine: Machine) -> None:
    content = machine.create("mine:v1")
    machine.store.add_origins(content.digest, [NAME])
    path = machine.store.root / ".aimage" / ORIGINS / content.digest.encoded
    path.write_bytes(path.read_bytes() + b"\n\xff\nregistry.exa")
    machine.store.add_origins(content.digest, ["next:v1", NAME])
    origins = machine.store.list_origins(content.digest)
    assert {f"{HOST}/team/x", "next"} < origins
    machine.enforce()
    with pytest.raises(SignatureError):
        machine.read("mine:v1")


def test_the_names_of_collected_content_are_forgotten(machine: Machine) -> None:
    GATES.clear()
    content = machine.create()
    machine.store.untag(Reference.parse(NAME))
    assert machine.store.list_origins(content.digest)
    collect(machine)
    assert not machine.store.list_origins(content.digest)
    # It comes again by another name.
    machine.create("mine:v1")
    machine.use_policy()
    machine.enforce()
    machine.read("mine:v1")


def test_the_name_that_an_archive_or_ollama_gives_counts_later_too(machine: Machine) -> None:
    GATES.clear()
    machine.create()
    archive = machine.home / "model.tar"
    save(machine.store, [Reference.parse(NAME)], archive)
    store = ImageLayout(machine.home / "loaded")
    load(store, archive, MINE)
    directory, adopted = machine.home / "ollama", Reference.parse("adopted:v1")
    write_ollama_model(directory)
    adopt(store, adopted, directory, "llama3")
    machine.use_policy()
    for pattern, name in ((f"{HOST}/*", MINE), ("registry.ollama.ai/library/*", adopted)):
        machine.enforce(pattern)
        with pytest.raises(SignatureError):
            read_aimage(store, name)


@pytest.mark.parametrize("by", ["group", "others", "owner"])
def test_a_record_that_another_user_may_have_written_admits_nothing(
    machine: Machine, by: str
) -> None:
    content = machine.create()
    machine.create("other:v1", b"others")
    machine.sign("other:v1")
    machine.enforce()
    policy = read_policy(FILES)
    assert policy
    signed = machine.store.resolve(Reference.parse("other:v1"))
    records, key = MetadataFiles(machine.store.root, RECORDS), str(content.digest)
    forged = (
        {"names": [], "accepted": {policy.rules[0].id: {}}},
        # Nor by the signature of an index that is said to list it
        {"names": [], "indexes": [str(signed.digest)]},
    )
    for value in forged:
        records.put(key, value, durable=True)
        path = machine.store.root / ".aimage" / RECORDS / build_file_name(key)
        if by == "owner":
            if os.geteuid() != 0:
                pytest.skip("only root may give a file away")
            os.chown(path, 12345, -1)
        path.chmod({"group": 0o664, "others": 0o646, "owner": 0o644}[by])
        with pytest.raises(SignatureError):
            machine.read()


def test_a_damaged_signature_of_another_model_does_not_count(machine: Machine) -> None:
    machine.create()
    machine.sign()
    other = f"{HOST}/other/y:v1"
    machine.create(other, b"others")
    machine.sign(other)
    (signature,) = (
        entry
        for name, entry in machine.store.iter_entries()
        if entry.extra.get("artifactType") == mediatype.SIGSTORE_BUNDLE
        and name.startswith(f"{HOST}/other")
    )
    path = Path(machine.store.locate(signature))
    path.chmod(0o644)
    path.write_bytes(b"x" * signature.size)
    machine.enforce("*")
    machine.read()
    with pytest.raises(SignatureError):
        machine.read(other)


def test_a_damaged_signature_of_the_model_is_refused(machine: Machine) -> None:
    machine.create()
    machine.sign()
    for _, entry in machine.store.iter_entries():
        if entry.extra.get("artifactType") == mediatype.SIGSTORE_BUNDLE:
            with machine.store.open_unchecked(entry) as file:
                manifest = Manifest.parse(file.read())
            Path(machine.store.locate(manifest.layers[0])).unlink()
    machine.enforce("*")
    with pytest.raises(SignatureError):
        machine.read()


def refuse_signatures(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Let all registries refuse to store artifacts, or to give them out."""

    def refuse_put(self: Any, content: Any, raw: bytes, reference: Any) -> Any:
        if b"sigstore" in raw:
            raise ManifestRefusedError("the registry refuses artifacts")
        return put(self, content, raw, reference)

    def refuse_open(self: Any, content: Descriptor, *args: Any) -> Any:
        reader = opened(self, content, *args)
        if content.media_type != mediatype.OCI_MANIFEST:
            return reader
        with contextlib.closing(reader):
            raw = reader.read()
        if b"sigstore" in raw:
            raise UnauthorizedError("the registry refuses artifacts")
        return io.BytesIO(raw)

    put, opened = Repository._put_manifest, Repository.open
    if call == "put":
        monkeypatch.setattr(Repository, "_put_manifest", refuse_put)
    else:
        monkeypatch.setattr(Repository, "open", refuse_open)


@pytest.mark.parametrize("call", ["put", "open"])
def test_a_signature_that_a_registry_refuses_is_left_out_of_a_copy(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    machine.create("team/x:v1")
    machine.sign("team/x:v1")
    target_store = ImageLayout(machine.home / "target")
    options = ClientOptions(docker_config=machine.home)
    with serving_stores(machine.store, target_store) as (first, second):
        refuse_signatures(monkeypatch, call)
        source, target = (Reference.parse(f"{host}/team/x:v1") for host in (first, second))
        assert (
            transfer(source, target, options).digest
            == machine.store.resolve(Reference.parse("team/x:v1")).digest
        )
        assert [name for name, _ in target_store.list_tags()] == ["team/x:v1"]
        assert any("is left out" in message for message in caplog.messages)
        # The policy demands it of the target: nothing is sent.
        machine.enforce(f"{second}/*")
        with pytest.raises((ManifestRefusedError, UnauthorizedError)):
            transfer(source, replace(target, tag="v2"), options)
        assert len(list(target_store.list_tags())) == 1


def test_a_signature_that_a_registry_refuses_is_left_out_of_a_push(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = ClientOptions(docker_config=machine.home)
    target_store = ImageLayout(machine.home / "target")
    with serving_stores(target_store) as (host,):
        name = f"{host}/team/x:v1"
        machine.create(name)
        machine.sign(name)
        refuse_signatures(monkeypatch, "put")
        push(machine.store, Reference.parse(name), options)
        assert [name for name, _ in target_store.list_tags()] == ["team/x:v1"]
        assert any("is left out" in message for message in caplog.messages)


def test_the_signatures_of_a_manifest_are_listed_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = machine.create("team/x:v1")
    machine.sign("team/x:v1")
    machine.store.tag(content, Reference.parse("team/x:v2"))
    options, target_store = ClientOptions(docker_config=machine.home), machine.home / "target"
    listed = list[Digest]()
    list_carried = RegistryPlace.list_carried

    def list_and_note(self: RegistryPlace, subject: Digest) -> Any:
        listed.append(subject)
        return list_carried(self, subject)

    monkeypatch.setattr(RegistryPlace, "list_carried", list_and_note)
    with serving_stores(machine.store, ImageLayout(target_store)) as (first, second):
        source, target = (Reference.parse(f"{host}/team/x") for host in (first, second))
        assert set(transfer_tags(source, target, options)) == {"v1", "v2"}
    assert listed == [content.digest]


def test_a_policy_costs_three_requests_of_a_registry_with_the_referrers_api(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.create("team/x:v1")
    machine.sign("team/x:v1")
    options, request = ClientOptions(docker_config=machine.home), Session.request
    counts = [Counter[str](), Counter[str]()]

    def note(self: Session, method: str, url: str, *args: Any, **values: Any) -> Any:
        kind = url.partition("/team/x/")[2].partition("/")[0]
        counts[is_enforced][f"{method} {kind}"] += 1
        return request(self, method, url, *args, **values)

    monkeypatch.setattr(Session, "request", note)
    with serving_stores(machine.store) as (host,):
        for is_enforced in (False, True):
            if is_enforced:
                machine.enforce(f"{host}/*", offline=False)
            store = ImageLayout(machine.home / f"pulled-{is_enforced}")
            pull(Reference.parse(f"{host}/team/x:v1"), store, options)
    assert counts[1] - counts[0] == {"GET referrers": 1, "GET manifests": 1, "GET blobs": 1}


@contextlib.contextmanager
def serving_stores(*stores: ImageLayout) -> Iterator[list[str]]:
    servers = [RegistryThread(store) for store in stores]
    try:
        yield [server.host for server in servers]
    finally:
        for server in servers:
            server.close()


def test_a_model_of_the_hub_is_judged_by_its_name_there(machine: Machine, tiny: Path) -> None:
    """It has no signature there: who demands one signs what was packed."""
    origin, mine = HubName("Org/Model").origin, Reference.parse("mine:v1")
    machine.enforce("huggingface.co/org/*")
    create(machine.store, mine, tiny, origin=origin)
    with pytest.raises(SignatureError):
        machine.read("mine:v1")
    machine.sign("mine:v1")
    machine.read("mine:v1")


def test_all_registries_of_a_model_share_the_deadline(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = machine.create(f"{HOST}/team/x0:v1")
    for number in range(1, 20):
        machine.store.tag(content, Reference.parse(f"{HOST}/team/x{number}:v1"))
    machine.enforce(offline=False)
    searched, is_over = list[str](), threading.Event()

    def wait(_: Any, name: str, *__: Any) -> Any:
        searched.append(name)
        is_over.wait(60)
        raise SignatureError("it has none")

    monkeypatch.setattr(PolicyGate, "_search_registry", wait)
    monkeypatch.setattr(collection.run_bounded, "__defaults__", (0.05,))
    with pytest.raises(SignatureError):
        machine.read(f"{HOST}/team/x0:v1")
    assert len(searched) == 1
    is_over.set()


# A statement of a derivation


def derive(machine: Machine, subject: Descriptor) -> tuple[Manifest, Manifest]:
    """Store a statement about a manifest, and an AImage with the type of one, under names."""
    recipe = DerivationRecipe(Operation.CAST, dtype="f16")
    derivation = Derivation(Digest("sha256", "a" * 64), recipe, "round-v1")
    honest, payload = build_referrer(derivation, subject)
    machine.push(honest.layers[0].media_type, payload)
    machine.push(mediatype.OCI_EMPTY, EMPTY)
    layer = machine.push(mediatype.AIMAGE_FILE, b"unsigned weights").to_json()
    layer["annotations"] = {mediatype.NAME: "a"}
    posing = Manifest.build(
        {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_MANIFEST,
            "artifactType": lineage.TYPE,
            "config": machine.push(mediatype.AIMAGE_CONFIG, b"{ }").to_json(),
            "layers": [honest.layers[0].to_json(), layer],
            "subject": subject.to_json(),
        }
    )
    for manifest in (honest, posing):
        name = f"{NAME.removesuffix(':v1')}@{manifest.digest}"
        machine.write_document(name, manifest.media_type, manifest.raw)
    return honest, posing


def test_a_statement_is_one_by_its_content(machine: Machine) -> None:
    honest, posing = derive(machine, machine.create())
    machine.enforce("*")
    machine.store.open(honest.descriptor).close()
    document = json.loads(honest.raw)
    config, (layer,) = document["config"], document["layers"]
    changes: list[dict[str, Any]] = [
        {"artifactType": mediatype.AIMAGE_MANIFEST},
        {"config": machine.push(mediatype.AIMAGE_CONFIG, b"{ }").to_json()},
        {"config": config | {"digest": layer["digest"]}},
        {"layers": [layer, layer]},
        {"layers": []},
        {"layers": [layer | {"mediaType": mediatype.AIMAGE_FILE}]},
        {"layers": [layer | {"size": lineage.MAX_STATEMENT + 1}]},
    ]
    others = [Manifest.build(document | change) for change in changes]
    for manifest in (posing, *others):
        machine.write_document(NAME, manifest.media_type, manifest.raw)
        with pytest.raises(SignatureError):
            machine.store.open(manifest.descriptor)


def test_a_model_with_the_type_of_a_statement_is_not_copied(machine: Machine) -> None:
    GATES.clear()
    machine.create("team/x:v1")
    machine.sign("team/x:v1")
    honest, posing = derive(machine, machine.store.resolve(Reference.parse("team/x:v1")))
    for manifest in (honest, posing):
        name = f"team/x@{manifest.digest}"
        machine.write_document(name, manifest.media_type, manifest.raw)
    target_store = ImageLayout(machine.home / "target")
    options = ClientOptions(docker_config=machine.home)
    with serving_stores(machine.store, target_store) as (first, second):
        machine.enforce(f"{first}/*", offline=False)
        machine.use_policy()
        source, target = (Reference.parse(f"{host}/team/x:v1") for host in (first, second))
        transfer(source, target, options)
    assert target_store.exists(honest.descriptor)
    assert not target_store.exists(posing.descriptor)
    assert not target_store.exists(posing.layers[-1])


# The default registry


def test_the_default_registry_is_a_part_of_names(machine: Machine) -> None:
    GATES.clear()
    content = machine.create("team/x:v1")
    short, store = Reference.parse("x:v1"), ImageLayout(machine.home / "pulled")
    with serving_stores(machine.store) as (host,):
        options = ClientOptions(docker_config=machine.home, default_registry=f"{host}/team")
        pull(short, store, options)
    # For a policy that comes later
    assert store.list_origins(content.digest) == {f"{host}/team/x"}
    machine.enforce(f"{host}/team/*")
    machine.use_policy()
    with pytest.raises(SignatureError):
        read_aimage(store, short)


def test_the_aimage_of_a_mountable_image_is_judged_by_the_whole_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, small_store: Path
) -> None:
    asked = list[str]()
    monkeypatch.setattr(
        PolicyGate, "admit_remote", lambda _, __, reference, *args: asked.append(reference.name)
    )
    GATES.clear()
    copy_store(small_store, machine.store.root)
    with serving_stores(ImageLayout(machine.home / "served")) as (host,):
        name = f"{host}/team/x:v1"
        machine.store.tag(machine.store.resolve(Reference.parse("small")), Reference.parse(name))
        options = ClientOptions(docker_config=machine.home, default_registry=f"{host}/team")
        push(machine.store, Reference.parse(name), options, dialect=MOUNTABLE)
        machine.enforce("other/*")
        machine.use_policy()
        short = Reference.parse("x:v1")
        pull(short, ImageLayout(machine.home / "pulled"), options)
        resolve_changed(short, options, None)
    # The index, the image and the AImage, by each
    assert set(asked) == {f"{host}/team/x"}


@pytest.mark.parametrize("kind", ["statement", "tag"])
def test_what_is_named_as_a_signature_is_not_saved_past_the_policy(
    machine: Machine, kind: str
) -> None:
    GATES.clear()
    content = machine.create()
    machine.sign()
    honest, posing = derive(machine, content)
    if kind == "tag":
        # That of older signatures
        posing = Manifest.build({**json.loads(posing.raw), "artifactType": ""})
        name = f"{HOST}/team/x:{build_signature_tag(content.digest)}"
        machine.write_document(name, posing.media_type, posing.raw)
    machine.enforce("*")
    machine.use_policy()
    saved = save(machine.store, [Reference.parse(NAME)], machine.home / "saved.tar")
    data = (machine.home / "saved.tar").read_bytes()
    assert len(saved.names) == 3 and honest.digest.encoded.encode() in data
    assert posing.digest.encoded.encode() not in data and b"unsigned weights" not in data


# What indexes list


def write_index(machine: Machine, name: str, *children: Descriptor) -> Descriptor:
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX}
    raw = encode(document | {"manifests": [child.to_json() for child in children]})
    return machine.write_document(name, mediatype.OCI_INDEX, raw)


@pytest.mark.parametrize("loss", ["removed", "moved", "renamed"])
def test_the_name_of_a_removed_index_counts_for_its_manifests(machine: Machine, loss: str) -> None:
    GATES.clear()
    content, name = machine.create("mine:v1"), Reference.parse(NAME)
    missing = Descriptor.of(mediatype.OCI_MANIFEST, b"of another platform")
    inner = write_index(machine, "inner:v1", missing, content)
    machine.store.untag(Reference.parse("inner:v1"))
    index = write_index(machine, NAME, missing, inner)
    if loss == "moved":
        machine.store.tag(machine.create("newer:v1", b"newer weights"), name)
    elif loss == "renamed":
        # Its earlier names are its manifests', too
        machine.store.tag(index, Reference.parse("other:v1"))
        machine.store.untag(name)
        machine.store.untag(Reference.parse("other:v1"))
    else:
        machine.store.untag(name)
    assert f"{HOST}/team/x" in machine.store.list_origins(content.digest)
    machine.use_policy()
    machine.enforce()
    with pytest.raises(SignatureError):
        read_aimage(machine.store, MINE)


def test_the_origins_of_a_removed_index_count_for_its_manifests(machine: Machine) -> None:
    content = machine.create("mine:v1")
    index = write_index(machine, "x:v1", content)
    # As a pull with a default registry records it
    machine.store.add_origins(index.digest, [NAME])
    machine.store.untag(Reference.parse("x:v1"))
    assert machine.store.list_origins(content.digest) == {f"{HOST}/team/x", "x"}


def test_an_index_that_is_nested_too_deep_hides_no_other_manifest(machine: Machine) -> None:
    content = machine.create("mine:v1")
    deep = write_index(machine, "deep:v1", content)
    for _ in range(MAX_DEPTH + 1):
        deep = write_index(machine, "deep:v1", deep)
    write_index(machine, NAME, deep, content)
    machine.store.untag(Reference.parse("deep:v1"))
    machine.enforce()
    with pytest.raises(SignatureError):
        read_aimage(machine.store, MINE)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_signed_index_in_the_store_admits_its_manifests_in_any_order(
    machine: Machine, is_first: bool
) -> None:
    content = machine.create(f"{HOST}/team/own:v1")
    index = write_index(machine, NAME, content)
    bundle = sign_with(create_signer("signer"), Format.BUNDLE)(build_cosign_statement(index.digest))
    with unchecked():
        # The index alone is signed.
        _attach_bundle(machine.store, Reference.parse(NAME), index, bundle, COSIGN_SIGN)
    unsigned = machine.create(f"{HOST}/team/unsigned:v1", b"other weights")
    machine.enforce()
    contents = [content, index] if is_first else [index, content]
    for each in contents:
        machine.store.open(each).close()
    machine.read(f"{HOST}/team/own:v1")
    with pytest.raises(SignatureError):
        machine.store.open(unsigned)


def test_a_server_under_a_policy_lists_and_gives_out_statements(machine: Machine) -> None:
    content = machine.create("team/x:v1")
    recipe = DerivationRecipe(Operation.CAST, dtype="f16")
    derivation = Derivation(Digest("sha256", "a" * 64), recipe, "round-v1")
    with machine.store.lease() as lease:
        keep_derivation(machine.store, lease, content, derivation)
    machine.sign("team/x:v1")
    machine.enforce("team/*")
    options = ClientOptions(docker_config=machine.home)
    with serving_stores(machine.store) as (host,):
        name = Reference.parse(f"{host}/team/x:v1")
        # The server asks, the client does not
        with Repository(name, options) as repository:
            (statement,) = list_statements(repository, content.digest)
            assert read_derivation(repository, content) == derivation
            # Of a server that has not read its manifest since it was started
            manifest, payload = build_referrer(derivation, content)
            assert manifest.digest == statement.digest
            machine.use_policy()
            with repository.open(manifest.layers[0]) as file:
                assert file.read() == payload


# Licences


@pytest.mark.parametrize("text", ["NOASSERTION", "none", " ", ""])
def test_an_annotation_that_states_nothing_leaves_the_licence_to_the_config(
    machine: Machine, text: str
) -> None:
    layer = machine.push(mediatype.AIMAGE_FILE, b"weights").to_json()
    layer["annotations"] = {mediatype.NAME: "a"}
    config = machine.push(mediatype.AIMAGE_CONFIG, encode({"license": "MIT"}))
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "artifactType": mediatype.AIMAGE_MANIFEST,
        "config": config.to_json(),
        "layers": [layer],
        "annotations": {mediatype.LICENSES: text},
    }
    machine.write_document(NAME, mediatype.OCI_MANIFEST, encode(document))
    machine.policy.write_text(json.dumps({"licenses": {"allow": ["MIT"]}}))
    machine.read()
    machine.policy.write_text(json.dumps({"licenses": {"allow": ["Apache-2.0"]}}))
    with pytest.raises(LicenseError, match="MIT is not allowed"):
        machine.read()


# Archives


def test_another_name_for_an_archive_lifts_no_demand_of_its_names(machine: Machine) -> None:
    GATES.clear()
    content = machine.create()
    machine.store.tag(content, Reference.parse("local/x:v1"))
    archive = machine.home / "model.tar"
    save(machine.store, [Reference.parse("local/x:v1"), Reference.parse(NAME)], archive)
    store = ImageLayout(machine.home / "loaded")
    load(store, archive, MINE)
    assert store.list_origins(content.digest) == {f"{HOST}/team/x", "local/x"}
    machine.use_policy()
    machine.enforce()
    with pytest.raises(SignatureError):
        read_aimage(store, MINE)
    other = ImageLayout(machine.home / "other")
    assert load(other, archive, MINE).problem
    assert not list(other.list_tags())
