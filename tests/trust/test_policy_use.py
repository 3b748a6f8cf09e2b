"""The policy as publishers and nodes meet it, with a registry of another program."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content.gate import GATES
from clowder_aimage.distribution.upstream import UpstreamRegistry
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.process import Aimage
from tests.registry_app import RegistryThread
from tests.store import copy_store
from tests.trust.key_files import write_key
from tests.trust.place import Place, write_policy


def test_what_is_signed_comes_in_and_is_used_without_its_registry(
    place: Place, registry: Any
) -> None:
    place.sign()
    place.enforce()
    mark = registry.mark()
    place.empty("pull", place.name, "-q")
    counts = registry.count(mark, place.repository)
    # A list of referrers, which this registry has under a tag, a signature, and its bundle.
    assert counts["GET manifest"] <= 4
    place.empty("export", place.name, "out", "-q")
    # The signature came with it: another version of the rule looks at it again.
    place.enforce(offline=True)
    place.empty("export", place.name, "again", "-q")
    place.empty("verify", place.name, "--signature", "--offline", "--key", place.public)
    assert place.empty("trust", "check", place.name, "--json").value["accepted"] is True


@pytest.mark.parametrize("form", ["bundle", "cosign-tag", "oms"])
def test_signatures_of_others_do_not_open_a_door(place: Place, tmp_path: Path, form: str) -> None:
    """Signatures of another digest, by another key, and by the key of another repository."""
    other = write_key(tmp_path, "other")[0]
    place.here("sign", place.name, "--key", other, "--as", form, "-q")
    place.enforce()
    refused = place.empty("pull", place.name, code=5)
    assert "by none of the expected keys" in refused.err
    place.sign("--as", form)
    place.empty("pull", place.name, "-q")


def test_a_form_that_the_rule_does_not_accept_does_not_open_a_door(place: Place) -> None:
    place.sign("--as", "cosign-tag")
    place.enforce(formats=["bundle"])
    place.empty("pull", place.name, code=5)
    place.enforce(formats=["bundle", "cosign-tag"])
    place.empty("pull", place.name, "-q")


def test_another_name_does_not_lift_a_demand(place: Place) -> None:
    """The name of another tool, a renamed tag, and a name of the registry that is open."""
    place.here("tag", place.name, "mine", "-q")
    place.enforce()
    for name in ("mine", place.name):
        place.here("export", name, "out", code=5)
    # The first name is removed: what it demanded is recorded.
    place.here("tag", "mine", "again", "-q")
    place.here("rm", place.name, "-q")
    place.here("rm", "mine", "-q")
    assert place.repository in place.here("export", "again", "out", code=5).err


def test_a_name_of_another_tool_is_judged_by_it(place: Place) -> None:
    index = place.here.store / "index.json"
    place.enforce("protected/*")
    text = index.read_text()
    index.write_text(
        text.replace('"small:latest"', '"protected/x:v1"').replace('"small"', '"protected/x:v1"')
    )
    place.here("export", "protected/x:v1", "out", code=5)


def test_a_signed_index_admits_its_manifests_and_no_other(place: Place, tmp_path: Path) -> None:
    from clowder_aimage.content import build_bytes_body
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.oci import Descriptor, mediatype
    from clowder_aimage.oci.manifest import encode
    from clowder_aimage.registry import ClientOptions, Repository
    from clowder_aimage.sign import _attach_bundle, sign_with
    from clowder_aimage.trust.acceptance import Format
    from clowder_aimage.trust.statement import COSIGN_SIGN, build_cosign_statement
    from tests.trust.key_files import create_signer

    child = ImageLayout(place.here.store).resolve(Reference.parse(place.name))
    index = encode(
        {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": [child.to_json()]}
    )
    reference = Reference.parse(f"{place.repository}:all")
    content = Descriptor.of(mediatype.OCI_INDEX, index)
    with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
        repository.push(content, build_bytes_body(index), reference)
        # Only the index is signed.
        statement = build_cosign_statement(content.digest)
        bundle = sign_with(create_signer("signer"), Format.BUNDLE)(statement)
        _attach_bundle(repository, reference, content, bundle, COSIGN_SIGN)
    place.enforce()
    place.empty("pull", f"{place.repository}@{child.digest}", code=5)
    place.empty("pull", str(reference), "-q")
    place.empty("export", str(reference), "out", "-q")
    # The rule changes: the signature of the index counts again.
    place.enforce(offline=True)
    place.empty("export", str(reference), "again", "-q")


def test_a_warning_does_not_refuse(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.enforce(mode="warn")
    place.empty("pull", place.name, "-q")
    assert any("would be refused" in message for message in caplog.messages)
    place.enforce(mode="enforce")
    place.empty("export", place.name, "out", code=5)


def test_a_policy_that_is_swapped_while_a_process_runs_counts_at_once(place: Place) -> None:
    place.sign()
    place.enforce()
    place.empty("pull", place.name, "-q")
    _, other = write_key(place.machine.parent, "other")
    write_policy(place.machine, "*", other)
    place.empty("export", place.name, "out", code=5)
    assert place.empty("trust", "check", place.name, code=5).out.startswith(f"{place.name}: refus")


def test_an_archive_brings_nothing_past_the_policy(place: Place) -> None:
    place.here("save", place.name, "-o", place.here.home / "model.tar", "-q")
    place.enforce()
    archive = place.here.home / "model.tar"
    place.empty("load", archive, code=5)
    # The archive states the name that it has been saved under.
    place.empty("load", archive, "--as", "renamed", code=5)
    assert place.empty("ls", "--json").value == []
    place.sign("--local")
    place.here("save", place.name, "-o", archive, "-q")
    place.enforce(offline=True)
    place.empty("load", archive, "-q")
    place.empty("export", place.name, "out", "-q")


def test_a_lower_store_brings_nothing_past_the_policy(place: Place, tmp_path: Path) -> None:
    lower = copy_store(place.here.store, tmp_path / "lower")
    place.enforce()
    upper = Aimage(tmp_path, tmp_path / "upper")
    upper.environment["AIMAGE_STORE"] = f"{tmp_path / 'upper'}:{lower}"
    upper("export", place.name, "out", code=5)


def test_the_rules_of_a_user_do_not_lift_those_of_the_machine(place: Place) -> None:
    place.enforce()
    config = place.here.home / "config" / "aimage" / "config.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps({"trust": {"rules": [{"pattern": "*", "mode": "off"}]}}))
    place.here("export", place.name, "out", code=5)
    place.lift()
    place.here("export", place.name, "out", "-q")
    # A configuration that may have a policy is not left out because it is malformed.
    config.write_text('{"trust": {')
    place.here("export", place.name, "again", code=2)
    config.write_text("{")
    GATES.clear()
    place.here("export", place.name, "again", "-q")


def test_enforcement_costs_three_small_requests(place: Place, registry: Any) -> None:
    place.sign()
    counts = []
    for policy in (False, True):
        if policy:
            place.enforce()
        store = Aimage(place.here.home, place.here.home / f"store-{policy}")
        mark = registry.mark()
        store("pull", place.name, "-q")
        counts.append(registry.count(mark, place.repository))
    more = counts[1] - counts[0]
    # The signature's manifest and its bundle. The list of referrers is one request with the API;
    # this registry refuses that, and has the list under a tag.
    assert more == {"GET referrer": 1, "GET manifest": 2, "GET blob": 1}


def test_signatures_travel_with_a_copy_and_a_push(place: Place, repository: str) -> None:
    place.sign()
    place.sign("--as", "cosign-tag")
    for target in (f"{repository}-copied:v1", f"{repository}-pushed:v1"):
        if "copied" in target:
            place.here("copy", place.name, target, "-q")
        else:
            place.enforce()
            place.empty("pull", place.name, "-q")
            place.empty("tag", place.name, target, "-q")
            place.empty("push", target, "-q")
            place.lift()
        for form in ("bundle", "cosign-tag") if "copied" in target else ("bundle",):
            place.here(*("verify", target, "--signature", "--key", place.public, "--form", form))


# Routes


@pytest.fixture
def served(place: Place) -> Any:
    """Return a registry that serves the store of a model without a signature as ``team/x``."""
    place.here("tag", "small", "team/x:v1", "-q")
    server = RegistryThread(ImageLayout(place.here.store))
    yield server.host
    server.close()


def fetch(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_registry_serves_what_its_policy_accepts_only(place: Place, served: str) -> None:
    place.enforce("team/*")
    base = f"http://{served}/v2/team/x"
    for path in ("manifests/v1", f"manifests/{place.digest}", f"blobs/{place.config}"):
        code, body = fetch(f"{base}/{path}")
        assert (code, json.loads(body)["errors"][0]["code"]) == (403, "DENIED"), path
    # Its publisher signs it in the store, or pushes it with its signature.
    place.here("sign", "team/x:v1", "--local", "--key", place.private, "-q")
    for path in ("manifests/v1", f"manifests/{place.digest}", f"blobs/{place.config}"):
        assert fetch(f"{base}/{path}")[0] == 200
    place.empty("pull", f"{served}/team/x:v1", "-q")


def test_a_push_brings_the_signature_before_the_tag(place: Place, tmp_path: Path) -> None:
    empty = ImageLayout(tmp_path / "registry")
    server = RegistryThread(empty)
    place.enforce("team/*")
    name = f"{server.host}/team/x:v1"
    place.here("tag", "small", name, "-q")
    place.here("push", name, "-q")
    assert fetch(f"http://{server.host}/v2/team/x/manifests/v1")[0] == 403
    place.here("sign", name, "--local", "--key", place.private, "-q")
    place.here("push", name, "-q")
    assert fetch(f"http://{server.host}/v2/team/x/manifests/v1")[0] == 200
    server.close()


def test_a_cache_fetches_and_serves_what_its_policy_accepts_only(
    place: Place, tmp_path: Path
) -> None:
    host, _, path = place.repository.partition("/")
    connection = ClientOptions(docker_config=tmp_path)
    upstream = UpstreamRegistry.parse(host, connection)
    server = RegistryThread(ImageLayout(tmp_path / "cache"), upstream)
    place.enforce()
    base = f"http://{server.host}/v2/{path}"
    assert fetch(f"{base}/manifests/v1")[0] == 403
    assert fetch(f"{base}/blobs/{place.config}")[0] == 403
    place.sign()
    assert fetch(f"{base}/manifests/v1")[0] == 200
    assert fetch(f"{base}/blobs/{place.config}")[0] == 200
    server.close()


def test_a_policy_without_its_libraries_refuses(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.sign()
    place.enforce()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    refused = place.empty("pull", place.name, code=2)
    assert "needs the extra [trust]" in refused.err


def test_a_registry_that_withholds_signatures_is_refused(
    place: Place, tmp_path: Path, repository: str
) -> None:
    """A mirror with the model and without its signature."""
    mirror = f"{repository}-mirror:v1"
    place.here("copy", place.name, mirror, "-q")
    place.sign()
    place.enforce()
    assert "has no signature" in place.empty("pull", mirror, code=5).err


def test_a_tag_that_moves_after_the_decision_brings_nothing(place: Place, tmp_path: Path) -> None:
    place.sign()
    place.enforce()
    place.empty("pull", place.name, "-q")
    other = Aimage(tmp_path, tmp_path / "other")
    model = tmp_path / "changed"
    place.empty("export", place.name, model, "-q")
    (model / "more.txt").write_text("more")
    other("create", "changed", model, "-q")
    other("tag", "changed", place.name, "-q")
    other("push", place.name, "-q")
    before = place.empty("show", place.name, "--json").value["digest"]
    place.empty("pull", place.name, code=5)
    assert place.empty("show", place.name, "--json").value["digest"] == before


def test_a_model_is_created_and_used_under_a_policy_for_all_names(place: Place) -> None:
    model = place.here.home / "model"
    place.here("export", "small", model, "-q")
    place.enforce("*")
    place.here("create", "mine", model, "-q")
    place.here("export", "mine", "out", code=5)
    place.here("sign", "mine", "--local", "--key", place.private, "-q")
    place.here("export", "mine", "out", "-q")
    place.here("tag", "mine", "yours", "-q")
    place.here("show", "yours")
    place.here("ls")
    place.here("gc")
    place.here("show", "yours")
    place.here("verify", "mine")
