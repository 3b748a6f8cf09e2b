"""Pull one manifest of an index: the selected one, the only one, or the host platform's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.platform import ANY, Candidate, ManifestSelector, Platform, choose
from clowder_aimage.errors import FormatError, NotFoundError, UsageError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.pull import PullOptions, pull
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.verify import repair, verify
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry

HERE = Platform.of(os.uname().sysname, os.uname().machine)
LINUX = Platform("linux", "amd64")
NAME = Reference.parse("r.example/x:v1")


@dataclass
class Shelf:
    """Documents and blobs of a registry by digest; the tag points to ``root``."""

    content: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    root: bytes = b""

    def manifest(self, text: str, media_type: Any = mediatype.OCI_MANIFEST, **fields: Any) -> Any:
        """Add a manifest with a layer of its own."""
        config, layer = (self._blob(data) for data in (b"{}", text.encode() * 100))
        document = {"schemaVersion": 2, "mediaType": media_type, "config": config}
        return self._document(document | {"layers": [layer]} | fields)

    def index(self, *children: Any, media_type: str = mediatype.OCI_INDEX) -> Any:
        document = {"schemaVersion": 2, "mediaType": media_type, "manifests": list(children)}
        return self._document(document)

    def _blob(self, data: bytes) -> dict[str, Any]:
        found = Descriptor.of("application/vnd.example.blob", data)
        self.content[str(found.digest)] = (found.media_type, data)
        return found.to_json()

    def _document(self, value: dict[Any, Any]) -> dict[str, Any]:
        self.root = encode(value)
        found = Descriptor.of(value["mediaType"], self.root)
        self.content[str(found.digest)] = (found.media_type, self.root)
        return found.to_json()

    def __call__(self, seen: Any) -> Answer:
        wanted = seen.path.rpartition("/")[2]
        wanted = str(Digest.of(self.root)) if wanted == "v1" else wanted
        if wanted not in self.content:
            return Answer(404)
        media_type, data = self.content[wanted]
        return Answer(200, {"Content-Type": media_type}, data)


def said(
    child: Any, platform: str | None = None, variant: str | None = None, **annotations: str
) -> Any:
    """Return the descriptor of a child in an index."""
    if variant is not None:
        annotations[mediatype.VARIANT] = variant
    if platform:
        os_, _, rest = platform.partition("/")
        architecture, _, version = rest.partition("/")
        child = child | {"platform": {"os": os_, "architecture": architecture}}
        child["platform"] |= {"variant": version} if version else {}
    return child | ({"annotations": annotations} if annotations else {})


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def fetch(shelf: Shelf, tmp_path: Path) -> Callable[..., str]:
    """Pull from the shelf; return the layout, the digest and the requests."""

    def run(wish: ManifestSelector = ANY, name: str = "{host}/team/x:v1") -> str:
        store = ImageLayout(tmp_path / "store")
        with ScriptedRegistry(shelf).running() as registry:
            reference = Reference.parse(name.format(host=registry.host))
            connection = ClientOptions(docker_config=tmp_path)
            done = pull(reference, store, connection, PullOptions(selector=wish)).root
        vars(run).update(asked=registry.asked("GET"), store=store)
        vars(run)["names"] = {
            name.partition("/")[2]: entry.digest for name, entry in store.list_tags()
        }
        return str(done.digest)

    return run


@pytest.mark.parametrize("media_type", [mediatype.OCI_INDEX, mediatype.DOCKER_MANIFEST_LIST])
@pytest.mark.parametrize("wish", ["a", "b"])
def test_only_the_selected_variant_is_fetched(
    media_type: str, wish: str, shelf: Shelf, fetch: Any
) -> None:
    children = {name: shelf.manifest(name) for name in "ab"}
    shelf.index(
        *(said(child, variant=name) for name, child in children.items()), media_type=media_type
    )
    digest = fetch(ManifestSelector(wish))
    assert digest == children[wish]["digest"]
    assert {name: str(digest) for name, digest in fetch.names.items()} == {"team/x:v1": digest}
    there = {path.name for path in (fetch.store.root / "blobs" / "sha256").iterdir()}
    document = json.loads(shelf.content[digest][1])
    blobs = [document["config"]["digest"], document["layers"][0]["digest"]]
    assert there == {name.partition(":")[2] for name in [digest, *blobs]}
    assert len([path for path in fetch.asked if "/manifests/" in path]) == 2
    raw = (fetch.store.root / "blobs" / "sha256" / digest.partition(":")[2]).read_bytes()
    assert raw == shelf.content[digest][1]


def test_a_single_child_needs_no_option(shelf: Shelf, fetch: Callable[..., str]) -> None:
    child = shelf.manifest("a")
    shelf.index(said(child, "plan9/mips", "odd"))
    assert fetch() == child["digest"]


def test_the_host_platform_is_selected_by_default(shelf: Shelf, fetch: Callable[..., str]) -> None:
    mine, other = shelf.manifest("a"), shelf.manifest("b")
    shelf.index(said(other, "plan9/mips"), said(mine, str(HERE)))
    assert fetch() == mine["digest"]
    assert fetch(ManifestSelector(platform=Platform.parse("plan9/mips"))) == other["digest"]


def test_an_attestation_is_not_a_candidate(shelf: Shelf, fetch: Callable[..., str]) -> None:
    mine, one, two = (shelf.manifest(name) for name in "abc")
    about = {"vnd.docker.reference.type": "attestation-manifest"}
    shelf.index(said(one, "unknown/unknown"), said(two, str(HERE), **about), said(mine))
    assert fetch() == mine["digest"]


def test_a_nested_index_passes_its_annotations_to_its_children(
    shelf: Shelf, fetch: Callable[..., str]
) -> None:
    mine, other = shelf.manifest("a"), shelf.manifest("b")
    inner = [shelf.index(said(child, str(HERE))) for child in (mine, other)]
    shelf.index(*(said(child, variant=name) for name, child in zip("ab", inner, strict=True)))
    assert fetch(ManifestSelector("a")) == mine["digest"]
    assert fetch(ManifestSelector("b", HERE)) == other["digest"]


@pytest.mark.parametrize("depth", [4, 5])
def test_nesting_depth_is_limited(depth: int, shelf: Shelf, fetch: Callable[..., str]) -> None:
    child = mine = shelf.manifest("a")
    for _ in range(depth + 1):
        child = shelf.index(child)
    if depth == 4:
        assert fetch() == mine["digest"]
        return
    with pytest.raises(FormatError, match="nested over 4 levels"):
        fetch()


def test_a_repeated_index_is_read_once(shelf: Shelf, fetch: Any) -> None:
    child = mine = shelf.manifest("a")
    for _ in range(4):
        child = shelf.index(*[child] * 50)
    assert fetch() == mine["digest"]
    assert len(fetch.asked) == 4 + 1 + 2


@pytest.mark.integration
def test_the_number_of_indexes_is_limited(shelf: Shelf, fetch: Callable[..., str]) -> None:
    shelf.index(*(shelf.index(shelf.manifest(str(number))) for number in range(64)))
    with pytest.raises(FormatError, match="over 64 nested indexes"):
        fetch()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("is_index", [True, False])
def test_a_child_whose_media_type_differs_from_the_index_is_refused(
    own: bool, is_index: bool, shelf: Shelf, fetch: Callable[..., str]
) -> None:
    """Its kind must not depend on the source: the index, the registry or the child."""
    inner = shelf.manifest("a")
    child = shelf.index(inner) if is_index else inner
    media_type, raw = shelf.content[child["digest"]]
    if not own:
        raw = raw.replace(b'"mediaType":"%s",' % media_type.encode(), b"", 1)
        child |= {"digest": str(Digest.of(raw)), "size": len(raw)}
        shelf.content[child["digest"]] = media_type, raw
    other = mediatype.OCI_MANIFEST if is_index else mediatype.OCI_INDEX
    shelf.index(child | {"mediaType": other})
    with pytest.raises(FormatError):
        fetch()
    shelf.index(child)
    assert fetch() == (inner if is_index else child)["digest"]


def test_a_child_with_layers_and_manifests_is_refused(
    shelf: Shelf, fetch: Callable[..., str]
) -> None:
    shelf.index(shelf.manifest("a", manifests=[]))
    with pytest.raises(FormatError, match="both layers and manifests"):
        fetch()


@pytest.mark.parametrize("count", [1, 2])
def test_repair_keeps_a_whole_index(count: int, shelf: Shelf, tmp_path: Path) -> None:
    children = [shelf.manifest(name) for name in "ab"[:count]]
    whole = shelf.index(*(said(child, variant="x") for child in children))
    layer = json.loads(shelf.content[children[0]["digest"]][1])["layers"][0]["digest"]
    store, connection = ImageLayout(tmp_path / "store"), ClientOptions(docker_config=tmp_path)
    with ScriptedRegistry(shelf).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        pull(reference, store, connection, PullOptions(selector=None))
        path = store.root / "blobs" / "sha256" / layer.partition(":")[2]
        path.chmod(0o644)
        path.write_bytes(b"?")
        ((problem, error),) = repair(store, verify(store), connection)
    assert (problem.kind, error) == ("damaged", None)
    assert str(store.resolve(reference).digest) == whole["digest"]
    assert verify(store).problems == []


def test_a_whole_index_is_pulled_without_a_selector(shelf: Shelf, fetch: Any) -> None:
    children = [shelf.manifest(name) for name in "abc"]
    whole = shelf.index(*(said(child, variant="x") for child in children))
    assert fetch(None) == whole["digest"]
    for child in children:
        assert fetch.store.exists(Descriptor.from_json(child))


@pytest.mark.parametrize("tag", ["", ":v1"])
def test_a_pull_by_index_digest_names_the_child(tag: str, shelf: Shelf, fetch: Any) -> None:
    child = shelf.manifest("a")
    index = shelf.index(child)
    digest = fetch(name="{host}/team/x" + f"{tag}@{index['digest']}")
    assert digest == child["digest"]
    assert list(fetch.names) == [f"team/x{tag or '@' + digest}"]
    with pytest.raises(NotFoundError):
        fetch.store.resolve(Reference.parse(f"x@{index['digest']}"))


def test_a_tag_is_resolved_once(shelf: Shelf, fetch: Any) -> None:
    """The tag may move meanwhile: later requests use the digest."""
    shelf.index(shelf.manifest("a"))
    fetch()
    assert [path for path in fetch.asked if path.endswith("/v1")] == ["/v2/team/x/manifests/v1"]


def test_a_dry_run_reports_the_selected_manifest(shelf: Shelf, tmp_path: Path) -> None:
    children = {name: shelf.manifest(name) for name in "ab"}
    shelf.index(*(said(child, variant=name) for name, child in children.items()))
    with ScriptedRegistry(shelf).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        store, reach = ImageLayout(tmp_path / "store"), ClientOptions(docker_config=tmp_path)
        options = PullOptions(selector=ManifestSelector("b"), is_dry_run=True)
        plan = pull(reference, store, reach, options).plan
        assert str(plan.root.digest) == children["b"]["digest"]
        assert len(plan.blobs) == 2
        assert len(pull(reference, store, reach, replace(options, selector=None)).plan.blobs) == 3


@pytest.mark.parametrize("own", [None, "a"])
def test_a_plain_manifest_matches_the_variant_it_declares(
    own: str | None, shelf: Shelf, fetch: Callable[..., str]
) -> None:
    annotations = {"annotations": {mediatype.VARIANT: own}} if own else {}
    digest = shelf.manifest("a", **annotations)["digest"]
    assert fetch(ManifestSelector(platform=Platform("plan9", "mips"))) == digest
    with pytest.raises(UsageError, match="is not an index"):
        fetch(ManifestSelector("b"))
    if own:
        assert fetch(ManifestSelector("a")) == digest


def test_a_child_with_another_variant_than_the_index_is_refused(
    shelf: Shelf, fetch: Callable[..., str]
) -> None:
    child = shelf.manifest("a")
    shelf.index(child | {"size": child["size"] + 1})
    with pytest.raises(VerificationError, match="size mismatch"):
        fetch()


# -- the choice by itself


def candidates(*lines: str) -> list[Candidate]:
    """Return a candidate for each ``variant platform`` (``-`` is none)."""
    found = []
    for number, line in enumerate(lines):
        variant, platform = line.split()
        descriptor = Descriptor.of(mediatype.OCI_MANIFEST, b"%d" % number)
        parsed = None if platform == "-" else Platform.parse(platform)
        found.append(Candidate(descriptor, "" if variant == "-" else variant, parsed))
    return found


@pytest.mark.parametrize(
    ("lines", "wish", "number"),
    [
        (["- linux/arm64", "- linux/amd64"], ANY, 1),
        (["- linux/amd64/v3", "- linux/amd64"], ANY, 1),
        (["- linux/amd64/v3", "- linux/arm64"], ANY, 0),
        (["- linux/arm64", "- -"], ANY, 1),
        (["- linux/amd64", "- -"], ManifestSelector(platform=LINUX), 0),
        (["- linux/arm64", "- -"], ManifestSelector(platform=LINUX), 1),
        (
            ["- linux/arm64/v8", "- -"],
            ManifestSelector(platform=Platform.parse("linux/aarch64")),
            0,
        ),
        (["- linux/amd64/v3", "- linux/amd64/v1"], ANY, 1),
        (
            ["- linux/arm64", "- darwin/arm64"],
            ManifestSelector(platform=Platform.parse("macOS/aarch64")),
            1,
        ),
        (
            ["- linux/arm/v6", "- linux/arm/v7"],
            ManifestSelector(platform=Platform.of("Linux", "armv7l")),
            1,
        ),
        (
            ["- linux/amd64", "- linux/386"],
            ManifestSelector(platform=Platform.of("Linux", "i686")),
            1,
        ),
        (["- linux/x86_64", "- linux/arm64"], ManifestSelector(platform=LINUX), 0),
        (
            ["- linux/arm/v6", "- linux/arm/v7"],
            ManifestSelector(platform=Platform.parse("linux/arm/v7")),
            1,
        ),
        (["a linux/arm64", "a linux/amd64", "b linux/amd64"], ManifestSelector("a"), 1),
        (["a linux/arm64", "b linux/amd64"], ManifestSelector("a"), 0),
        (
            ["a linux/arm64", "b linux/arm64"],
            ManifestSelector("b", Platform.parse("Linux/ARM64")),
            1,
        ),
        (["a -", "- -"], ManifestSelector(""), 1),
    ],
)
def test_select_chooses_a_candidate(lines: list[str], wish: ManifestSelector, number: int) -> None:
    found = candidates(*lines)
    assert choose(found, wish, LINUX, NAME) is found[number]


@pytest.mark.parametrize(
    ("lines", "wish", "options"),
    [
        (["a -", "b -"], ANY, ["--variant"]),
        (["a -", "b linux/amd64"], ANY, ["--variant", "--platform"]),
        (
            ["- linux/arm/v6", "- linux/arm/v7"],
            ManifestSelector(platform=Platform("linux", "arm")),
            ["--platform"],
        ),
        (["- -", "- -"], ANY, []),
    ],
)
def test_several_matches_are_listed_with_their_differences(
    lines: list[str], wish: ManifestSelector, options: list[str]
) -> None:
    found = candidates(*lines)
    with pytest.raises(UsageError) as error:
        choose(found, wish, LINUX, NAME)
    listed = error.value.message.splitlines()[1:]
    assert [line.split() for line in listed] == [
        [*line.split(), str(one.descriptor.digest)] for line, one in zip(lines, found, strict=True)
    ]
    hint = format_advice(error.value) or ""
    assert all(option in hint for option in options)
    assert ("--variant" in hint) == ("--variant" in options)
    assert "aimage pull r.example/x@DIGEST" in hint


@pytest.mark.parametrize(
    ("lines", "wish", "said"),
    [
        (["a -", "b -"], ManifestSelector("c"), "variant 'c'; it has"),
        (["a linux/arm64"], ManifestSelector("a", LINUX), "variant 'a' for linux/amd64; it has"),
        (["- linux/arm64", "- linux/s390x"], ANY, "for this machine, linux/amd64; it has"),
        (["- linux/arm64"], ManifestSelector(platform=LINUX), "for linux/amd64; it has"),
        ([], ANY, "without selectable manifests"),
    ],
)
def test_no_match_lists_the_candidates(lines: list[str], wish: ManifestSelector, said: str) -> None:
    found = candidates(*lines)
    with pytest.raises(NotFoundError, match=said) as error:
        choose(found, wish, LINUX, NAME)
    assert all(str(one.descriptor.digest) in error.value.message for one in found)
    assert "--whole" in (format_advice(error.value) or "")


def test_foreign_text_is_printed_on_one_line() -> None:
    descriptor = Descriptor.of(mediatype.OCI_MANIFEST, b"")
    found = [Candidate(descriptor, "x\n  y" * 100), *candidates(*["a -"] * 60)]
    with pytest.raises(UsageError) as error:
        choose(found, ANY, LINUX, NAME)
    lines = error.value.message.splitlines()
    assert len(lines) == 1 + 40 + 1
    assert lines[-1].strip() == "and 21 more"
    assert max(map(len, lines)) < 160


@pytest.mark.parametrize(
    "platform", [None, [], "linux", {"os": 1, "architecture": "x"}, {"os": "x"}]
)
def test_an_invalid_platform_is_ignored(platform: list[Any] | str | dict[str, Any] | None) -> None:
    descriptor = Descriptor.of("x/y", b"", extra={"platform": platform})
    assert Platform.in_descriptor(descriptor) is None


# -- the command line


def push_index(repository: str, shelf: Shelf, tmp_path: Path) -> None:
    """Push the shelf to a real registry."""
    name = Reference.parse(f"{repository}:v1")
    root = Digest.of(shelf.root)
    with Repository(name, ClientOptions(docker_config=tmp_path)) as there:
        documents = []
        for digest, (media_type, data) in shelf.content.items():
            descriptor = Descriptor(media_type, Digest.parse(digest), len(data))
            if media_type in mediatype.MANIFESTS | mediatype.INDEXES:
                documents.append((descriptor, data))
            else:
                there.push(descriptor, build_bytes_body(data))
        for descriptor, data in documents:
            tag = name if descriptor.digest == root else None
            there.push(descriptor, build_bytes_body(data), tag)


def test_the_command_line_selects_a_manifest(
    aimage: Callable[..., Aimage], repository: str, shelf: Shelf, tmp_path: Path
) -> None:
    children = {name: shelf.manifest(name) for name in ("bf16", "int8")}
    index = shelf.index(*(said(child, str(HERE), name) for name, child in children.items()))
    push_index(repository, shelf, tmp_path)
    run = aimage()
    err = run("pull", f"{repository}:v1", code=2).err
    for name, child in children.items():
        assert f"{name}  {HERE}  {child['digest']}" in err
    assert "--variant NAME" in err
    assert "--platform" not in err
    assert "int8" in run("pull", f"{repository}:v1", "--variant", "int4", code=3).err
    assert "int8" in run("pull", f"{repository}:v1", "--platform", "plan9/mips", code=3).err
    assert "invalid platform" in run("pull", repository, "--platform", "plan9", code=2).err
    assert "--whole cannot be" in run("pull", repository, "--whole", "--variant", "x", code=2).err
    assert not run.store.exists()
    dry = run("pull", f"{repository}:v1", "--variant", "int8", "--dry-run", "--json").value
    assert dry["digest"] == children["int8"]["digest"]
    assert run("pull", f"{repository}:v1", "--variant", "int8").line == dry["digest"]
    assert run("ls", "--json").value[0]["digest"] == dry["digest"]
    assert run("pull", f"{repository}:v1", "--whole").line == index["digest"]
    assert run("ls", "--json").value[0]["kind"] == "index"
    assert run("push", f"{repository}:v1").line == index["digest"]
    by_digest = f"{repository}@{index['digest']}"
    value = run("pull", by_digest, "--variant", "bf16", "--json").value
    assert value["reference"] == f"{repository}@{children['bf16']['digest']}"
    assert run("push", value["reference"]).line == children["bf16"]["digest"]


def test_show_lists_a_stored_index(
    aimage: Callable[..., Aimage], repository: str, shelf: Shelf, tmp_path: Path
) -> None:
    child, alone = shelf.manifest("a"), shelf.manifest("b")
    about = said(shelf.manifest("c"), "unknown/unknown")
    index = shelf.index(said(child, "linux/arm64", "x\ny"), alone, about)
    push_index(repository, shelf, tmp_path)
    run = aimage()
    run("pull", f"{repository}:v1", "--whole")
    (run.store / "blobs" / "sha256" / alone["digest"].partition(":")[2]).unlink()
    shown = run("show", f"{repository}:v1").out.splitlines()
    rows = [line.split() for line in shown[3:] if line]
    assert rows[0] == ["VARIANT", "PLATFORM", "SIZE", "DIGEST"]
    assert rows[1] == ["x", "y", "linux/arm64", "102", "B", child["digest"]]
    assert rows[2:] == [["-", "-", "missing", alone["digest"]]]
    assert run("show", f"{repository}:v1", "--json").value == {
        "reference": f"{repository}:v1",
        **index,
        "manifests": [
            child | {"variant": "x\ny", "platform": "linux/arm64", "blobs": 102},
            alone,
        ],
    }


def test_copy_includes_the_whole_index(
    aimage: Callable[..., Aimage], repository: str, shelf: Shelf, tmp_path: Path
) -> None:
    index = shelf.index(*(said(shelf.manifest(name), variant=name) for name in "ab"))
    push_index(repository, shelf, tmp_path)
    assert aimage()("copy", f"{repository}:v1", f"{repository}:v2").line == index["digest"]
