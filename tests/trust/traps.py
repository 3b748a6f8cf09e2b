"""Situations in which no door may open, and what makes each of them right.

A trap prepares the world, in whose registry the model has no signature yet, and arranges the store
of a client that has the model.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.gate import unchecked
from clowder_aimage.engine.model_fetch import find
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_completeness
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.trust import simple_signing
from clowder_aimage.trust.bundle import MEDIA_TYPE
from clowder_aimage.trust.collection import DEADLINE, run_bounded
from clowder_aimage.trust.statement import build_cosign_statement
from tests.process import Aimage
from tests.trust.key_files import create_signer, write_key
from tests.trust.test_traps import TRAPS as BUNDLES
from tests.trust.world import REGISTRY, STORE, Outcome, World

OTHER = Digest.of(b"another manifest")


def nothing(*_: object) -> None:
    """Leave the world as it is."""


@dataclass(frozen=True)
class Trap:
    """A situation. ``mend`` makes it right; by default a good signature is added.

    ``at`` are the places in which it is one. With ``is_remote`` it is what a registry does, so that
    stores have no signatures. ``code`` is the exit code of a refusal: 5, or 2 for a policy that
    cannot be used. ``is_hidden``: it is no manifest, signed or not. ``says`` is in the reason of a
    refused pull.
    """

    name: str
    prepare: Callable[[World], object] = nothing
    at: tuple[str, ...] = (REGISTRY, STORE)
    is_remote: bool = False
    mend: Callable[[World], object] | None = lambda world: world.attach(world.sign())
    code: int = 5
    is_hidden: bool = False
    says: str = ""
    arrange: Callable[[World, Aimage], object] = nothing

    def refuses(self, outcome: Outcome) -> bool:
        """Return True if an outcome is a refusal, with the right code."""
        if self.code == 2:
            # A repair tells why it could not be done.
            is_told = "trust.yaml" in outcome.text
            return outcome.code == 2 or outcome.code <= -400 or (outcome.code == 5 and is_told)
        return outcome.is_refused or (self.is_hidden and outcome.code in (5, -404))


def _attach(build: Callable[[bytes, Digest], bytes]) -> Callable[[World], object]:
    def prepare(world: World) -> None:
        digest = world.subject.digest
        world.attach(build(build_cosign_statement(digest), digest))

    return prepare


def _tag(
    signer: str, digest: Digest | None = None, *, is_broken: bool = False
) -> Callable[..., None]:
    """Return the trap of a signature in cosign's older form."""

    def prepare(world: World) -> None:
        payload = simple_signing.build_payload(digest or world.subject.digest, world.repository)
        signature = create_signer(signer).sign(payload, "sha256")
        if is_broken:
            payload = payload.replace(b"critical", b"Critical")
        layer = simple_signing.TaggedSignature(signature).build_layer(payload)
        world.content.blobs[str(layer.digest)] = payload
        config = world.content.add_blob(mediatype.OCI_CONFIG, b"{}")
        _add_tagged(world, config, [layer])

    return prepare


def _add_tagged(world: World, config: Descriptor, layers: list[Descriptor]) -> None:
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": config.to_json(),
        "layers": [layer.to_json() for layer in layers],
    }
    tag = simple_signing.build_signature_tag(world.subject.digest)
    world.content.add(mediatype.OCI_MANIFEST, encode(document), tag)


def _put_model_under_the_tag(world: World) -> None:
    tag = simple_signing.build_signature_tag(world.subject.digest)
    world.content.tags[tag] = str(world.root.digest)


def _trust_the_key_elsewhere(world: World) -> None:
    _, other = write_key(world.policy.parent, "other")
    rules = [
        {"pattern": f"{world.registry.host}/other/*", "keys": [str(other)]},
        {"pattern": f"{world.registry.host}/team/*", "keys": [str(world.public)]},
        {"pattern": "team/*", "keys": [str(world.public)]},
    ]
    world.write_policy(rules=rules)
    world.attach(world.sign("other"))


def _attach_to_another(world: World) -> None:
    """Attach a good bundle to another manifest, and list it as a referrer of the model."""
    other = world.content.add(mediatype.OCI_MANIFEST, _build_empty(world, "another"))
    manifest = world.attach(world.sign(), other)
    extra = {"artifactType": MEDIA_TYPE}
    world.registry.listed = [replace(manifest.descriptor, extra=extra)]


