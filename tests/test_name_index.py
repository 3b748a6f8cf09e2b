"""The index of names: files of the user, the configuration, and the choice of a variant."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.config.name_index import (
    Choice,
    NamedModel,
    NameIndex,
    Variant,
    choose,
    read_index,
)
from clowder_aimage.config.variant_offer import find_stored_variant, make_offer
from clowder_aimage.create import create
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.conftest import TINY

GB = 10**9
LISTED = """\
models:
  own:
    kind: text
    hub: Org/Own
    revision: abc
    license: MIT
    variants:
      - {name: large, dtype: bf16, download: 5 GB, memory: 3 GB}
      - {name: packed, reference: "localhost:1/own:v1", size: 2000}
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of the user's list, which does not exist."""
    monkeypatch.delenv("AIMAGE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "aimage").mkdir()
    return tmp_path / "aimage" / "names.yaml"


def test_an_entry_has_the_facts_of_the_list(path: Path) -> None:
    packaged = read_index().models
    path.write_text(LISTED)
    index = read_index()
    assert index.models == {**packaged, "own": index.models["own"]}
    assert index.models["own"] == NamedModel(
        "own",
        (
            Variant("large", dtype="bf16", download=5 * GB, memory=3 * GB),
            Variant("packed", Reference.parse("localhost:1/own:v1"), size=2000),
        ),
        kind="text",
        hub="Org/Own",
        revision="abc",
        license="MIT",
        origin=str(path),
    )


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_list_of_an_editor_of_windows_is_read(path: Path, encoding: str) -> None:
    path.write_bytes(LISTED.encode(encoding))
    assert "own" in read_index().models


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_list_has_no_names(path: Path, text: str) -> None:
    packaged = read_index()
    path.write_text(text)
    assert read_index() == packaged


def test_a_list_below_a_file_is_absent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = read_index()
    path.touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(path))
    assert read_index() == packaged


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (Path.mkdir, "it is not a regular file"),
        (os.mkfifo, "it is not a regular file"),
        (lambda path: path.write_bytes(b"#" * (1024 * 1024 + 1)), "it is larger than 1 MiB"),
        (lambda path: path.write_bytes(b"models: \xff\n"), "'utf-8' codec can't decode"),
        (lambda path: path.write_text(LISTED.replace("5 GB", "five")), "line 8"),
        (lambda path: path.write_text(LISTED.replace(":1/own:v1", ":1/Own:v1")), "line 9"),
    ],
)
def test_a_list_that_cannot_be_used_is_named(path: Path, make: Any, fault: str) -> None:
    make(path)
    with pytest.raises(UsageError) as refused:
        read_index()
    assert str(path) in refused.value.message and fault in refused.value.message


@pytest.mark.parametrize(
    ("code", "is_refused"), [(errno.EACCES, False), (errno.ENOENT, False), (errno.EIO, True)]
)
def test_a_list_of_another_user_is_absent_and_an_unreadable_disk_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_refused: bool
) -> None:
    packaged, read = read_index(), Path.read_bytes
    path.write_text(LISTED)

    def fail(asked: Path) -> bytes:
        if asked == path:
            raise OSError(code, os.strerror(code))
        return read(asked)

    monkeypatch.setattr(Path, "read_bytes", fail)
    if is_refused:
        with pytest.raises(UsageError, match=f"{path}: {os.strerror(code)}"):
            read_index()
    else:
        assert read_index() == packaged


def test_names_of_the_configuration_replace_none(path: Path) -> None:
    path.write_text(LISTED)
    names = {"own": "localhost:1/other:v1", "shared": "localhost:1/shared:v2"}
    config = path.with_name("config.json")
    config.write_text(json.dumps({"names": names}))
    index = read_index()
    assert index.clashes == {"own": str(config)}
    assert index.models["own"].origin == str(path)
    (variant,) = index.models["shared"].variants
    assert variant == Variant("latest", Reference.parse("localhost:1/shared:v2"))
    config.write_text(json.dumps({"names": {"shared": "localhost:1/Shared"}}))
    with pytest.raises(UsageError, match=f"{config}: names/shared: "):
        read_index()


def test_a_model_is_found_by_a_name_without_registry_and_digest() -> None:
    model = NamedModel("own", (Variant("a"), Variant("b")))
    index = NameIndex({"own": model})
    digest = f"own@sha256:{'0' * 64}"
    found = [index.find(Reference.parse(name)) for name in ("own", "own:b", "x", "h:1/own", digest)]
    assert found == [model, model, None, None, None]
    assert (index.find_nearest("onw"), index.find_nearest("something")) == ("own", None)


def test_a_tag_selects_a_variant_and_latest_selects_all() -> None:
    model = NamedModel("own", (Variant("a"), Variant("b")))
    assert model.select(None) == model.select("latest") == model
    assert model.select("b").variants == (Variant("b"),)
    with pytest.raises(NotFoundError, match="own has no variant c") as refused:
        model.select("c")
    assert "choose one: a, b;" in (refused.value.hint or "")


LARGE, SMALL, UNKNOWN = Variant("large", size=9), Variant("small", memory=4, size=2), Variant("any")
DOWNLOADED = Variant("downloaded", download=5)
QUANTIZED = Variant("quantized", quantize="int8", download=5)


@pytest.mark.parametrize(
    ("variants", "memory", "expected"),
    [
        ((LARGE, SMALL), 9, Choice(LARGE, True)),
        ((LARGE, SMALL), 8, Choice(SMALL, True)),
        ((LARGE, SMALL), 3, Choice(SMALL, False)),
        ((LARGE, SMALL), None, Choice(LARGE, None)),
        ((LARGE, UNKNOWN, SMALL), 3, Choice(UNKNOWN, None)),
        ((UNKNOWN, SMALL), 4, Choice(SMALL, True)),
        ((DOWNLOADED,), 5, Choice(DOWNLOADED, True)),
        ((DOWNLOADED,), 4, Choice(DOWNLOADED, False)),
        ((QUANTIZED,), 4, Choice(QUANTIZED, None)),
    ],
)
def test_the_first_variant_that_fits_is_chosen(
    variants: tuple[Variant, ...], memory: int | None, expected: Choice
) -> None:
    assert choose(variants, memory) == expected


def test_a_variant_in_the_store_is_found_in_the_order_of_the_list(store: ImageLayout) -> None:
    model = NamedModel("own", (Variant("a"), Variant("b"), Variant("c")))
    name = Reference.parse("own")
    assert find_stored_variant(store, name, model) is None
    packed = create(store, Reference.parse("own:c"), TINY, form=ModelForm(whole_files=True))
    assert find_stored_variant(store, name, model) == Reference.parse("own:c")
    store.tag(packed.descriptor, Reference.parse("own:b"))
    assert find_stored_variant(store, name, model) == Reference.parse("own:b")


def test_an_offer_with_stated_sizes_asks_no_registry(store: ImageLayout, tmp_path: Path) -> None:
    away = Reference.parse("localhost:1/own:v1")
    large = Variant("large", away, download=9, size=9)
    small = Variant("small", away, download=2, size=2)
    connection = ClientOptions(docker_config=tmp_path)
    name, model = Reference.parse("own"), NamedModel("own", (large, small))
    offer = make_offer(store, name, model, connection, 4)
    assert (offer.variant, offer.fits, offer.memory, offer.model) == (small, True, 4, model)
