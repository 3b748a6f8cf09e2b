"""LoRA adapters: metadata, packing alone or with a model, and mismatched bases."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import convert, create
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError, ModelError, NotFoundError, UsageError
from clowder_aimage.formats.lora import check_fit
from clowder_aimage.importer import Recipe
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.oci import Reference, mediatype
from clowder_aimage.tensor import encode_header
from tests.importer.conftest import Model, in_memory, safetensors

STYLE = Reference.parse("style")
TO_Q = "layers.0.attention.to_q"


def pair(
    stem: str,
    rank: int = 2,
    rows: int = 4,
    columns: int = 4,
    words: tuple[str, str] = ("lora_A", "lora_B"),
    dtype: str = "F32",
) -> list[Any]:
    """Return a low-rank pair for ``rows`` of ``columns``."""
    return [
        (f"{stem}.{words[0]}.weight", dtype, (rank, columns)),
        (f"{stem}.{words[1]}.weight", dtype, (rows, rank)),
    ]


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., StoredAImage]:
    """Write an adapter file and pack it."""

    def make(
        tensors: Any,
        name: str = "style.safetensors",
        form: Any = None,
        base: Any = None,
        store: Any = None,
        **metadata: Any,
    ) -> StoredAImage:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(safetensors(tensors, **metadata))
        store = store or in_memory()
        create(store, STYLE, path, form=form or ModelForm(), base=base)
        return read_aimage(store, STYLE)

    return make


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("diffusion_model.", ("lora_A", "lora_B")),  # ComfyUI
        ("base_model.model.", ("lora_A.default", "lora_B.default")),  # PEFT
        ("", ("lora.down", "lora.up")),
    ],
)
def test_rank_and_targets_are_read_from_the_tensors(
    adapter: Callable[..., StoredAImage], prefix: str, words: tuple[str, str]
) -> None:
    stored = adapter([*pair(f"{prefix}{TO_Q}", 2, words=words), *pair("other", 3, words=words)])
    found = stored.aimage.properties["adapter"]
    assert found["rank"] == 3
    assert found["targets"] == sorted([TO_Q, "other"])
    validate("aimage-config", stored.aimage.properties)
    (layer,) = stored.aimage.layers
    assert layer.name == "style.safetensors"
    assert layer.descriptor.media_type == mediatype.AIMAGE_LORA
    assert layer.descriptor.media_type == "application/vnd.clowder.aimage.adapter.lora.layer.v1"


def test_kohya_tensor_names_are_recognised(adapter: Callable[..., StoredAImage]) -> None:
    stored = adapter(pair("lora_unet_layers_0_attention_to_q", words=("lora_down", "lora_up")))
    assert stored.aimage.properties["adapter"]["targets"] == ["layers_0_attention_to_q"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"trigger_words": "sks, a dog ,"}, {"triggerWords": ["sks", "a dog"]}),
        ({"modelspec.trigger_phrase": "ohwx"}, {"triggerWords": ["ohwx"]}),
        (
            {"ss_tag_frequency": json.dumps({"10_sks": {"sks": 12, "dog": 12, "grass": 3}})},
            {"triggerWords": ["sks", "dog"]},
        ),
        ({"ss_tag_frequency": "{not json"}, {}),
        ({"recommended_weight": "strong", "default_weight": "0.5"}, {"weight": 0.5}),
        ({"recommended_weight": "nan"}, {}),
    ],
)
def test_trigger_words_and_weight_are_read_from_the_metadata(
    adapter: Callable[..., StoredAImage], metadata: dict[str, str], expected: dict[str, Any]
) -> None:
    found = adapter(pair(TO_Q), **metadata).aimage.properties["adapter"]
    assert {key: found.get(key) for key in ("triggerWords", "weight")} == {
        "triggerWords": None,
        "weight": None,
        **expected,
    }


def test_alpha_is_read_if_all_values_agree(tmp_path: Path) -> None:
    def packed(*alphas: float) -> Any:
        tensors = pair("a") + pair("b")
        names = [(f"{stem}.alpha", "F32", ()) for stem in "ab"[: len(alphas)]]
        data = safetensors(tensors)[len(encode_header(tensors)) :]
        path = tmp_path / "alpha.safetensors"
        path.write_bytes(
            encode_header([*tensors, *names])
            + data
            + b"".join(struct.pack("<f", alpha) for alpha in alphas)
        )
        store = in_memory()
        create(store, STYLE, path)
        return read_aimage(store, STYLE).aimage.properties["adapter"].get("alpha")

    assert packed(8.0, 8.0) == 8
    assert packed(0.5, 0.5) == 0.5
    assert packed(8.0, 4.0) is None
    assert packed() is None


def test_a_peft_directory_is_packed(tmp_path: Path) -> None:
    directory = tmp_path / "peft"
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(
        safetensors(pair("base_model.model.model.layers.0.self_attn.q_proj", 8))
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "org/llm"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "README.md").write_text("---\nlicense: mit\n---\n")
    store = in_memory()
    create(store, STYLE, directory)
    aimage = read_aimage(store, STYLE).aimage
    alone = create(store, Reference.parse("file"), directory / "adapter_model.safetensors")
    assert alone.descriptor == store.resolve(STYLE)
    assert [layer.name for layer in aimage.layers] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert aimage.properties["license"] == "mit"
    assert aimage.properties["adapter"] == {
        "type": "lora",
        "rank": 8,
        "alpha": 16,
        "targets": ["model.layers.0.self_attn.q_proj"],
        "base": "org/llm",
    }


def test_an_adapter_references_its_base(adapter: Callable[..., StoredAImage], model: Model) -> None:
    store = in_memory()
    base = create(store, Reference.parse("base"), model.directory).descriptor
    stored = adapter(pair(f"diffusion_model.{TO_Q}"), base=Reference.parse("base"), store=store)
    assert stored.manifest.subject is not None
    assert stored.manifest.subject.digest == base.digest
    assert stored.manifest.subject.size == base.size
    assert stored.aimage.subject == stored.manifest.subject


def test_a_missing_base_is_refused(adapter: Callable[..., StoredAImage]) -> None:
    with pytest.raises(NotFoundError, match="base"):
        adapter(pair(TO_Q), base=Reference.parse("base"))


@pytest.mark.parametrize(
    "tensors",
    [
        pair("diffusion_model.blocks.7.attn1.to_k"),  # for a layer that the base lacks
        pair(TO_Q, rows=8),  # wider than the base's layer
    ],
)
def test_an_adapter_for_another_base_is_refused(
    adapter: Callable[..., StoredAImage], model: Model, tensors: Any
) -> None:
    store = in_memory()
    create(store, Reference.parse("base"), model.directory)
    with pytest.raises(FormatError, match="does not match base"):
        adapter(tensors, base=Reference.parse("base"), store=store)
    with pytest.raises(NotFoundError):
        store.resolve(STYLE)


def test_a_model_is_packed_with_its_adapters(tmp_path: Path, model: Model) -> None:
    paths = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(safetensors(pair(TO_Q), seed=name, trigger_word=name))
        paths.append((name, path))
    store = in_memory()
    form = ModelForm(adapters=tuple(reversed(paths)))
    create(store, Reference.parse("model"), model.directory, form=form)
    aimage = read_aimage(store, Reference.parse("model")).aimage
    lora = [one for one in aimage.layers if one.descriptor.media_type == mediatype.AIMAGE_LORA]
    assert [layer.name for layer in lora] == [
        "adapters/one/one.safetensors",
        "adapters/two/two.safetensors",
    ]
    assert list(aimage.properties["adapters"]) == ["one", "two"]
    assert aimage.properties["adapters"]["one"]["triggerWords"] == ["one"]
    validate("aimage-config", aimage.properties)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, model: Model) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(safetensors(pair("blocks.0.to_q")))
    with pytest.raises(FormatError, match="does not match the model"):
        create(in_memory(), STYLE, model.directory, form=ModelForm(adapters=(("other", path),)))


def test_two_adapters_of_one_name_are_refused(tmp_path: Path, model: Model) -> None:
    path = tmp_path / "one.safetensors"
    path.write_bytes(safetensors(pair(TO_Q)))
    with pytest.raises(UsageError, match="duplicate adapter name: one"):
        create(in_memory(), STYLE, model.directory, form=ModelForm(adapters=(("one", path),) * 2))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("layers.0.weight", "F32", (2, 2))], "is not a tensor of an adapter"),
        (pair(TO_Q)[:1], "one half"),
        ([*pair(TO_Q)[:1], (f"{TO_Q}.lora_B.weight", "F32", (4, 3))], "incompatible shapes"),
        ([(f"{TO_Q}.lora_A.weight", "F32", (4,)), *pair(TO_Q)[1:]], "incompatible shapes"),
    ],
)
def test_tensors_that_are_not_pairs_are_refused(tmp_path: Path, tensors: Any, said: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(safetensors(tensors))
    with pytest.raises(FormatError, match=said):
        create(in_memory(), STYLE, path, form=ModelForm(format="lora"))


def test_a_pickled_adapter_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match="pickled"):
        create(in_memory(), STYLE, tmp_path, form=ModelForm(format="lora"))


def test_an_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(pair(TO_Q)))
    with pytest.raises(FormatError, match="unsupported adapter type 'IA3'"):
        create(in_memory(), STYLE, tmp_path, form=ModelForm(format="lora"))


def test_a_peft_embedding_adapter_fits_its_table(
    adapter: Callable[..., StoredAImage], tmp_path: Path
) -> None:
    """PEFT's lora_embedding_A is [rank, words], its B [width, rank]; the matrix [words, width]."""
    stem = "base_model.model.model.embed_tokens"
    tensors = [
        (f"{stem}.lora_embedding_A", "F32", (4, 128)),
        (f"{stem}.lora_embedding_B", "F32", (64, 4)),
    ]
    assert adapter(tensors).aimage.properties["adapter"]["rank"] == 4
    path = tmp_path / "style.safetensors"
    check_fit(path, {"model.embed_tokens.weight": (128, 64)}, "base")
    with pytest.raises(FormatError, match=r"\[128, 64\], the model \[64, 128\]"):
        check_fit(path, {"model.embed_tokens.weight": (64, 128)}, "base")