def _build_empty(world: World, title: str) -> bytes:
    config = world.content.add_blob(mediatype.OCI_EMPTY, b"{}")
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": config.to_json(),
        "layers": [],
        "annotations": {"title": f"{world.label} {title}"},
    }
    return encode(document)


def _sign_index(world: World) -> None:
    """Sign an index that lists the model, which has a name of its own."""
    listed = [world.root.to_json()]
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": listed}
    index = world.content.add(mediatype.OCI_INDEX, encode(document), "all")
    world.attach(world.sign(digest=index.digest), index)


def _withhold_bundle(world: World) -> None:
    """Leave out the bytes of a good bundle."""
    manifest = world.attach(world.sign())
    del world.content.blobs[str(manifest.layers[0].digest)]


def _list_many(world: World) -> None:
    """10,000 referrers, of which the last is a good signature."""
    entry = Descriptor(mediatype.OCI_MANIFEST, OTHER, 100)
    world.registry.listed = [
        replace(entry, digest=Digest.of(b"%d" % number), extra={"artifactType": "application/x"})
        for number in range(10_000)
    ]
    world.attach(world.sign())


def _break_second_page(world: World) -> None:
    world.registry.page, world.registry.broken = 1, {1: 500}
    world.attach(world.sign("other"))
    world.attach(world.sign())


def _mend_page(world: World) -> None:
    """Let the second page be answered: it has the good signature."""
    world.registry.broken = {}


def _withhold(world: World) -> None:
    """As a mirror or a peer that has the model, and not its signature, or hides it."""
    world.attach(world.sign())
    world.registry.withholds = True


def _stall(world: World) -> None:
    world.attach(world.sign())
    world.registry.slow = True
    # Seconds, instead of 10
    run_bounded.__defaults__ = (0.05,)


def _answer_rightly(world: World) -> None:
    """Let the registry have the good signature, and no referrers of others."""
    registry = world.registry
    registry.listed, registry.broken, registry.page = [], {}, 1000
    registry.withholds = registry.slow = False
    registry.release()
    run_bounded.__defaults__ = (DEADLINE,)
    world.attach(world.sign())


def _dress(world: World, kind: str) -> None:
    """Give the model the type of a signature."""
    document = json.loads(world.manifest.raw)
    document["artifactType"] = kind
    document["subject"] = Descriptor(mediatype.OCI_MANIFEST, OTHER, 100).to_json()
    posing = Manifest.build(document)
    del world.content.documents[str(world.root.digest)]
    world.root = world.subject = world.content.add(posing.media_type, posing.raw, "v1")
    world.manifest = posing


def _restrict(world: World) -> None:
    world.attach(world.sign())
    world.enforce(formats=["cosign-tag"])


def _spoil(text: str) -> Callable[[World], None]:
    return lambda world: (world.attach(world.sign()), world.policy.write_text(text))  # type: ignore[return-value]


def _replace_key(world: World) -> None:
    """Let the policy name another key than that of the signature."""
    world.attach(world.sign())
    world.enforce(keys=[str(write_key(world.policy.parent, "other")[1])])


def _mend_policy(world: World) -> None:
    world.enforce()


# What is in a store


def _rename(world: World, here: Aimage) -> None:
    """Give the model an open name while the policy holds, and remove the other one."""
    store, closed = ImageLayout(here.store), Reference.parse(world.name)
    content = store.resolve(closed)
    world.use_policy()
    store.tag(content, world.open_name())
    store.untag(closed)


def _name_by_another_tool(world: World, here: Aimage) -> None:
    """Name the model in index.json only, as skopeo does."""
    _edit_index(here, lambda entry: {"annotations": {mediatype.REF_NAME: _get_name(entry)}})


def _name_as_file(media_type: str) -> Callable[[World, Aimage], None]:
    """Return the arrangement of an entry of index.json that is not one of a manifest."""
    return lambda _, here: _edit_index(here, lambda entry: {"mediaType": media_type})


