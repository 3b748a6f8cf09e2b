"""A model in a registry and in a store, a policy that demands its signature, and its signer."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.config.trust_policy import UserFiles, _CurrentGate
from clowder_aimage.content.gate import GATES, unchecked
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.artifact import EMPTY, EMPTY_CONFIG, build_artifact
from clowder_aimage.registry import ClientOptions
from clowder_aimage.sign import sign_with
from clowder_aimage.trust.acceptance import Format
from clowder_aimage.trust.bundle import MEDIA_TYPE
from clowder_aimage.trust.statement import build_cosign_statement
from tests.lora_file import write_lora
from tests.process import Aimage
from tests.trust.key_files import create_signer, write_key
from tests.trust.memory_registry import Content, MemoryRegistry

# 64 x 64 black pixels
_PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000400000004008000000008f022e020000001b4944415478daedc181"
    "00000000c3a0f953dfe00455010000007c0310400001bd3cb78f0000000049454e44ae426082"
)
_REFUSALS = ("is refused by rule", "of no manifest that the policy", "has no name in the store")
# Where doors read a model
REGISTRY, STORE = "registry", "store"
_FILES = UserFiles(lambda: None, lambda: False)


@dataclass(frozen=True)
class Outcome:
    """An exit code of a verb, or a status of HTTP below 0, with all that was told."""

    code: int
    text: str
    data: bytes = b""

    @property
    def is_refused(self) -> bool:
        is_told = any(words in self.text for words in _REFUSALS)
        return self.code == -403 or (self.code == 5 and is_told)


@dataclass(frozen=True)
class Snapshot:
    """To what a refusal adds nothing: names and blobs of a store, files, and the registry."""

    names: frozenset[str]
    blobs: frozenset[str]
    files: frozenset[str]
    registry: frozenset[str]

    def includes(self, other: Snapshot) -> bool:
        pairs = zip(astuple(other), astuple(self), strict=True)
        return all(found <= known for found, known in pairs)


class World:
    """The model of one situation.

    It is ``name`` in the registry, of a repository and with a digest that no other situation has,
    because what admits a manifest counts for all names of it. ``names`` are the words of verbs.
    """

    def __init__(
        self, registry: MemoryRegistry, source: ImageLayout, home: Path, policy: Path, label: str
    ) -> None:
        self.registry, self.home, self.policy, self.label = registry, home, policy, label
        self.path = f"team/{label}"
        self.locate(is_local=False)
        self.public = write_key(policy.parent, "signer")[1]
        self.model, self.picture = source.root.parent / "model", home / "picture.png"
        self.picture.write_bytes(_PICTURE)
        self.adapter = write_lora(home / "adapter.safetensors")
        registry.reset()
        self.content, self._base = Content(), Content()
        self._add_model(source, self._base, "latest", "base")
        self.manifest = self._add_model(source, self.content, "v1", label)
        self.root = self.manifest.descriptor
        self.subject = self.root
        registry.repositories[self.path] = self.content
        # In stores
        self.has_signatures = True
        self._count = 0

    def _add_model(self, source: ImageLayout, content: Content, tag: str, title: str) -> Manifest:
        """Add the model of a store, whose manifest is another one for each situation."""
        root = content.add_stored(source, "small", tag)
        document = json.loads(content.documents.pop(str(root.digest))[1])
        document["annotations"] = {mediatype.TITLE: title}
        manifest = Manifest.build(document)
        content.add(manifest.media_type, manifest.raw, tag)
        return manifest

    def locate(self, *, is_local: bool) -> None:
        """Use the names of the registry, or those without a host that a store may serve."""
        self.repository = self.path if is_local else f"{self.registry.host}/{self.path}"
        self.name = f"{self.repository}:v1"

    def open_name(self) -> Reference:
        """Let doors use another name, which no rule is for, and return that."""
        is_local = self.repository == self.path
        self.path = f"open/{self.label}"
        self.locate(is_local=is_local)
        return Reference.parse(self.name)

    def close_name(self) -> None:
        """Let doors use the name of the rules."""
        self.path = f"team/{self.label}"

    @property
    def layers(self) -> list[Descriptor]:
        return [*self.manifest.layers]

    # The policy

    def enforce(self, **rule: Any) -> None:
        """Demand signatures of the model in the registry and below its path in a store."""
        patterns = (f"{self.registry.host}/team/*", "team/*")
        fields = {"keys": [str(self.public)], **rule}
        self.write_policy(rules=[{"pattern": pattern, **fields} for pattern in patterns])

    def write_policy(self, **document: Any) -> None:
        self.policy.write_text(json.dumps(document))

    def lift(self) -> None:
        """Remove the policy, for processes that begin afterwards."""
        self.policy.unlink(missing_ok=True)
        GATES.clear()

    def use_policy(self) -> None:
        """Let this process follow the policy, as a server does."""
        gate = _CurrentGate(_FILES, lambda: ClientOptions(docker_config=self.home))
        GATES[:] = [gate.find_gate]

    # Signatures

    def sign(self, signer: str = "signer", digest: Digest | None = None) -> bytes:
        """Return a bundle for the model, or for another digest."""
        statement = build_cosign_statement(digest or self.subject.digest)
        return sign_with(create_signer(signer), Format.BUNDLE)(statement)

    def attach(self, bundle: bytes, subject: Descriptor | None = None) -> Manifest:
        """Attach a bundle to the model in the registry."""
        manifest = build_artifact(
            MEDIA_TYPE,
            [self.content.add_blob(MEDIA_TYPE, bundle)],
            subject or self.subject,
            {"dev.sigstore.bundle.content": "dsse-envelope"},
        )
        self.content.add_blob(mediatype.OCI_EMPTY, EMPTY)
        assert manifest.config.digest == EMPTY_CONFIG.digest
        self.content.add(manifest.media_type, manifest.raw)
        return manifest

    def add_unsigned(self) -> Descriptor:
        """Add another manifest of the repository, without a signature."""
        document = json.loads(self.manifest.raw)
        document["annotations"] = {mediatype.TITLE: f"{self.label}, unsigned"}
        manifest = Manifest.build(document)
        return self.content.add(manifest.media_type, manifest.raw)

    def list_fetched(self) -> list[str]:
        """Return the blobs of the model that the registry was asked for."""
        children = {str(child.digest) for child in self.manifest.children}
        paths = (seen.path for seen in self.registry.seen if seen.method == "GET")
        return [path for path in paths if path.rpartition("/")[2] in children]

    # Clients

    def start(self, *, has_model: bool = False) -> Aimage:
        """Return the command line in a new home, with the model in the store, or an empty one."""
        self._count += 1
        home = self.home / f"{self.label}-{self._count}"
        home.mkdir(parents=True)
        here = Aimage(home, home / "store")
        if has_model:
            store = ImageLayout(here.store)
            self.content.fill(store, self.name, has_referrers=self.has_signatures)
            self._base.fill(store, "base:latest")
        return here

    def look(self, here: Aimage) -> Snapshot:
        """Return what there is, without policies."""
        names, blobs = set[str](), set[str]()
        if (here.store / "index.json").exists():
            with unchecked():
                entries = ImageLayout(here.store).iter_entries()
                # What a signature is named is not asked.
                names = {name for name, _ in entries if "sha256" not in name}
            blobs = {path.name for path in (here.store / "blobs").rglob("*") if path.is_file()}
        layers = {child.digest.encoded for child in self.manifest.children}
        files = {str(path) for path in here.home.glob("out*")}
        registry = {
            f"{name} {part}"
            for name, content in self.registry.repositories.items()
            for part in (*content.tags, *content.documents, *content.blobs)
        }
        return Snapshot(
            frozenset(names), frozenset(blobs & layers), frozenset(files), frozenset(registry)
        )
