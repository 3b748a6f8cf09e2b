"""Files of a node's desired state: parsing, refusals and change detection."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="pyyaml is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

import yaml  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.document import schema
from clowder_aimage.document import yaml as yaml_document
from clowder_aimage.document.yaml import find_json_lines, read_yaml
from clowder_aimage.engine.admission import ALWAYS, IF_MISSING, NEVER
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.node import spec_files
from clowder_aimage.node.model_spec import ModelSpec, choose_default_policy, parse_specs
from clowder_aimage.node.spec_files import SpecFiles, compute_fingerprint, read_directory
from clowder_aimage.oci import Digest, Reference
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples" / "desired"
DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
LOADERS = [yaml.SafeLoader, *filter(None, [getattr(yaml, "CSafeLoader", None)])]


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an iterator over PyYAML's loaders that installs each of them."""

    def each() -> Iterator[Any]:
        for loader in LOADERS:
            monkeypatch.setattr(yaml_document, "_LOADER", loader)
            yield loader

    return each()


def want(**said: Any) -> ModelSpec:
    """Parse a document with one entry and return its spec."""
    (found,) = parse_specs([{"ref": "example.com/a:v1"} | said])
    return found


def names(directory: Path) -> list[Any]:
    return [each.name for each in read_directory(directory).specs]


def refused(directory: Path) -> str:
    """Return the message with which a directory is refused."""
    with pytest.raises(FormatError) as caught:
        read_directory(directory)
    assert caught.value.message.isprintable()
    return caught.value.message


def refused_text(tmp_path: Path, text: str, name: str = "a.yaml") -> str:
    (tmp_path / name).write_text(text, "utf-8")
    return refused(tmp_path).removeprefix(f"{tmp_path}/")


# -- entries


def test_all_keys_of_an_entry_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(
        f"""\
# a comment
- ref: example.com/team/a:v1
  digest: {DIGEST}
  pullPolicy: Never
  priority: -7
  pin: true
  components: [vae, adapters/style, vae]
  refresh: 1h30m
"""
    )
    (found,) = read_directory(tmp_path).specs
    assert found == ModelSpec(
        reference=Reference("example.com", "team/a", "v1", Digest.parse(DIGEST)),
        digest=Digest.parse(DIGEST),
        policy=NEVER,
        priority=-7,
        pin=True,
        components=("adapters/style", "vae"),
        refresh=5400.0,
    )
    assert (found.name, found.origin) == (f"example.com/team/a:v1@{DIGEST}", "a.yml")


def test_the_adapters_of_a_model_are_further_specs() -> None:
    entry = {"ref": "h.io/base:v1", "pin": True, "priority": 3, "components": ["vae"]}
    loras = ["h.io/ink:v1", f"h.io/comic@{DIGEST}"]
    base, ink, comic = parse_specs([entry | {"loras": loras}])
    assert base == want(**entry)
    assert ink == want(ref=loras[0], pin=True, priority=3) and comic.name == loras[1]
    both = [{"ref": f"h.io/{name}:v1", "loras": ["h.io/ink:v1"]} for name in ("a", "b")]
    assert [one.name for one in parse_specs(both)] == ["h.io/a:v1", "h.io/ink:v1", "h.io/b:v1"]
    both[1]["pin"] = True  # type: ignore[assignment]
    with pytest.raises(FormatError, match=r"conflicting entries for h\.io/ink:v1"):
        parse_specs(both)
    with pytest.raises(FormatError, match="entry 1, loras/1"):
        parse_specs([entry | {"loras": ["ink"]}])


def test_a_spec_has_documented_defaults() -> None:
    found = want()
    assert (found.policy, found.priority, found.pin) == (IF_MISSING, 0, False)
    assert (found.components, found.refresh, found.origin) == ((), 300.0, "")
    assert (found.name, found.digest) == ("example.com/a:v1", None)


def test_the_default_policy_is_kubernetes() -> None:
    for ref in ("h.io/a", "h.io/a:latest"):
        assert want(ref=ref).policy == choose_default_policy(Reference.parse(ref)) == ALWAYS
    for ref in ("h.io/a:v1", f"h.io/a@{DIGEST}", f"h.io/a:latest@{DIGEST}"):
        assert want(ref=ref).policy == choose_default_policy(Reference.parse(ref)) == IF_MISSING