def _edit_index(here: Aimage, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    index = here.store / "index.json"
    document = json.loads(index.read_text())
    for entry in document["manifests"]:
        if "/" in _get_name(entry):
            entry |= change(entry)
    index.write_text(json.dumps(document))
    shutil.rmtree(here.store / ".aimage")


def _get_name(entry: dict[str, Any]) -> str:
    return str(entry["annotations"][mediatype.REF_NAME])


def _list_in_index(*, is_early: bool) -> Callable[[World, Aimage], None]:
    """Return the arrangement of a manifest that came with an index, and then got an open name.

    It gets that before the policy holds, or afterwards.
    """

    def arrange(world: World, here: Aimage) -> None:
        store, closed = ImageLayout(here.store), Reference.parse(world.name)
        raw = encode(
            {
                "schemaVersion": 2,
                "mediaType": mediatype.OCI_INDEX,
                "manifests": [world.root.to_json()],
            }
        )
        index = Descriptor.of(mediatype.OCI_INDEX, raw)
        with unchecked():
            store.push(index, build_bytes_body(raw))
            store.tag(index, replace(closed, tag="all"))
            store.untag(closed)
        if not is_early:
            world.use_policy()
        with unchecked() if is_early else contextlib.nullcontext():
            store.tag(world.root, world.open_name())

    return arrange


def _use_before(world: World, here: Aimage) -> None:
    """Use the model before the policy holds: what was read then is in memory, and in files."""
    store, name = ImageLayout(here.store), Reference.parse(world.name)
    with unchecked():
        find(store, name)
        check_completeness(store, store.resolve(name))
        ModelDescriptions(store).find(store.resolve(name))
        here("show", world.name)


# Bundles that do not count have the names of the situations of test_traps
TRAPS = [
    Trap("unsigned"),
    *(Trap(f"a bundle {name}", _attach(build)) for name, build in BUNDLES.items()),
    Trap(
        "key of another repository",
        _trust_the_key_elsewhere,
        mend=lambda world: world.attach(world.sign()),
    ),
    Trap("older form by another key", _tag("other")),
    Trap("older form of another digest", _tag("signer", OTHER)),
    Trap("older form, broken", _tag("signer", is_broken=True)),
    Trap("the model as its older form", _put_model_under_the_tag),
    Trap("a form that is not accepted", _restrict, mend=_mend_policy),
    Trap("another key in the policy", _replace_key, mend=_mend_policy),
    Trap(
        "a bundle of another subject",
        _attach_to_another,
        is_remote=True,
        says="its manifest has another subject",
    ),
    Trap("a bundle without its bytes", _withhold_bundle, is_remote=True),
    Trap(
        "10,000 referrers",
        _list_many,
        mend=_answer_rightly,
        is_remote=True,
        says="has over 1000 referrers",
    ),
    Trap("a second page that fails", _break_second_page, mend=_mend_page, is_remote=True),
    Trap("withheld", _withhold, mend=_answer_rightly, is_remote=True, says="has no signature"),
    Trap(
        "referrers that never end",
        _stall,
        mend=_answer_rightly,
        is_remote=True,
        says="were not read within 0.05 seconds",
    ),
    Trap("dressed as a bundle", lambda world: _dress(world, MEDIA_TYPE)),
    Trap("dressed as an older signature", lambda world: _dress(world, simple_signing.MEDIA_TYPE)),
    Trap("renamed", at=(STORE,), arrange=_rename),
    Trap("named by another tool", at=(STORE,), arrange=_name_by_another_tool),
    Trap(
        "named as a file",
        at=(STORE,),
        arrange=_name_as_file("application/octet-stream"),
        mend=None,
        is_hidden=True,
    ),
    Trap("index signed, not its manifest", _sign_index, at=(REGISTRY,)),
    Trap(
        "named with a parameter",
        at=(STORE,),
        arrange=_name_as_file(f"{mediatype.OCI_MANIFEST}; charset=utf-8"),
        mend=None,
        is_hidden=True,
    ),
    Trap(
        "named as JSON",
        at=(STORE,),
        arrange=_name_as_file("application/json"),
        mend=None,
        is_hidden=True,
    ),
    Trap("came with an index", at=(STORE,), arrange=_list_in_index(is_early=False)),
    Trap("came with an index, named early", at=(STORE,), arrange=_list_in_index(is_early=True)),
    Trap("used before", at=(STORE,), arrange=_use_before),
    Trap("policy without text", _spoil(""), mend=_mend_policy, code=2),
    Trap("policy that is malformed", _spoil("{"), mend=_mend_policy, code=2),
    Trap("policy without rules", _spoil("rules: []"), mend=_mend_policy, code=2),
    Trap("policy without signers", _spoil("rules: [{pattern: '*'}]"), mend=_mend_policy, code=2),
    Trap(
        "policy that contradicts itself",
        _spoil("rules: [{pattern: '*', mode: 'off'}, {pattern: 'x/*', mode: 'off'}]"),
        mend=_mend_policy,
        code=2,
    ),
]