def test_a_stacked_qkv_adapter_fits_the_separate_layers(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(safetensors(pair("diffusion_model.layers.0.attention.qkv", rows=12)))
    shapes = {f"transformer/layers.0.attention.to_{letter}.weight": (4, 4) for letter in "qkv"}
    check_fit(path, shapes, "base")
    with pytest.raises(FormatError, match=r"\[12, 4\]"):
        check_fit(path, _wider(shapes), "base")
    with pytest.raises(FormatError, match="has no"):
        check_fit(path, {"transformer/other.weight": (4, 4)}, "base")


def _wider(shapes: dict[str, tuple[int, int]]) -> dict[Any, Any]:
    return dict.fromkeys(shapes, (8, 4))


def test_base_is_only_valid_for_adapters(model: Model, tmp_path: Path) -> None:
    store = in_memory()
    create(store, Reference.parse("base"), model.directory)
    with pytest.raises(UsageError, match="only an adapter or a ControlNet can have a base"):
        create(store, STYLE, model.directory, base=Reference.parse("base"))


def test_convert_refuses_adapters(adapter: Callable[..., StoredAImage], model: Model) -> None:
    store = in_memory()
    create(store, Reference.parse("base"), model.directory)
    adapter(pair(TO_Q), base=Reference.parse("base"), store=store)
    with pytest.raises(UsageError, match="whole files"):
        convert(store, STYLE, Reference.parse("new"), Recipe.parse("f16"))


def test_an_infinite_alpha_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 1e999}')
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(pair(TO_Q)))
    with pytest.raises(FormatError, match="the number 1e999 is too large"):
        create(in_memory(), STYLE, tmp_path, form=ModelForm(format="lora"))