def test_policies_have_two_spellings() -> None:
    words = ("Never", "IfNotPresent", "Always", "never", "if-missing", "always")
    found = [want(pullPolicy=word).policy for word in words]
    assert found == [NEVER, IF_MISSING, ALWAYS] * 2


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"ref": f"h.io/a@{DIGEST}"}, f"h.io/a@{DIGEST}"),
        ({"ref": f"h.io/a:v1@{DIGEST}", "digest": DIGEST}, f"h.io/a:v1@{DIGEST}"),
        ({"ref": "h.io/a:v1", "digest": DIGEST}, f"h.io/a:v1@{DIGEST}"),
        # a digest without a tag gets no default tag
        ({"ref": "h.io/a", "digest": DIGEST}, f"h.io/a@{DIGEST}"),
    ],
)
def test_a_digest_is_in_the_reference_or_beside_it(said: dict[str, str], name: str) -> None:
    found = want(**said)
    assert (found.name, str(found.digest)) == (name, DIGEST)
    assert found.reference.digest == found.digest


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        *((1.5, 1.5), ("1h30m", 5400.0), (0, math.inf), (10**400, math.inf)),
        *(("9" * 41, None), ("500ms", None), ("soon", None)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refresh_is_a_duration_of_a_second_or_more(
    said: float | str, seconds: float | None
) -> None:
    if seconds is None:
        with pytest.raises(FormatError, match="refresh"):
            want(refresh=said)
    else:
        assert want(refresh=said).refresh == seconds


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"ref": "h.io/a", "digest": DIGEST, "refresh": 0, "pullPolicy": "always"},
        {"priority": 3, "pin": True, "components": ["b", "a"], "refresh": "90s"},
    ],
    ids=str,
)
def test_to_json_parses_to_the_same_spec(said: dict[str, Any]) -> None:
    found = want(**said)
    text = json.dumps(found.to_json())
    assert parse_specs([json.loads(text)]) == (found,)
    assert list(schema.iter_violations("desired", [found.to_json()])) == []


def test_specs_are_equal_without_their_origin() -> None:
    one, other = (parse_specs([{"ref": "h.io/a"}], origin)[0] for origin in ("a.yaml", "b.yaml"))
    assert one == other
    assert one.origin != other.origin
    assert one != want(ref="h.io/a", priority=1)


