"""Models are described once for a digest: over restarts, also those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import clowder_aimage.layout.description as description_module
from clowder_aimage import __version__
from clowder_aimage.api import model_description
from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from clowder_aimage.oci import Descriptor, Reference
from tests.worker.test_model_list import GOOD, keep

# Configs, and whether there is a description
CONFIGS: dict[str, tuple[Any, bool]] = {
    "good": (GOOD, True),
    "with many components": (GOOD | {"components": {f"x{n}": {} for n in range(20_000)}}, True),
    "not valid": (GOOD | {"components": 5}, False),
    "not an object": ([1], False),
    "too long": (GOOD | {"defaults": {f"x{n}": n for n in range(20_000)}}, False),
}
# What other programs may leave in a file of the store
DAMAGE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": null}',
    b'{"version": "0.0.0", "model": null}',
    b'{"version": "%(version)s"}',
    b'{"version": "%(version)s", "model": {}}',
    b'{"version": "%(version)s", "model": {"kind": 5, "details": {}}}',
    # Of a build that derived less
    b'{"version": "%(version)s", "model": {"kind": "image", "details": {"parent_model": "", '
    b'"format": "", "family": "", "families": [], "parameter_size": "", '
    b'"quantization_level": ""}, "capabilities": ["image"]}}',
    b'{"version": "%(version)s", "model": null, "more": 1}',
    b" " * (1 << 20),
]


@pytest.fixture
def layout(tmp_path: Path) -> ImageLayout:
    return ImageLayout(tmp_path / "store")


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the digests of the manifests that are described."""
    digests, derive = list[str](), model_description._derive

    def record(store: ImageLayout, descriptor: Descriptor) -> Any:
        digests.append(str(descriptor.digest))
        return derive(store, descriptor)

    monkeypatch.setattr(model_description, "_derive", record)
    return digests


def store_model(layout: ImageLayout, config: Any = GOOD) -> Descriptor:
    keep(layout, "x", json.dumps(config).encode())
    return layout.resolve(Reference.parse("x"))


@pytest.mark.parametrize(("config", "is_described"), CONFIGS.values(), ids=CONFIGS)
def test_a_model_is_described_once(
    layout: ImageLayout, derived: list[str], config: Any, is_described: bool
) -> None:
    descriptor = store_model(layout, config)
    described = [ModelDescriptions(layout).find(descriptor) for _ in range(3)]
    assert derived == [str(descriptor.digest)]
    assert described == [described[0]] * 3
    assert (described[0] is not None) is is_described


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_of_another_form_is_replaced(layout: ImageLayout, damage: bytes) -> None:
    descriptor = store_model(layout)
    expected = ModelDescriptions(layout).find(descriptor)
    path = layout.root / ".aimage" / "described" / descriptor.digest.encoded
    written = path.read_bytes()
    version = __version__.encode()
    path.write_bytes(damage.replace(b"%(version)s", version))
    assert expected is not None
    assert ModelDescriptions(layout).find(descriptor) == expected
    assert path.read_bytes() == written


@pytest.mark.parametrize(
    "replace",
    [
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path.parent / "other"),
    ],
    ids=["a directory", "a link"],
)
def test_what_is_not_a_file_is_not_read(
    layout: ImageLayout, replace: Callable[[Path], object]
) -> None:
    descriptor = store_model(layout)
    path = layout.root / ".aimage" / "described" / descriptor.digest.encoded
    path.parent.mkdir()
    replace(path)
    assert ModelDescriptions(layout).find(descriptor) is not None


def test_another_version_describes_again(
    layout: ImageLayout, derived: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = store_model(layout)
    ModelDescriptions(layout).find(descriptor)
    monkeypatch.setattr(description_module, "__version__", "9.9.9")
    ModelDescriptions(layout).find(descriptor)
    assert len(derived) == 2


def test_what_is_missing_or_damaged_is_described_later(layout: ImageLayout) -> None:
    descriptor = store_model(layout)
    descriptions = ModelDescriptions(layout)
    path = layout.find_path(descriptor)
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(b"{" * len(whole))
    assert descriptions.find(descriptor) is None
    path.write_bytes(whole)
    assert descriptions.find(descriptor) is not None


def test_a_store_that_cannot_be_written_is_described(
    layout: ImageLayout, derived: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = store_model(layout)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(description_module, "write_all", refuse)
    descriptions = ModelDescriptions(layout)
    assert descriptions.find(descriptor) == descriptions.find(descriptor) is not None
    assert len(derived) == 1


def test_descriptions_are_collected_with_their_manifests(layout: ImageLayout) -> None:
    descriptor = store_model(layout)
    ModelDescriptions(layout).find(descriptor)
    layout.untag(Reference.parse("x"))
    Collector(layout, grace=0.0).run()
    for kind in description_module.KINDS:
        assert list((layout.root / ".aimage" / kind).glob("*")) == []
