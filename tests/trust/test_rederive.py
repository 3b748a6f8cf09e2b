"""Statements of derivations: written by every verb that derives, and computed again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import AImage, Layer
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.importer import blob_encoder
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.attachment import attach, list_attachments
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.oci.artifact import EMPTY, build_artifact
from clowder_aimage.rederive import RederiveOptions, rederive
from clowder_aimage.trust import lineage
from clowder_aimage.trust.dsse import IN_TOTO
from clowder_aimage.trust.lineage import (
    ComponentType,
    Derivation,
    DerivationRecipe,
    Operation,
    UsedAdapter,
    build_referrer,
    keep_derivation,
    read_derivation,
)
from tests.importer.valued import as_dtype, file_of, make_valued, transformer
from tests.process import Aimage
from tests.text.tiny_text import write_model
from tests.trust.place import Place

Q = "transformer/layers.0.attention.to_q.weight"
SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "model"
TYPES = ("int8", "int4", "nvfp4", "mxfp8", "fp8", "transformer=int4,text_encoder=int8")
CASTS = ("f16", "f32", "bf16", "auto")
# The words of verbs that make d
DERIVED: dict[str, tuple[tuple[str, ...], ...]] = {
    **{kind: (("convert", "m", "d", "--quantize", kind),) for kind in TYPES},
    **{kind: (("convert", "f", "d", "--dtype", kind),) for kind in CASTS if kind != "f32"},
    "f32": (("convert", "m", "d", "--dtype", "f32"),),
    "both": (("convert", "f", "d", "--dtype", "bf16", "--quantize", "int4", "--group-size", "32"),),
    "variant": (("convert", "m", "d", "--quantize", "int8", "--attach"),),
    "fused": (("convert", "m", "d", "--lora", "ink:0.7"),),
    "fused variant": (
        ("convert", "m", "v", "--quantize", "int8", "--attach"),
        ("convert", "v", "d", "--lora", "ink:0.7"),
    ),
    "fused dequantized": (
        ("convert", "m", "v", "--quantize", "fp8"),
        ("convert", "v", "d", "--lora", "ink:0.7"),
    ),
    "adapters": (("create", "d", "--from", "m", "--lora", "ink:0.7"),),
    "adapter of a file": (("create", "d", "--from", "m", "--lora", "ink.safetensors:0.7"),),
    "derivation of a derivation": (
        ("convert", "m", "v", "--lora", "ink:0.7"),
        ("convert", "v", "d", "--quantize", "int8"),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with a model m in BF16, f in F32, and the adapter ink, in its store."""
    home = tmp_path_factory.mktemp("models")
    here = Aimage(home, home / "store")
    for name, dtype in (("m", "BF16"), ("f", "F32")):
        here("create", name, make_valued(home / name, dtype).directory, "-q")
    random = np.random.default_rng(1)
    shapes = {"lora_A": (2, 64), "lora_B": (64, 2)}
    tensors = {
        f"transformer.layers.0.attention.to_q.{key}.weight": random.standard_normal(shape) * 0.3
        for key, shape in shapes.items()
    }
    (home / "ink.safetensors").write_bytes(file_of(as_dtype(tensors, "F32")))
    here("create", "ink", home / "ink.safetensors", "-q")
    return home


@pytest.fixture
def here(models: Path, aimage: Callable[[], Aimage]) -> Aimage:
    here = aimage()
    shutil.copytree(models, here.home, dirs_exist_ok=True)
    return here


def open_stored(here: Aimage, name: str) -> tuple[ImageLayout, StoredAImage]:
    layout = ImageLayout(here.store)
    return layout, read_aimage(layout, Reference.parse(name))


def find_digest(here: Aimage, name: str) -> str:
    return str(ImageLayout(here.store).resolve(Reference.parse(name)).digest)