def test_model_spec_refuses_a_reference_without_a_registry() -> None:
    with pytest.raises(FormatError, match="no registry"):
        ModelSpec(Reference.parse("a:v1"))
    with pytest.raises(FormatError, match=r"the digest in .* is not"):
        ModelSpec(Reference.parse(f"h.io/a@{DIGEST}"), Digest.parse(OTHER))


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        *(("text", "entry 1: "), ({}, "'ref' is a required property")),
        *(({"ref": 5}, "entry 1, ref: "), ({"ref": "team/a:v1"}, "its registry")),
        ({"ref": "h.io/A"}, "use lower case"),
        ({"ref": "h.io/a", "digest": "sha256:ab"}, "entry 1, digest: "),
        ({"ref": f"h.io/a@{OTHER}", "digest": DIGEST}, "the digest in"),
        ({"ref": "h.io/a", "pullPolicy": "Sometimes"}, "'Never', 'IfNotPresent', 'Always'"),
        ({"ref": "h.io/a", "pin\x1b[2J": True}, "entry 1, "),
        ({"ref": "h.io/a", "priority": 2**31}, "entry 1, priority: "),
        ({"ref": "h.io/a", "components": ["vae", "../x"]}, "entry 1, components/2: "),
        ({"ref": "h.io/a", "components": ["\ud800"]}, "layer name"),
        ({"ref": "h.io/\ud800"}, "entry 1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_parse_specs_refuses_an_invalid_entry(entry: str | dict[str, Any], where: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_specs([entry])
    assert where in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.message.isprintable()
    assert caught.value.hint


@pytest.mark.parametrize("document", ["a", {"models": []}], ids=str)
def test_a_document_is_a_list(document: str | dict[str, list[Any]]) -> None:
    with pytest.raises(FormatError, match="is not of type 'array'"):
        parse_specs(document)


def test_an_empty_document_is_an_empty_list() -> None:
    assert parse_specs(None) == parse_specs([]) == ()


def test_schema_and_parser_agree_on_references_with_a_registry() -> None:
    for ref in ("a:v1", "team/a", "localhost/a", "h/a", "h.io/a", "h:1/a", "[::1]/a", "[::1]:5/a"):
        is_valid = not list(schema.iter_violations("desired", [{"ref": ref}]))
        assert is_valid == (Reference.parse(ref).registry is not None), ref


# -- duplicates


def test_equal_entries_are_one_spec(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- ref: h.io/a\n- ref: h.io/b\n")
    (tmp_path / "b.yaml").write_text("- ref: h.io/a:latest\n  pullPolicy: always\n")
    found = read_directory(tmp_path).specs
    assert [(each.name, each.origin) for each in found] == [
        ("h.io/a:latest", "a.yaml"),
        ("h.io/b:latest", "a.yaml"),
    ]


@pytest.mark.parametrize(
    ("said", "difference"),
    [
        ("priority: 3", "priority is 0 and 3"),
        ("components: [vae]", 'components is [] and ["vae"]'),
        ("pullPolicy: Never", 'pullPolicy is "IfNotPresent" and "Never"'),
        (f"digest: {DIGEST}", f'digest is null and "{DIGEST}"'),
    ],
)
def test_different_entries_of_one_model_are_refused_with_both_places(
    tmp_path: Path, said: str, difference: str
) -> None:
    (tmp_path / "a.yaml").write_text("- ref: h.io/b\n\n- ref: h.io/a:v1\n")
    (tmp_path / "b.yaml").write_text(f"- ref: h.io/a:v1\n  {said}\n")
    assert refused(tmp_path) == (
        "conflicting entries for h.io/a:v1 in a.yaml, line 3 and in b.yaml, line 1: " + difference
    )


def test_two_digests_of_one_repository_are_two_models() -> None:
    found = parse_specs(
        [{"ref": f"h.io/a@{DIGEST}"}, {"ref": f"h.io/a@{OTHER}"}, {"ref": "h.io/a"}]
    )
    assert len(found) == 3


# -- files


def test_files_are_read_by_name_and_hidden_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('[{"ref": "h.io/b"}]')
    (tmp_path / "a.yaml").write_text("- ref: h.io/a\n")
    (tmp_path / "c.yml").write_bytes(b"\xef\xbb\xbf- ref: h.io/c\r\n")
    for name in (".a.yaml", "..data.yaml", "a.yaml~", "a.txt", "README.md", "a.yaml.swp"):
        (tmp_path / name).write_text("{{{")
    found = read_directory(tmp_path)
    assert found.files == ("a.yaml", "b.json", "c.yml")
    assert [each.origin for each in found.specs] == ["a.yaml", "b.json", "c.yml"]


def test_an_empty_file_has_no_specs(tmp_path: Path, loaders: Any) -> None:
    for _ in loaders:
        for text in ("", "\n", "# nothing\n", "---\n", "[]", "~", "--- []\n...\n"):
            (tmp_path / "a.yaml").write_text(text)
            assert read_directory(tmp_path).specs == ()
    for text in ("", " \n", "[]", "null"):
        (tmp_path / "a.json").write_text(text)
        assert read_directory(tmp_path).specs == ()


def test_an_empty_directory_has_no_specs(tmp_path: Path) -> None:
    found = read_directory(tmp_path)
    assert (found.specs, found.files) == ((), ())


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("none", "file"):
        with pytest.raises(NotFoundError, match=r"directory .* not found"):
            read_directory(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- [", "a.yaml, line "),
        (
            "- ref: h.io/a\n- ref: h.io/b\n  pin: yes\n",
            "line 3: entry 2, pin: 'yes' is not of type 'boolean'",
        ),
        ("- ref: h.io/a\n\n-\n  pin: true\n", "line 4: entry 2: 'ref' is a required property"),
        ("- ref: h.io/a\n- ref: h.io/B\n", "line 2: entry 2: invalid reference 'h.io/B'"),
        ("- ref: h.io/a\n  ref: h.io/b\n", "line 2: duplicate key 'ref'"),
        ("- ref: h.io/a\n---\n- ref: h.io/b\n", "line 2: multiple documents"),
        ("- &a ref: h.io/a\n- *a\n", "line 2: "),
        ("- &a [ref]\n- *a\n", "line 2: aliases"),
        ("- !!python/object/apply:os.system [id]\n", "line 1: the tag"),
        ("- ref: ! h.io/a\n", "line 1: the tag"),
        ("- {1: 2}\n", "line 1: a key must be a string"),
        ("- ? [a]\n  : b\n", "line 1: a key must be a string"),
        ("- ref: 2026-01-31\n", "ref: '2026-01-31' is not valid"),
        ("- ref: h.io/a\n  priority: " + "9" * 5000 + "\n", "line 2: entry 1, priority: "),
        ("- ref: h.io/a\n  refresh: .nan\n", "line 2: entry 1, refresh: "),
        ("- ref: h.io/a\n\x00", "line 2: invalid character in YAML"),
        ("\x00" * 4096, "line 1: invalid character in YAML"),
        ("- ref: h.io/a\n\tpin: true\n", "a.yaml, line 2: "),
        ("[" * 30, "line 1: nested more than 20 levels deep"),
        ("[" * 100_000, "a.yaml, line 1: "),
        ("%YAML 3.0\n---\n- a\n", "line 1: "),
    ],
    ids=lambda text: repr(text)[:40],
)
def test_invalid_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, said: str, loaders: Any
) -> None:
    for _ in loaders:
        assert said in refused_text(tmp_path, text)


def test_an_alias_bomb_is_refused(tmp_path: Path, loaders: Any) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    for _ in loaders:
        assert "line 2: aliases" in refused_text(tmp_path, "\n".join(lines))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "a.json is not valid JSON: "),
        ('[{"ref": "h.io/a", "pin": true, "pin": true}]', "duplicate key 'pin'"),
        ('[{"ref": "h.io/a", "refresh": NaN}]', "NaN is not a JSON number"),
        ('[\n{"ref": "h.io/a"},\n{"ref": "h.io/b",\n"pin": 1}\n]', "a.json, line 4: entry 2, pin"),
        ('[\n{"ref": "h.io/a"},\n{"ref": "h.io/B"}]', "a.json, line 3: entry 2: "),
        ("[" * 100_000, "nested"),
    ],
    ids=lambda text: repr(text)[:40],
)
def test_invalid_json_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused_text(tmp_path, text, "a.json")


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[\n# gr\xfc\xdfe\n]")
    assert refused(tmp_path) == f"{tmp_path / name}, line 2: not UTF-8"


def test_text_in_utf_16_with_its_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes("- ref: h.io/a\n".encode("utf-16"))
    assert names(tmp_path) == ["h.io/a:latest"]


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    text = "- ref: h.io/a\n"
    (tmp_path / "a.yaml").write_text(text + "#" * (spec_files.MAX_SIZE - len(text)))
    assert names(tmp_path) == ["h.io/a:latest"]
    (tmp_path / "a.yaml").write_text(text + "#" * (spec_files.MAX_SIZE - len(text) + 1))
    assert "is larger than 1048576 bytes" in refused(tmp_path)


def test_a_named_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    assert "a.yaml is not a regular file" in refused(tmp_path)


def test_a_directory_named_like_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").mkdir()
    assert "a.yaml is not a regular file" in refused(tmp_path)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("gone/a.yaml")
    assert refused(tmp_path).endswith("a.yaml: the link has no target")
    (tmp_path / "a.yaml").unlink()
    (tmp_path / "a.yaml").symlink_to("a.yaml")
    assert "cannot read" in refused(tmp_path)


@pytest.mark.skipif(sys.platform == "darwin", reason="names are UTF-8 there")
@pytest.mark.parametrize("name", [b"\xff.yaml", b"a\n\x1b[2Jb.yaml"])
def test_an_unprintable_file_name_is_escaped(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    path.write_text("- 5\n")
    assert ".yaml" in refused(tmp_path)
    path.write_text("- ref: h.io/a\n")
    found = read_directory(tmp_path)
    assert all(each.isprintable() for each in (*found.files, found.specs[0].origin))


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: Any) -> None:
    directory = tmp_path_factory.getbasetemp() / "any"
    directory.mkdir(exist_ok=True)
    for name in ("a.yaml", "a.json"):
        path = directory / name
        path.write_bytes(raw)
        try:
            assert isinstance(read_directory(directory), SpecFiles)
        except FormatError as error:
            assert error.message.isprintable()
        path.unlink()


PIECES = st.sampled_from(
    [
        *("- ", "? ", ": ", "ref", "h.io/a", "true", "5m", "é", "\n", "  ", "\t", "\x85", "\u2028"),
        *("[", "]", "{", "}", ",", '"', "'", "&a ", "*a", "!!str ", "| \n", "> \n", "---\n"),
        *("...\n", "%", "#", "\0"),
    ]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=30).map("".join))
