"""A licence that the policy refuses: no byte of a weight is asked for, at any door."""

from __future__ import annotations

import io
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.distribution.upstream import UpstreamRegistry
from clowder_aimage.engine import frame, job_process
from clowder_aimage.errors import LicenseError
from clowder_aimage.exporter import image
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_stored
from clowder_aimage.node import daemon
from clowder_aimage.node import node as node_module
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry import ClientOptions, Repository
from tests.abridged import abridge
from tests.node.node_run import LocalNode
from tests.process import Aimage
from tests.registry_app import RegistryThread
from tests.store import copy_store
from tests.trust.doors import fetch
from tests.trust.key_files import write_key
from tests.worker.conftest import LocalWorker, answer_to

# Verbs that read a model of the store, or of its registry.
CALLS = (
    ("attach", ("NAME", "--get", "-o", "out")),
    ("bom", ("NAME",)),
    ("bom", ("NAME", "--remote")),
    ("bom", ("NAME", "--attach")),
    ("blob fetch", ("REPOSITORY@BLOB", "-o", "out")),
    ("convert", ("NAME", "converted", "--dtype", "f16")),
    ("copy", ("NAME", "OTHER")),
    ("diff", ("NAME", "NAME")),
    ("embed", ("NAME", "text")),
    ("export", ("NAME", "out")),
    ("manifest fetch", ("NAME",)),
    ("manifest fetch", ("REPOSITORY@DIGEST",)),
    ("pull", ("NAME",)),
    ("pull", ("REPOSITORY@DIGEST",)),
    ("run", ("NAME", "a", "picture")),
    ("save", ("NAME", "-o", "out.tar")),
    ("show", ("NAME",)),
    ("show", ("NAME", "--remote")),
    ("tag", ("--remote", "NAME", "moved")),
    ("validate", ("NAME",)),
)
OPEN = {"allow": ["Apache-2.0", "MIT"]}
_BLOB = re.compile(r'"GET /v2/(\S+)/blobs/(sha256:[0-9a-f]+)')


class Market:
    """A registry with the model ``name``, whose licence is CC-BY-NC-4.0, and a policy."""

    def __init__(self, here: Aimage, name: str, registry: Any, machine: Path) -> None:
        self.here, self.name, self.registry, self.machine = here, name, registry, machine
        self.repository = name.rpartition(":")[0]
        self.empty = Aimage(here.home, here.home / "empty")
        self.digest = here("resolve", name).line
        manifest = json.loads(here("manifest", "fetch", name).out)
        self.config: str = manifest["config"]["digest"]

    def write(self, licenses: Any = None, **document: Any) -> None:
        own = {} if licenses is None else {"licenses": licenses}
        self.machine.write_text(json.dumps(own | document))

    def list_fetched(self, mark: int) -> set[str]:
        """Return the blobs of the repository that were asked for since ``mark``."""
        path = self.repository.partition("/")[2]
        text = self.registry.log()[mark:].decode()
        return {digest for found, digest in _BLOB.findall(text) if found == path}