def state(here: Aimage, name: str, derivation: Derivation) -> None:
    """Attach another statement to an AImage."""
    layout, stored = open_stored(here, name)
    with layout.lease() as lease:
        keep_derivation(layout, lease, stored.descriptor, derivation)


def replace_layer(here: Aimage, name: str, layer: str, change: Callable[[bytearray], None]) -> None:
    """Name an AImage with another blob in a layer, and the same statement."""
    layout, stored = open_stored(here, name)
    with layout.open(stored.aimage.get_layer(layer).descriptor) as file:
        data = bytearray(file.read() or b"")
    change(data)
    layers = []
    for entry in stored.aimage.layers:
        if entry.name == layer:
            content = Descriptor.of(entry.descriptor.media_type, bytes(data))
            layout.push(content, build_bytes_body(bytes(data)))
            entry = type(entry)(content, entry.name, entry.dtype, entry.shape)
        layers.append(entry)
    replace_layers(here, name, layers)


def replace_layers(here: Aimage, name: str, layers: Iterable[Layer]) -> None:
    """Name an AImage with other layers, and the same statement."""
    layout, stored = open_stored(here, name)
    derivation = read_derivation(layout, stored.descriptor)
    assert derivation is not None
    aimage = AImage(stored.aimage.config, tuple(layers), stored.aimage.subject)
    manifest, _ = stored.dialect.write(aimage)
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse(name))
    state(here, name, derivation)


def flip_last(data: bytearray) -> None:
    data[-1] ^= 1


# -- every derivation


@pytest.mark.parametrize("made", DERIVED)
def test_what_verbs_derive_is_computed_again(here: Aimage, made: str) -> None:
    for words in DERIVED[made]:
        here(*words, "-q")
    for options in (("--jobs", "1"), ()):
        (report,) = here("verify", "d", "--rederive", *options, "--json", "-q").value
        assert report["isDerived"] and not report["problems"]
        (result,) = report["statements"]
        parent = DERIVED[made][-1][1] if made not in ("adapters", "adapter of a file") else "m"
        assert result["parent"] == find_digest(here, parent)
        assert result["parentFrom"] == "store" and result["compared"]


@pytest.mark.parametrize("options", [("--quantize", "int4"), ("--dtype", "f16")])
def test_a_created_model_has_the_parent_in_the_store(here: Aimage, options: tuple[str]) -> None:
    here("create", "d", "m", *options, "-q")
    (report,) = here("verify", "d", "--rederive", "--json", "-q").value
    assert report["isDerived"]
    assert report["statements"][0]["parent"] == find_digest(here, "m")
    here("rm", "d", "-q")
    shutil.rmtree(here.store / ".aimage" / "attached")
    # Other weights of the same forms
    here("rm", "m", "-q")
    weights = transformer()
    weights["x_pad_token"] += 1
    other = make_valued(here.home / "other", transformer=as_dtype(weights, "BF16"))
    here("create", "other", other.directory, "-q")
    here("create", "d", "m", *options, "-q")
    assert "no statement says" in here("verify", "d", "--rederive", code=5).err