def test_both_yaml_loaders_read_or_refuse_any_input(text: Any) -> None:
    for each in LOADERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_document, "_LOADER", each)
            try:
                value, _ = read_yaml(text, "a.yaml")
            except FormatError as error:
                assert error.message.isprintable()
            else:
                json.dumps(value)


class Plain(yaml.SafeDumper):  # type: ignore[misc]
    """A dumper that writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abyn~ 1é", max_size=4), inner)
    ),
    max_leaves=15,
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.booleans())
def test_yaml_dumped_by_pyyaml_is_read_as_the_same_value(value: Any, is_flow: bool) -> None:
    text = yaml.dump(value, Dumper=Plain, default_flow_style=is_flow)
    for each in LOADERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_document, "_LOADER", each)
            assert read_yaml(text, "a.yaml")[0] == value


def test_json_lines_finds_lines_in_json_with_tabs() -> None:
    text = '[\n\t{\n\t\t"ref": "a",\n\t\t"pin": 1\n\t}\n]'
    assert find_json_lines(text)[0, "pin"] == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("no", "no"), ("0x10", "0x10"), ("017", 17), ("2026-01-31", "2026-01-31")),
        *((".nan", ".nan"), ("'5'", "5"), ("True", True), ("~", None), ("1e3", 1000.0)),
    ],
)
def test_plain_scalars_are_resolved_by_the_core_schema(
    text: str, value: str | float | None, loaders: Any
) -> None:
    for _ in loaders:
        assert read_yaml(text, "a.yaml")[0] == value


# -- changes


def config_map(directory: Path, version: str, **files: str) -> None:
    """Write or replace a ConfigMap as kubelet does, with links through ``..data``."""
    (directory / version).mkdir(parents=True)
    for name, text in files.items():
        (directory / version / f"{name}.yaml").write_text(text)
    (directory / "..data_tmp").symlink_to(version)
    (directory / "..data_tmp").rename(directory / "..data")
    for name in files:
        if not (directory / f"{name}.yaml").is_symlink():
            (directory / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")


class Watcher:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: object = None

    def changed(self) -> bool:
        before, self.seen = self.seen, compute_fingerprint(self.directory)
        return before != self.seen


def test_a_config_map_is_read_and_its_replacement_is_noticed(tmp_path: Path) -> None:
    config_map(tmp_path, "..2026_01", a="- ref: h.io/a:v1\n", b="- ref: h.io/b:v1\n")
    watcher = Watcher(tmp_path)
    assert watcher.changed()
    assert not watcher.changed()
    assert read_directory(tmp_path).files == ("a.yaml", "b.yaml")
    assert names(tmp_path) == ["h.io/a:v1", "h.io/b:v1"]
    config_map(tmp_path, "..2026_02", a="- ref: h.io/a:v2\n", b="- ref: h.io/b:v2\n")
    assert watcher.changed()
    assert names(tmp_path) == ["h.io/a:v2", "h.io/b:v2"]
    assert not watcher.changed()


def test_a_removed_config_map_key_is_refused_until_its_link_is_removed(tmp_path: Path) -> None:
    config_map(tmp_path, "..2026_01", a="- ref: h.io/a:v1\n", b="- ref: h.io/b:v1\n")
    watcher = Watcher(tmp_path)
    watcher.changed()
    config_map(tmp_path, "..2026_02", a="- ref: h.io/a:v1\n")
    assert watcher.changed()
    assert "b.yaml: the link has no target" in refused(tmp_path)
    (tmp_path / "b.yaml").unlink()
    assert watcher.changed()
    assert names(tmp_path) == ["h.io/a:v1"]


def test_a_directory_replaced_during_the_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_map(tmp_path, "..2026_01", a="- ref: h.io/a:v1\n", b="- ref: h.io/b:v1\n")
    done: list[Any]
    read, done = spec_files._read_content, []

    def content(path: Path) -> bytes:
        raw = read(path)
        if not done:
            done.append(path)
            config_map(tmp_path, "..2026_02", a="- ref: h.io/a:v2\n", b="- ref: h.io/b:v2\n")
        return raw

    monkeypatch.setattr(spec_files, "_read_content", content)
    assert names(tmp_path) == ["h.io/a:v2", "h.io/b:v2"]


def test_a_file_deleted_during_the_read_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("- ref: h.io/a\n")
    (tmp_path / "b.yaml").write_text("- ref: h.io/b\n")
    read = spec_files._read_content

    def content(path: Path) -> bytes:
        (tmp_path / "b.yaml").unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(spec_files, "_read_content", content)
    assert names(tmp_path) == ["h.io/a:latest"]


def test_files_that_change_constantly_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, count = spec_files._read_content, iter(range(1000))

    def content(path: Path) -> bytes:
        path.write_text(f"- ref: h.io/a:v{next(count)}\n" + "#" * next(count))
        return read(path)

    (tmp_path / "a.yaml").write_text("")
    monkeypatch.setattr(spec_files, "_read_content", content)
    assert "changed while they were read" in refused(tmp_path)
    assert next(count) < 20


def test_a_partly_written_file_is_noticed_again_when_complete(tmp_path: Path) -> None:
    text = "- ref: h.io/a:v1\n  pin: true\n- ref: h.io/b:v1\n  pin: false\n"
    path, watcher = tmp_path / "a.yaml", Watcher(tmp_path)
    for end in range(len(text) + 1):
        path.write_text(text[:end])
        assert watcher.changed()
        try:
            found = read_directory(tmp_path).specs
        except FormatError:
            continue
        assert all(re.fullmatch(r"h\.io/[ab]?(:.*)?", each.name) for each in found)
    assert names(tmp_path) == ["h.io/a:v1", "h.io/b:v1"]
    assert not watcher.changed()


def test_a_replaced_file_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path, beside = tmp_path / "a.yaml", tmp_path / ".a.yaml.new"
    path.write_text("- ref: h.io/a:v1\n")
    os.utime(path, (1, 1))
    watcher = Watcher(tmp_path)
    watcher.changed()
    beside.write_text("- ref: h.io/a:v2\n")
    os.utime(beside, (1, 1))
    assert not watcher.changed()  # hidden files are ignored
    beside.replace(path)
    assert watcher.changed()
    assert names(tmp_path) == ["h.io/a:v2"]


def test_new_removed_and_renamed_files_are_noticed(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path)
    assert watcher.changed()
    assert not watcher.changed()
    (tmp_path / "a.yaml").write_text("")
    assert watcher.changed()
    (tmp_path / "a.yaml").rename(tmp_path / "b.yaml")
    assert watcher.changed()
    (tmp_path / "b.yaml").unlink()
    assert watcher.changed()
    (tmp_path / "README.md").write_text("")
    assert not watcher.changed()


def test_a_created_and_removed_directory_is_noticed(tmp_path: Path) -> None:
    directory = tmp_path / "desired.d"
    watcher = Watcher(directory)
    assert watcher.changed()  # the first call, for a missing directory
    assert not watcher.changed()
    directory.mkdir()
    assert watcher.changed()
    directory.rmdir()
    assert watcher.changed()
    assert not watcher.changed()


# -- the example


def test_the_examples_are_valid_and_show_every_key() -> None:
    documents = [yaml.safe_load(path.read_bytes()) for path in sorted(EXAMPLES.glob("*.yaml"))]
    assert documents
    for document in documents:
        assert list(schema.iter_violations("desired", document)) == []
    keys = {key for document in documents for entry in document for key in entry}
    assert keys == set(schema.load("desired")["$defs"]["want"]["properties"])


def test_the_examples_are_parsed() -> None:
    found = read_directory(EXAMPLES).specs
    assert [(each.policy, each.pin, bool(each.digest)) for each in found] == [
        (IF_MISSING, True, False),
        (ALWAYS, False, False),
        (IF_MISSING, False, True),
        *[(IF_MISSING, False, False)] * 4,
    ]
    assert found[3].components == ("adapters/style", "transformer")
