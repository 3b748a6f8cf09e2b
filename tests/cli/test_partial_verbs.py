"""Verbs on a partial AImage, and the selection of a part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body, copy, plan_copy
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import inflate, read_aimage
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.pull import _tag_partial as name_part
from clowder_aimage.pull import resolve_stored_name
from tests.memory_store import MemoryStore
from tests.process import Aimage
from tests.store import unshare

NAME = Reference.parse("registry.example.com/model:v1")
CONFIG = b'{"schemaVersion":1,"components":{}}'
DATA = {name: name.encode() for name in ("top.json", "net/a", "net/b", "vae/a", "vae/b", "tok/t")}


def layer(name: str, media_type: str = mediatype.AIMAGE_FILE) -> Layer:
    return Layer(Descriptor.of(media_type, DATA.get(name, name.encode())), name)


AIMAGE = AImage(CONFIG, tuple(layer(name) for name in DATA))
MANIFEST, _ = DIALECTS["clowder"].write(AIMAGE)


def put(store: ImageLayout | MemoryStore, *names: str) -> None:
    """Store the manifest, the config and these layers."""
    store.push(MANIFEST.config, build_bytes_body(CONFIG))
    for name in names:
        store.push(layer(name).descriptor, build_bytes_body(DATA[name]))
    store.push(MANIFEST.descriptor, build_bytes_body(MANIFEST.raw))


@pytest.fixture
def part(aimage: Callable[..., Aimage]) -> Aimage:
    """Return the command line on a store with some layers of NAME."""
    here = aimage()
    layout = ImageLayout(here.store)
    put(layout, "top.json", "net/a", "vae/a", "vae/b")
    layout.tag(MANIFEST.descriptor, NAME, is_partial=True)
    return here


# -- verbs


def test_ls_marks_a_partial_aimage(part: Aimage) -> None:
    assert " (partial)  " in part("ls").out
    (row,) = part("ls", "--json").value
    assert (row["kind"], row["partial"]) == ("clowder", True)


def test_a_stale_partial_mark_is_ignored(part: Aimage) -> None:
    """A pull of another name may have completed it."""
    put(ImageLayout(part.store), *DATA)
    (row,) = part("ls", "--json").value
    assert "partial" not in row


def test_ls_of_a_partial_name_without_its_manifest(part: Aimage) -> None:
    layout = ImageLayout(part.store)
    part("tag", NAME, "other")
    layout.find_path(MANIFEST.descriptor).unlink()
    rows = part("ls", "--json").value
    assert all(row["partial"] for row in rows)


def test_present_layers_are_kept_and_verified(part: Aimage) -> None:
    part("gc", "--grace", "0s")
    part("verify")
    layout = ImageLayout(part.store)
    assert all(layout.exists(layer(name).descriptor) for name in ("top.json", "net/a", "vae/b"))
    path = layout.find_path(layer("net/a").descriptor)
    unshare(path)
    path.write_bytes(b"other")
    assert "damaged" in part("verify", code=5).out


def test_run_lists_missing_layers(part: Aimage, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    part("tag", NAME, "mine")
    err = part("run", "mine", "a fox", "-o", tmp_path / "x.png", code=3).err
    assert (
        "mine:latest is incomplete in the store: missing net (1 of 2 layers), tok (1 layer)" in err
    )
    assert f"to complete it: aimage pull {NAME}\n" in err
    part("rm", NAME)
    err = part("run", "mine", "a fox", "-o", tmp_path / "x.png", code=3).err
    assert "pull or create it again" in err


def test_run_lists_missing_layers_without_the_registry(part: Aimage) -> None:
    pytest.importorskip("mlx.core")
    part("tag", NAME, "127.0.0.1:1/x:v1")
    err = part("run", "127.0.0.1:1/x:v1", "a fox", code=1).err
    assert "cannot reach 127.0.0.1:1" in err
    assert "missing net (1 of 2 layers)" in err


# -- the selection of a part


def chosen(
    layers: list[Layer] | tuple[Layer, ...],
    components: Any = (),
    patterns: Any = (),
) -> list[Any]:
    aimage = AImage(CONFIG, tuple(layers))
    return sorted(LayerSelection(tuple(components), tuple(patterns)).list_names(aimage, NAME))


def test_a_component_includes_top_level_files_without_weights() -> None:
    layers = [
        layer("model.gguf", mediatype.AIMAGE_GGUF),
        layer("lora.safetensors", mediatype.AIMAGE_LORA),
        layer("w", mediatype.AIMAGE_SAFETENSORS),
        layer("index.json"),
        layer("card.md", f"{mediatype.AIMAGE_FILE}+gzip"),
        layer("net/w", mediatype.AIMAGE_SAFETENSORS),
        layer("vae/config.json"),
    ]
    assert chosen(layers, ["net"]) == ["card.md", "index.json", "net/w"]
    assert chosen(layers, [], ["net/*"]) == ["net/w"]
    assert chosen(layers, ["vae"], ["*.gguf"]) == [
        *("card.md", "index.json", "model.gguf", "vae/config.json")
    ]


def test_a_nested_component_is_selected() -> None:
    layers = [layer(f"adapters/{name}/w") for name in ("style", "styles", "other")]
    assert chosen(layers, ["adapters/style"]) == ["adapters/style/w"]
    assert chosen(layers, ["adapters/style/"]) == ["adapters/style/w"]
    assert len(chosen(layers, ["adapters"])) == 3


@pytest.mark.parametrize("name", ["", "top.json", "ne", "NET"])
def test_unknown_components_are_refused(name: str) -> None:
    with pytest.raises(NotFoundError, match="has no component"):
        chosen(AIMAGE.layers, [name])


def test_all_unknown_components_are_listed_up_to_a_limit() -> None:
    layers = [layer(f"part{i:02}/w") for i in range(25)]
    with pytest.raises(NotFoundError) as caught:
        chosen(layers, ["part01", "x"], ["y*", "part02/*"])
    assert str(caught.value).startswith(f"{NAME} has no component 'x' and no layer matching 'y*'")
    assert "part19 and 5 more" in str(caught.value)
    with pytest.raises(NotFoundError, match="it has no layers"):
        chosen([], ["x"])


# -- the plan


def test_a_partial_plan_does_not_tag(aimage: Callable[..., Aimage]) -> None:
    """Only the caller that marks it as partial may tag it."""
    source, layout = MemoryStore(), ImageLayout(aimage().store)
    put(source, *DATA)
    source.tag(MANIFEST.descriptor, NAME)
    whole = plan_copy(source, MANIFEST.descriptor)
    wanted = {layer("net/a").descriptor.digest, layer("top.json").descriptor.digest}
    plan = whole.select(wanted)
    assert {blob.digest for blob in plan.blobs} == wanted
    assert len(plan.left_out) == len(whole.blobs) - 2
    assert plan.digests == whole.digests
    copy(source, NAME, layout, plan=plan)
    assert [layout.exists(blob) for blob in plan.blobs] == [True, True]
    assert set(plan.list_missing_left_out(layout)) == set(plan.left_out)
    assert list(layout.list_tags()) == []


class _Meanwhile(ImageLayout):
    """A layout that another process completes just before a name is set."""

    def tag(
        self, content: Descriptor, reference: Reference, /, *, is_partial: bool = False
    ) -> None:
        put(ImageLayout(self.root), *DATA)
        super().tag(content, reference, is_partial=is_partial)


def test_an_aimage_completed_by_another_pull_is_not_marked(aimage: Callable[..., Aimage]) -> None:
    layout = _Meanwhile(aimage().store)
    put(layout, "net/a")
    source = MemoryStore()
    put(source, *DATA)
    source.tag(MANIFEST.descriptor, NAME)
    plan = plan_copy(source, MANIFEST.descriptor).select({layer("net/a").descriptor.digest})
    assert name_part(layout, plan, resolve_stored_name(NAME, plan.root)) == []
    assert mediatype.PARTIAL not in layout.resolve(NAME).annotations


def test_missing_compressed_layers_are_skipped(aimage: Callable[..., Aimage]) -> None:
    layout = ImageLayout(aimage().store)
    manifest, config = DIALECTS["container"].write(AIMAGE)
    layout.push(manifest.config, build_bytes_body(config))
    packed = manifest.raw.replace(
        str(layer("net/a").descriptor.digest).encode(), str(Digest.of(b"packed")).encode()
    )
    descriptor = Descriptor.of(mediatype.OCI_MANIFEST, packed)
    layout.push(descriptor, build_bytes_body(packed), NAME)
    stored = read_aimage(layout, NAME)
    assert stored.manifest.layers[1].digest != stored.aimage.layers[1].descriptor.digest
    inflate(layout, stored)
    assert not any(layout.exists(one.descriptor) for one in stored.aimage.layers)