@pytest.fixture(scope="session")
def restricted_store(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Return a store with ``closed``, of the licence CC-BY-NC-4.0, and ``none``, without one."""
    home = tmp_path_factory.mktemp("restricted")
    here, model = Aimage(home, home / "store"), abridge(tiny, home / "model")
    (model / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# A model\n")
    here("create", "closed", model, "-q")
    (model / "README.md").unlink()
    here("create", "none", model, "-q")
    here("create", "open", model, "--license", "MIT OR CC-BY-NC-4.0", "-q")
    return here.store


@pytest.fixture
def market(
    aimage: Any,
    restricted_store: Path,
    repository: str,
    registry: Any,
    without_machine_policy: Path,
) -> Market:
    if registry.log is None:
        pytest.skip("this registry keeps no log to count in")
    here: Aimage = aimage()
    copy_store(restricted_store, here.store)
    name = f"{repository}:v1"
    here("tag", "closed", name, "-q")
    here("push", name, "-q")
    return Market(here, name, registry, without_machine_policy)


def test_no_verb_asks_for_a_weight(market: Market) -> None:
    market.write(OPEN)
    words = {
        "NAME": market.name,
        "OTHER": f"{market.repository}-other:v1",
        "REPOSITORY@DIGEST": f"{market.repository}@{market.digest}",
        "REPOSITORY@BLOB": f"{market.repository}@{market.config}",
    }
    mark = market.registry.mark()
    for verb, call in CALLS:
        # With the model in the store, and without it.
        for aimage in (market.here, market.empty):
            done = aimage.attempt(*verb.split(), *(words.get(word, word) for word in call))
            refused = "CC-BY-NC-4.0 is not allowed" in done.err or "of no manifest that" in done.err
            is_absent = aimage is market.empty and done.code == 3
            assert is_absent or (done.code == 5 and refused), (verb, call, done)
    assert not market.list_fetched(mark)
    assert not list((market.empty.store / "blobs").rglob("*/*"))
    market.write({"allow": ["CC-BY-NC-4.0"]})
    market.empty("pull", market.name, "-q")
    assert len(market.list_fetched(mark)) > 3


def test_a_refusal_says_which_licence_which_rule_and_what_to_do(market: Market) -> None:
    market.write(OPEN)
    err = market.empty("pull", market.name, code=5).err
    assert (
        f"{market.name} is refused by the licences in {market.machine}: it states the licence "
        "'cc-by-nc-4.0', and CC-BY-NC-4.0 is not allowed"
    ) in " ".join(err.split())
    assert "aimage trust check" in err
    rule = {"pattern": f"{market.repository}*", "licenses": {"deny": ["CC-BY-NC-*"]}}
    market.write(rules=[rule])
    err = market.here("export", market.name, "out", code=5).err
    assert f"by the licences in rule 1 of {market.machine}" in " ".join(err.split())
    assert "CC-BY-NC-4.0 is denied by 'CC-BY-NC-*'" in " ".join(err.split())
    shown = market.here("trust", "check", market.name, code=5).out
    assert "stated licence: cc-by-nc-4.0" in shown
    value = market.empty("trust", "check", market.name, "--json", code=5).value
    assert value["licenses"] == ["cc-by-nc-4.0"]
    assert value["accepted"] is False
    assert value["rules"][0]["licenses"][0]["rule"] == f"rule 1 of {market.machine}"
    market.write({"mode": "warn", **OPEN})
    assert market.here("trust", "check", market.name, "--json").value["accepted"] is True


def test_an_accepted_licence_costs_one_small_request(market: Market) -> None:
    counts: list[Any] = []
    for licenses in ({"mode": "off"}, {"allow": ["CC-BY-NC-*"]}):
        market.write(licenses)
        mark = market.registry.mark()
        store = Aimage(market.here.home, market.here.home / f"store-{len(counts)}")
        store("pull", market.name, "-q")
        counts.append(market.registry.count(mark, market.repository))
    assert counts[1] - counts[0] == {"GET blob": 1}


def test_a_store_that_lacks_the_config_is_completed(market: Market) -> None:
    market.write({"allow": ["CC-BY-NC-*"]})
    market.empty("pull", market.name, "-q")
    algorithm, _, encoded = market.config.partition(":")
    config = market.empty.store / "blobs" / algorithm / encoded
    config.unlink()
    market.empty("export", market.name, "out", code=3)
    market.empty("pull", market.name, "-q")
    assert config.exists()
    market.empty("export", market.name, "out", "-q")


def test_licences_need_no_library_of_signatures(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cryptography", "sigstore"):
        monkeypatch.setitem(sys.modules, name, None)
    market.write(OPEN)
    market.here("export", "open", "out", "-q")
    market.here("export", "closed", "more", code=5)


def test_a_warning_does_not_refuse(market: Market, caplog: pytest.LogCaptureFixture) -> None:
    market.write({"mode": "warn", **OPEN})
    market.empty("pull", market.name, "-q")
    assert any("CC-BY-NC-4.0 is not allowed" in message for message in caplog.messages)


def test_what_states_no_licence_is_unknown(market: Market) -> None:
    market.write({"deny": ["CC-BY-NC-4.0"]})
    assert "it states no licence" in market.here("export", "none", "out", code=5).err
    market.write({"deny": ["CC-BY-NC-4.0"], "unknown": "allow"})
    market.here("export", "none", "out", "-q")
    # One of two alternatives
    market.here("export", "open", "more", "-q")
    market.here("export", "closed", "other", code=5)


def test_another_name_does_not_lift_a_licence(market: Market) -> None:
    market.write(rules=[{"pattern": f"{market.repository}*", "licenses": OPEN}])
    market.here("tag", market.name, "mine", "-q")
    market.here("rm", market.name, "-q")
    assert market.repository in market.here("export", "mine", "out", code=5).err
    # Nor a rule of the user
    config = market.here.home / "config" / "aimage" / "config.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps({"trust": {"licenses": {"mode": "off"}}}))
    market.here("export", "mine", "out", code=5)


def test_a_licence_is_judged_after_the_signature(market: Market, tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "signer")
    rules = [{"pattern": f"{market.repository}*", "keys": [str(public)]}]
    market.write(OPEN, rules=rules)
    assert "has no signature" in market.empty("pull", market.name, code=5).err
    market.here("sign", market.name, "--key", private, "-q")
    assert "CC-BY-NC-4.0 is not allowed" in market.empty("pull", market.name, code=5).err
    market.write({"allow": ["CC-BY-NC-4.0"]}, rules=rules)
    market.empty("pull", market.name, "-q")
    market.write(OPEN, rules=rules)
    market.empty("export", market.name, "out", code=5)


def test_a_manifest_of_an_index_is_judged_by_its_own_licence(
    market: Market, tmp_path: Path
) -> None:
    store = ImageLayout(market.here.store)
    child = store.resolve(Reference.parse(market.name))
    index = encode(
        {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": [child.to_json()]}
    )
    reference = Reference.parse(f"{market.repository}:all")
    content = Descriptor.of(mediatype.OCI_INDEX, index)
    with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
        repository.push(content, build_bytes_body(index), reference)
    rule = {"pattern": f"{market.repository}*", "licenses": OPEN}
    market.write(rules=[rule])
    mark = market.registry.mark()
    market.empty("pull", str(reference), code=5)
    checked = market.empty("trust", "check", str(reference), "--json", code=5).value
    assert (checked["digest"], checked["accepted"]) == (str(child.digest), False)
    assert checked["licenses"] == ["cc-by-nc-4.0"]
    assert not market.list_fetched(mark)
    market.write(rules=[{**rule, "licenses": {"allow": ["CC-BY-NC-4.0"]}}])
    assert market.empty("trust", "check", str(reference), "--json").value["accepted"] is True
    market.empty("pull", str(reference), "-q")
    market.empty("export", str(reference), "out", "-q")
    market.write(rules=[rule])
    market.empty("export", str(reference), "again", code=5)


def test_of_a_manifest_without_the_annotation_the_config_is_read(market: Market) -> None:
    market.here("push", market.name, "--dialect", "ollama", "-q")
    market.write(OPEN)
    mark = market.registry.mark()
    market.empty("pull", market.name, code=5)
    assert len(market.list_fetched(mark)) == 1
    assert not list((market.empty.store / "blobs").rglob("*/*"))


@pytest.mark.parametrize("dialect", ["clowder", "ollama"])
def test_a_mountable_image_is_judged_by_its_licence(market: Market, dialect: str) -> None:
    """The AImage in it may state its licence in the config alone, which is a part of the image."""
    market.here("push", market.name, "--dialect", dialect, "-q")
    source = Aimage(market.here.home, market.here.home / "source")
    source("pull", market.name, "-q")
    name = push_image(source, market)
    market.write(OPEN)
    mark = market.registry.mark()
    assert "CC-BY-NC-4.0 is not allowed" in market.empty("pull", name, code=5).err
    assert not market.list_fetched(mark)
    market.write({"allow": ["CC-BY-NC-4.0"]})
    market.empty("pull", name, "-q")
    assert market.empty("resolve", name).line == source("resolve", name).line
    market.empty("export", name, "out", "-q")


def push_image(source: Aimage, market: Market) -> str:
    """Push the model as an image into a repository of its own, which has no blob of the AImage."""
    market.repository += "-image"
    name = f"{market.repository}:v1"
    source("tag", market.name, name, "-q")
    source("push", name, "--dialect", "image", "-q")
    return name


def test_a_mountable_image_that_hides_the_licence_is_refused(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "join_licenses", lambda _: "MIT")
    name = push_image(market.here, market)
    market.write(OPEN)
    assert "CC-BY-NC-4.0 is not allowed" in market.empty("pull", name, code=5).err
    checked = market.empty("trust", "check", name, code=5).out
    assert "refused" in checked and "CC-BY-NC-4.0 is not allowed" in checked
    assert not list((market.empty.store / "blobs").rglob("*/*"))


def test_a_registry_and_a_cache_serve_accepted_licences_only(market: Market) -> None:
    market.here("tag", "closed", "team/x:v1", "-q")
    own = RegistryThread(ImageLayout(market.here.store))
    host, _, path = market.repository.partition("/")
    upstream = UpstreamRegistry.parse(host, ClientOptions(docker_config=market.here.home))
    cache = RegistryThread(ImageLayout(market.here.home / "cache"), upstream)
    market.write(OPEN)
    mark = market.registry.mark()
    for base in (f"http://{own.host}/v2/team/x", f"http://{cache.host}/v2/{path}"):
        for part in ("manifests/v1", f"manifests/{market.digest}", f"blobs/{market.config}"):
            answer = fetch(f"{base}/{part}")
            assert answer.code == -403, part
            assert json.loads(answer.text)["errors"][0]["code"] == "DENIED", part
    # The licence of this digest is known already.
    assert not market.list_fetched(mark)
    own.close()
    cache.close()


@pytest.fixture
def worker(market: Market) -> Iterator[LocalWorker]:
    found = LocalWorker(market.empty)
    yield found
    found.end()


def test_a_worker_and_its_jobs_ask_for_no_weight(market: Market, worker: LocalWorker) -> None:
    market.write(OPEN)
    mark = market.registry.mark()

    def post(path: str, **body: Any) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        raw = json.dumps(body).encode()
        status, _, data = answer_to(
            urllib.request.Request(worker.url + path, raw, headers, method="POST")
        )
        return status, data

    status, data = post("/api/pull", model=market.name, stream=False)
    assert (status, b"CC-BY-NC-4.0 is not allowed" in data) == (403, True), data
    for path in ("/v1/images/generations", "/v1/chat/completions", "/v1/jobs"):
        post(path, model=market.name, prompt="a", kind="convert", target="x:int8", quantize="int8")
    assert not market.list_fetched(mark)


def test_a_job_uses_no_stored_model_of_a_refused_licence(market: Market) -> None:
    """The process of a job has the policy of the machine."""
    market.write(OPEN)
    recipe = {"dtype": "f16", "quantize": None, "group_size": None}
    command: dict[str, Any] = {"roots": [str(market.here.store)], "kind": "convert"}
    command |= {"model": "closed", "target": "x", "recipe": recipe, "attach": False}
    command["lora_dir"] = None
    target = io.BytesIO()
    job_process.perform(command, job_process.JobReport(target))
    target.seek(0)
    (message,) = [found for found, _ in iter(lambda: frame.read(target), None)]
    assert message["kind"] == "LicenseError"
    assert "CC-BY-NC-4.0 is not allowed" in message["message"]


def test_a_node_asks_for_no_weight(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "TICK", 0.05)
    monkeypatch.setattr(daemon, "EVERY", 0.05)
    market.write(OPEN)
    mark = market.registry.mark()
    node = LocalNode(market.here.home / "node")
    node.want({"ref": market.name})
    node.start()
    model = node.reaches(market.name, "failed")
    assert "CC-BY-NC-4.0 is not allowed" in json.dumps(model)
    assert not market.list_fetched(mark)
    node.end()


def test_other_artifacts_are_judged_by_their_annotation(market: Market, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    attached = market.here("attach", market.name, notes, "--type", "text/plain", "-q").line
    word = f"{mediatype.LICENSES}=CC-BY-NC-4.0"
    stated = market.here(
        "attach", market.name, notes, "--type", "text/x", "--annotation", word, "-q"
    ).line
    market.write(OPEN)
    market.empty("attach", "--get", f"{market.repository}@{attached}", "-o", tmp_path / "a", "-q")
    name = f"{market.repository}@{stated}"
    market.empty("attach", "--get", name, "-o", tmp_path / "b", code=5)


def test_a_stored_manifest_is_judged_by_its_digest(market: Market) -> None:
    market.write(OPEN)
    store = ImageLayout(market.here.store)
    market.here("ls", "-q")
    with pytest.raises(LicenseError, match=r"CC-BY-NC-4\.0 is not allowed"):
        read_stored(store, store.resolve(Reference.parse("closed")))