def test_an_extracted_language_model_is_computed_again(
    aimage: Callable[[], Aimage], tiny: Path, tmp_path: Path
) -> None:
    here, whole = aimage(), write_model(tmp_path / "qwen3")
    model = tmp_path / "z"
    shutil.copytree(tiny, model)
    for file in (*(model / "text_encoder").iterdir(), *(model / "tokenizer").iterdir()):
        file.unlink()
    tensors = load_file(whole / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][:1] += 1
    save_file(tensors, model / "text_encoder" / "model.safetensors")
    shutil.copy(whole / "config.json", model / "text_encoder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, model / "tokenizer")
    here("create", "-q", "z", model)
    here("create", "-q", "w", whole)
    here("create", "-q", "plain", "--enhancer", "--from", "z")
    here("create", "-q", "d", "--enhancer", "--from", "z", "--weights", "w")
    for name in ("plain", "d"):
        (report,) = here("verify", name, "--rederive", "--json", "-q").value
        assert report["isDerived"]
    assert report["statements"][0]["recipe"]["weights"]
    here("rm", "w", "-q")
    err = here("verify", "d", "--rederive", code=5).out
    assert "whose weights were used, is not complete in the store; pull or create it" in err


def test_a_sample_is_of_the_changed_tensors(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    (report,) = here("verify", "d", "--rederive", "--sample", 2, "--json", "-q").value
    (result,) = report["statements"]
    assert len(result["compared"]) == 2 == len(set(result["compared"]))
    before = {one.name: one.descriptor for one in open_stored(here, "m")[1].aimage.layers}
    after = {one.name: one.descriptor for one in open_stored(here, "d")[1].aimage.layers}
    assert all(before[name] != after[name] for name in result["compared"])
    more = here("verify", "d", "--rederive", "--sample", 999, "--json", "-q").value
    changed = {name for name in after if before[name] != after[name]}
    assert set(more[0]["statements"][0]["compared"]) == changed


@pytest.mark.parametrize("made", ["both", "f16", "auto"])
def test_a_sample_of_any_component_is_equal(here: Aimage, made: str) -> None:
    here(*DERIVED[made][0], "-q")
    for component in ("text_encoder", "transformer", "vae"):
        assert compare_sample(here, "d", f"{component}/")


def compare_sample(here: Aimage, name: str, prefix: str) -> bool:
    """Return True if the first computed layer below a prefix is as stated."""

    def choose(names: Sequence[str]) -> list[str]:
        return [one for one in names if one.startswith(prefix)][:1]

    options = RederiveOptions(choose=choose)
    report = rederive(ImageLayout(here.store), Reference.parse(name), None, options)
    (result,) = report.statements
    assert len([each for each in result.compared if "/" in each]) == 1
    return report.is_derived


@pytest.mark.parametrize("made", ["int8", "f16", "fused"])
def test_a_sample_refuses_the_layers_of_the_parent(here: Aimage, made: str) -> None:
    here(*DERIVED[made][0], "-q")
    _, parent = open_stored(here, DERIVED[made][0][1])
    _, stored = open_stored(here, "d")
    before = {layer.name: layer for layer in parent.aimage.layers}
    replace_layers(here, "d", [before.get(one.name, one) for one in stored.aimage.layers])
    assert sample_one(here)
    assert not compare_sample(here, "d", "")


def test_a_sample_compares_what_the_recipe_does_not_change(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    _, stored = open_stored(here, "d")
    layers = stored.aimage.layers
    replace_layers(here, "d", [one for one in layers if not one.name.startswith("vae/")])
    assert ": vae/config.json: it is missing" in sample_one(here)
    replace_layers(here, "d", layers)
    replace_layer(here, "d", "model_index.json", lambda data: data.extend(b" "))
    assert ": model_index.json: it has" in sample_one(here)


def sample_one(here: Aimage) -> str:
    return here("verify", "d", "--rederive", "--sample", 1, code=5).out


def test_a_sample_of_a_cast_that_depends_on_values_is_decided_by_all(here: Aimage) -> None:
    weights = transformer()
    weights["x_pad_token"] *= np.float32(1.0001)
    mixed = make_valued(here.home / "mixed", "F32", transformer=as_dtype(weights, "F32"))
    here("create", "mixed", mixed.directory, "-q")
    here("convert", "mixed", "d", "--dtype", "auto", "-q")
    assert compare_sample(here, "d", "vae/")
    _, parent = open_stored(here, "mixed")
    _, stored = open_stored(here, "d")
    whole = parent.aimage.get_layer(Q)
    replace_layers(here, "d", [whole if x.name == Q else x for x in stored.aimage.layers])
    assert f": {Q}: it is F32 [64, 64], the recipe gives BF16" in sample_one(here)


# -- what differs


def test_a_flipped_code_is_named(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    replace_layer(here, "d", Q, flip_last)
    for options in (("--jobs", "1"), ()):
        done = here("verify", "d", "--rederive", *options, code=5)
        assert done.out.startswith("d:latest: differs from quantize (transformer int8) of sha256:")
        assert f" (from the store): {Q}: its values differ (1 of " in done.out
    value = here("verify", "d", "--rederive", "--json", "-q", code=5).value
    difference = value[0]["statements"][0]["difference"]
    assert (difference["layer"], difference["changed"]) == (Q, 1)


def test_the_first_of_several_different_tensors_is_named(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    _, stored = open_stored(here, "d")
    names = [one.name for one in stored.aimage.layers if one.dtype == "int8"]
    for name in names[1:]:
        replace_layer(here, "d", name, flip_last)
    done = here("verify", "d", "--rederive", code=5)
    assert f": {names[1]}: its values differ" in done.out


def test_a_damaged_blob_is_named(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    layout, stored = open_stored(here, "d")
    path = layout.find_path(stored.aimage.get_layer(Q).descriptor)
    data = bytearray(path.read_bytes())
    flip_last(data)
    path.unlink()
    path.write_bytes(data)
    out = here("verify", "d", "--rederive", code=5).out
    assert f"{Q}: its blob in the store is damaged (1 of " in out


def test_a_damaged_blob_of_the_parent_is_named(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    here("convert", "m", "e", "--lora", "ink:0.5", "-q")
    layout, stored = open_stored(here, "m")
    path = layout.find_path(stored.aimage.get_layer(Q).descriptor)
    data = bytearray(path.read_bytes())
    flip_last(data)
    path.unlink()
    path.write_bytes(data)
    for name in ("d", "e"):
        out = here("verify", name, "--rederive", code=5).out
        assert f"the parent's blob of {Q} is damaged" in out


def test_another_config_is_named(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    layout, stored = open_stored(here, "d")
    derivation = read_derivation(layout, stored.descriptor)
    assert derivation is not None
    config = json.dumps(dict(stored.aimage.properties) | {"license": "MIT"}).encode()
    manifest, _ = stored.dialect.write(AImage(config, stored.aimage.layers))
    layout.push(manifest.config, build_bytes_body(config))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse("d"))
    state(here, "d", derivation)
    out = here("verify", "d", "--rederive", code=5).out
    assert ": config: its field 'license' differs" in out


# -- statements


def quantized(parent: str, kind: str = "int8", specification: str = "affine-v1") -> Derivation:
    recipe = DerivationRecipe(
        Operation.QUANTIZE, components={"transformer": ComponentType(kind, 64)}
    )
    return Derivation(Digest.parse(parent), recipe, specification)


def replace_statement(here: Aimage, derivation: Derivation) -> None:
    """Convert m to d, and replace the statement."""
    here("convert", "m", "d", "--quantize", "int8", "-q")
    shutil.rmtree(here.store / ".aimage" / "attached")
    state(here, "d", derivation)


def test_a_statement_about_another_recipe_names_a_tensor(here: Aimage) -> None:
    replace_statement(here, quantized(find_digest(here, "m"), "int4"))
    out = here("verify", "d", "--rederive", code=5).out
    assert "it is int8 [64, 64], the recipe gives int4 [64, 64]" in out


def test_a_statement_about_another_parent_names_a_tensor(here: Aimage) -> None:
    weights = transformer()
    weights[Q.partition("/")[2]] *= 2
    other = make_valued(here.home / "other", transformer=as_dtype(weights, "BF16"))
    here("create", "other", other.directory, "-q")
    replace_statement(here, quantized(find_digest(here, "other")))
    out = here("verify", "d", "--rederive", code=5).out
    assert f": {Q}: its values differ" in out
    here("convert", "m", "fused", "--lora", "ink:0.7", "-q")
    replace_statement(here, quantized(find_digest(here, "fused")))
    out = here("verify", "d", "--rederive", code=5).out
    assert ": lora_fusion_info.json: it is missing" in out


@pytest.mark.parametrize(
    ("derivation", "message"),
    [
        (quantized(f"sha256:{'0' * 64}"), f"the parent sha256:{'0' * 64} is not complete"),
        (quantized(f"sha256:{'0' * 64}", specification="affine-metal-v1"), "affine-metal-v1, and"),
        (quantized(f"sha256:{'0' * 64}", "int3"), "its recipe is unknown here"),
    ],
)
def test_what_cannot_be_computed_is_a_sentence(
    here: Aimage, derivation: Derivation, message: str
) -> None:
    replace_statement(here, derivation)
    done = here("verify", "d", "--rederive", code=5)
    assert message in done.out


def test_an_adapter_that_is_none_is_a_sentence(here: Aimage) -> None:
    model = Digest.parse(find_digest(here, "m"))
    recipe = DerivationRecipe(Operation.FUSE, adapters=(UsedAdapter("m", model, 1.0),))
    replace_statement(here, Derivation(model, recipe, "fuse-v1"))
    assert "is not an adapter, but another AImage" in here("verify", "d", "--rederive", code=5).out
    replace_statement(here, Derivation(model, DerivationRecipe(Operation.EXTRACT), "copy-v1"))
    assert "has no text encoder that is" in here("verify", "d", "--rederive", code=5).out


def test_statements_that_disagree_are_all_computed(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    state(here, "d", quantized(find_digest(here, "f")))
    done = here("verify", "d", "--rederive", code=5)
    right, wrong = done.out.splitlines()
    assert "d:latest: equal to quantize (transformer int8)" in right
    assert "d:latest: differs from quantize (transformer int8)" in wrong


def test_the_same_statement_is_not_attached_twice(here: Aimage) -> None:
    for _ in range(2):
        here("convert", "m", "d", "--quantize", "int8", "-q")
    layout, stored = open_stored(here, "d")
    assert len(list_attachments(layout.roots, stored.descriptor.digest)) == 1
    assert here("ls", "--json").value[0]["reference"] == "d:latest"


def test_a_statement_too_many_is_refused_and_none_is_dropped(here: Aimage) -> None:
    layout, stored = open_stored(here, "m")
    subject = stored.descriptor
    for number in range(16):
        state(here, "m", quantized(f"sha256:{number:064}"))
    kept = list_attachments(layout.roots, subject.digest)
    assert len(kept) == 16
    with pytest.raises(UsageError, match="has 16 attached artifacts in the store"):
        state(here, "m", quantized(f"sha256:{16:064}"))
    state(here, "m", quantized(f"sha256:{0:064}"))
    assert list_attachments(layout.roots, subject.digest) == kept


def test_an_aimage_without_a_statement_is_an_error(here: Aimage) -> None:
    err = here("verify", "m", "--rederive", code=5).err
    assert "no statement says from which AImage m:latest was made" in err


def test_a_conversion_that_changes_nothing_has_no_statement(here: Aimage) -> None:
    here("convert", "m", "d", "--dtype", "auto", "-q")
    assert find_digest(here, "d") == find_digest(here, "m")
    assert not (here.store / ".aimage" / "attached").exists()


def test_a_tensor_that_does_not_fit_in_memory_is_a_sentence(
    here: Aimage, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(blob_encoder.BlobEncoder, "encode", fail)
    err = here("verify", "d", "--rederive", code=1).err
    assert "does not fit in memory\n  compute fewer tensors at a time: --jobs 1" in err


def test_adapters_are_found_by_their_digests(here: Aimage) -> None:
    here("convert", "m", "d", "--lora", "ink.safetensors:0.7", "-q")
    out = here("verify", "d", "--rederive", code=5).out
    assert "the adapter ink.safetensors (sha256:" in out and "is not in the store" in out
    here("verify", "d", "--rederive", "--lora", "ink.safetensors")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rederive",), "--rederive requires REF"),
        (("m", "--sample", "1"), "--sample and --lora require --rederive"),
        (("m", "--rederive", "--repair"), "--rederive cannot be combined"),
        (("m", "--rederive", "--signature"), "--rederive cannot be combined"),
    ],
)
def test_wrong_combinations_of_options_are_refused(
    here: Aimage, words: tuple[str, ...], message: str
) -> None:
    assert message in here("verify", *words, code=2).err


# -- the value


SUBJECT, OTHER = Digest.of(b"subject"), Digest.of(b"other")
FULL = Derivation(
    OTHER,
    DerivationRecipe(
        Operation.FUSE,
        "bf16",
        {"transformer": ComponentType("int8", 64), "text_encoder": ComponentType("fp8")},
        (UsedAdapter("ink:v1", OTHER, 0.5),),
        OTHER,
        True,
    ),
    "fuse-v1",
)


def test_a_statement_is_read_as_written() -> None:
    payload = FULL.encode(SUBJECT)
    assert Derivation.parse(payload, SUBJECT) == FULL
    assert FULL.encode(SUBJECT) == payload
    with pytest.raises(FormatError, match="about another manifest"):
        Derivation.parse(payload, OTHER)


def test_the_artifact_has_no_time_and_the_subject() -> None:
    subject = Descriptor("application/vnd.oci.image.manifest.v1+json", SUBJECT, 7)
    manifest, payload = build_referrer(FULL, subject)
    assert manifest == build_referrer(FULL, subject)[0]
    assert manifest.artifact_type == lineage.TYPE and manifest.subject == subject
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "", "digest": {"sha256": SUBJECT.encoded}}]
    assert statement["predicateType"] == lineage.PREDICATE


def deep() -> Any:
    value: Any = {}
    for _ in range(200):
        value = {"a": value}
    return value


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "huge": (lambda d: d | {"spec": "a" * (1 << 20)}, "too large"),
    "deep": (lambda d: d | {"tool": deep()}, "nested more than"),
    "unknown operation": (lambda d: d | {"recipe": {"op": "train"}}, "'train' is unknown"),
    "operation of another type": (lambda d: d | {"recipe": {"op": ["cast"]}}, "is unknown"),
    "no recipe": (lambda d: d | {"recipe": None}, "the recipe is not a JSON object"),
    "no parent": (lambda d: d | {"parent": {}}, "the digest of the parent is not"),
    "parent without a digest": (lambda d: d | {"parent": {"digest": {"md5": "a"}}}, "no digest by"),
    "path as a digest": (lambda d: d | {"parent": {"digest": {"sha256": "../x"}}}, "invalid"),
    "many adapters": (
        lambda d: d | {"recipe": {"op": "fuse", "adapters": [{}] * 65}},
        "not a list of at most 64",
    ),
    "strength": (
        lambda d: d | {"recipe": {"op": "fuse", "adapters": [{**d["parent"], "strength": True}]}},
        "is not a number",
    ),
    "group size": (
        lambda d: (
            d
            | {"recipe": {"op": "quantize", "components": {"x": {"type": "y", "groupSize": "64"}}}}
        ),
        "is not an integer",
    ),
    "component": (
        lambda d: d | {"recipe": {"op": "quantize", "components": {"a=b,c": {"type": "int8"}}}},
        "is malformed",
    ),
    "specification": (lambda d: d | {"spec": "\x1b[2J"}, "the specification"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_statement_is_refused(kind: str) -> None:
    change, message = HOSTILE[kind]
    statement = json.loads(FULL.encode(SUBJECT))
    predicate = statement["predicate"]
    predicate["derivation"] = change(predicate["derivation"])
    with pytest.raises(FormatError, match=message):
        Derivation.parse(json.dumps(statement).encode(), SUBJECT)


def test_a_hostile_statement_is_a_sentence_of_the_verb(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    shutil.rmtree(here.store / ".aimage" / "attached")
    layout, stored = open_stored(here, "d")
    manifest, _ = build_referrer(FULL, stored.descriptor)
    layer = manifest.layers[0]
    raw = manifest.raw.replace(str(layer.digest).encode(), str(Digest.of(b"{}")).encode())
    raw = raw.replace(f'"size":{layer.size}'.encode(), b'"size":2')
    content = Descriptor.of(manifest.media_type, raw)
    layout.push(Descriptor.of("application/json", b"{}"), build_bytes_body(b"{}"))
    layout.push(content, build_bytes_body(raw))
    attach(layout, stored.descriptor.digest, content)
    out = here("verify", "d", "--rederive", code=5).out
    assert "is not an in-toto statement of version 1" in out
    assert read_derivation(layout, stored.descriptor) is None


# -- under a policy


def test_a_policy_decides_about_the_parent_only(place: Place) -> None:
    here, name = place.here, f"{place.repository}:int8"
    here("convert", place.name, name, "--quantize", "int8", "-q")
    here("push", name, "-q")
    place.enforce()
    out = here("verify", name, "--rederive", code=5).out
    assert "is refused by" in out
    place.lift()
    place.sign()
    place.enforce()
    here("verify", name, "--rederive")
    # The result itself is not signed
    assert "is refused by" in here("export", name, here.home / "out", code=5).err
    place.empty("pull", name, code=5)
    place.lift()
    place.empty("pull", name, "-q")
    place.enforce()
    (report,) = place.empty("verify", name, "--rederive", "--json", "-q").value
    assert report["isDerived"] and report["statements"][0]["parentFrom"] == "registry"


def test_statements_travel_under_a_policy(place: Place) -> None:
    here, name = place.here, f"{place.repository}:int8"
    here("convert", place.name, name, "--quantize", "int8", "-q")
    here("push", name, "-q")
    for signed in (place.name, name):
        here("sign", signed, "--key", place.private, "-q")
    place.enforce()
    target = f"{place.repository}-copy:int8"
    here("copy", name, target, "-q")
    kinds = {entry["artifactType"] for entry in here("referrers", target, "--json").value}
    assert lineage.TYPE in kinds and len(kinds) == 2
    here("save", name, "-o", "saved.tar", "-q")
    place.empty("load", here.home / "saved.tar", "-q")
    names = [row["reference"] for row in place.empty("ls", "--json").value]
    assert names == [name]
    place.empty("pull", place.name, "-q")
    place.empty("verify", name, "--rederive")


# -- travel and life


def test_a_statement_travels(here: Aimage, repository: str) -> None:
    source, target = f"{repository}:int8", f"{repository}-copy:int8"
    here("tag", "m", f"{repository}:v1", "-q")
    here("convert", f"{repository}:v1", source, "--quantize", "int8", "-q")
    digest = find_digest(here, source)
    here("push", f"{repository}:v1", "-q")
    here("push", source, "-q")
    here("copy", source, target, "-q")
    kinds = [
        [entry["artifactType"] for entry in here("referrers", name, "--json").value]
        for name in (source, target)
    ]
    assert kinds == [[lineage.TYPE]] * 2
    other = Aimage(here.home, here.home / "other")
    assert other("pull", source).line == digest
    (report,) = other("verify", source, "--rederive", "--json", "-q").value
    assert report["isDerived"] and report["statements"][0]["parentFrom"] == "registry"
    other("pull", target, "-q")
    other("rm", source, "-q")
    (report,) = other("verify", target, "--rederive", "--json", "-q").value
    assert report["isDerived"] and report["statements"][0]["parentFrom"] == "store"


def test_a_saved_statement_is_loaded_without_a_name(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    here("save", "m", "d", "-o", "all.tar", "-q")
    here("save", "d", "-o", "d.tar", "-q")
    other = Aimage(here.home, here.home / "other")
    other("load", "all.tar", "-q")
    assert [row["reference"] for row in other("ls", "--json").value] == ["d:latest", "m:latest"]
    other("verify", "d", "--rederive")
    other("save", "m", "d", "-o", "again.tar", "-q")
    assert (here.home / "all.tar").read_bytes() == (here.home / "again.tar").read_bytes()
    third = Aimage(here.home, here.home / "third")
    third("load", "d.tar", "--as", "e", "-q")
    out = third("verify", "e", "--rederive", code=5).out
    assert "is not complete in the store; pull or create the parent" in out


def test_a_statement_of_a_later_version_travels(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    shutil.rmtree(here.store / ".aimage" / "attached")
    layout, stored = open_stored(here, "d")
    derivation = quantized(find_digest(here, "m"))
    payload = derivation.encode(stored.descriptor.digest).replace(b'"quantize"', b'"prune"')
    attach_payload(layout, stored.descriptor, payload)
    here("save", "m", "d", "-o", "all.tar", "-q")
    other = Aimage(here.home, here.home / "other")
    other("load", "all.tar", "-q")
    out = other("verify", "d", "--rederive", code=5).out
    assert "the operation 'prune' is unknown; a later version of the program may know it" in out


def attach_payload(layout: ImageLayout, subject: Descriptor, payload: bytes) -> None:
    """Attach a statement of any bytes to a manifest."""
    layer = Descriptor(IN_TOTO, Digest.of(payload), len(payload))
    manifest = build_artifact(lineage.TYPE, [layer], subject, {})
    for content, data in (
        (layer, payload),
        (manifest.config, EMPTY),
        (manifest.descriptor, manifest.raw),
    ):
        layout.push(content, build_bytes_body(data))
    attach(layout, subject.digest, manifest.descriptor)


def test_a_statement_is_collected_with_its_subject(here: Aimage) -> None:
    before = blobs(here)
    here("convert", "m", "d", "--quantize", "int8", "-q")
    made = blobs(here)
    here("gc", "--grace", "0s", "-q")
    assert blobs(here) == made
    assert here("df", "--json").value[0]["unneeded"]["blobs"] == 0
    here("rm", "d", "--gc", "-q")
    assert blobs(here) == before
    assert not [*(here.store / ".aimage" / "attached").iterdir()]


def test_a_statement_about_a_manifest_of_a_lower_store_is_kept(here: Aimage) -> None:
    here("convert", "m", "d", "--quantize", "int8", "-q")
    here("save", "d", "-o", "d.tar", "-q")
    shutil.rmtree(here.store / ".aimage" / "attached")
    here("gc", "--grace", "0s", "-q")
    upper = Aimage(here.home, here.home / "upper")
    upper.environment["AIMAGE_STORE"] = f"{upper.store}{os.pathsep}{here.store}"
    upper("load", "d.tar", "-q")
    digest = find_digest(here, "d").partition(":")[2]
    assert digest not in blobs(upper)
    upper("gc", "--grace", "0s", "-q")
    upper("verify", "d", "--rederive")
    upper("rm", "d", "--gc", "-q")
    assert not [*(upper.store / ".aimage" / "attached").iterdir()]


def blobs(here: Aimage) -> set[str]:
    return {path.name for path in (here.store / "blobs" / "sha256").iterdir()}


@pytest.mark.integration
def test_a_flipped_code_of_the_shapes_model_is_named(tmp_path: Path) -> None:
    """In a model that was trained, of 3.9 million parameters, with one thread and with all."""
    here = Aimage(tmp_path, tmp_path / "store")
    here("create", "m", SHAPES, "-q")
    here("convert", "m", "d", "--quantize", "int8", "-q")
    assert "equal to quantize (transformer int8)" in here("verify", "d", "--rederive").out
    name = "transformer/layers.0.attention.to_q.weight"
    replace_layer(here, "d", name, flip_last)
    for options in ((), ("--jobs", "1")):
        assert name in here("verify", "d", "--rederive", *options, code=5).out
