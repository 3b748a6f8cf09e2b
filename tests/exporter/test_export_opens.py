"""The target libraries open exported directories: diffusers, transformers and others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.export import export
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.exporter.conftest import Artifact, tensors_in
from tests.model.random_flux2 import write_flux2

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]
NAME = Reference.parse("model")


@pytest.fixture(params=[10**9, 100_000], ids=["one file", "shards"])
def exported(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    store = ImageLayout(tmp_path / "store")
    create(store, NAME, tiny)
    export(store, NAME, tmp_path / "out", shard=request.param)
    return tmp_path / "out"


def loaded(make: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def state(module: Any) -> dict[Any, Any]:
    """Return the bits of all tensors of a network."""
    import torch

    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
    }


def test_diffusers_loads_the_same_pipeline(exported: Path, tiny: Path) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    pipes = [
        loaded(
            lambda path=path: diffusers.ZImagePipeline.from_pretrained(
                path, torch_dtype=torch.bfloat16, local_files_only=True
            )
        )
        for path in (tiny, exported)
    ]
    for part in ("transformer", "vae", "text_encoder"):
        ours, theirs = (state(getattr(pipe, part)) for pipe in pipes)
        assert ours == theirs
        assert ours


def test_transformers_loads_the_same_encoder(exported: Path, tiny: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours, theirs = (
        loaded(lambda path=path: transformers.AutoModel.from_pretrained(path / "text_encoder"))
        for path in (exported, tiny)
    )
    assert state(ours) == state(theirs)
    tokens = [
        transformers.AutoTokenizer.from_pretrained(path / "tokenizer")("a red cube").input_ids
        for path in (exported, tiny)
    ]
    assert tokens[0] == tokens[1]


def test_transformers_opens_a_model_of_tensors_at_the_top(artifact: Artifact, tiny: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    artifact.config |= {"format": "transformers"}
    for name, tensor in tensors_in(tiny / "text_encoder/model.safetensors").items():
        artifact.add_tensors(name, {name: tensor})
    artifact.add("config.json", (tiny / "text_encoder/config.json").read_bytes())
    artifact.finish().export(shard=20_000)
    assert (artifact.out / "model.safetensors.index.json").exists()
    ours, theirs = (
        loaded(lambda path=path: transformers.AutoModel.from_pretrained(path))
        for path in (artifact.out, tiny / "text_encoder")
    )
    assert state(ours) == state(theirs)


def test_safetensors_maps_dtypes_of_every_width(artifact: Artifact) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    sizes = {"U8": (torch.uint8, 3), "BF16": (torch.bfloat16, 5), "F32": (torch.float32, 1)}
    wanted = {}
    for dtype, (kind, count) in sizes.items():
        tensor = torch.arange(count).to(kind)
        data = tensor.view(torch.uint8).numpy().tobytes()
        artifact.add_tensors(dtype.lower(), {dtype.lower(): (dtype, (count,), data)})
        wanted[dtype.lower()] = tensor
    artifact.finish().export()
    found = load_file(artifact.out / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_peft_opens_an_adapter_and_computes_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )

    def base() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()

    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trained = loaded(lambda: peft.get_peft_model(base(), lora))
    loaded(lambda: trained.save_pretrained(tmp_path / "peft"))
    store = ImageLayout(tmp_path / "store")
    create(store, NAME, tmp_path / "peft")
    export(store, NAME, tmp_path / "out")
    ids = torch.arange(8)[None]
    again = loaded(lambda: peft.PeftModel.from_pretrained(base(), tmp_path / "out"))
    with torch.no_grad():
        plain, one, other = (model(ids).logits for model in (base(), trained, again.eval()))
    assert torch.equal(one, other)
    assert not torch.equal(one, plain)


def test_diffusers_opens_single_files_of_comfyui(tiny: Path, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    store = ImageLayout(tmp_path / "store")
    create(store, NAME, tiny)
    export(store, NAME, tmp_path / "split", layout="comfyui")
    export(store, NAME, tmp_path / "one", layout="comfyui-all-in-one")
    whole = tmp_path / "one/checkpoints/z_image.safetensors"
    parts = {
        "transformer": (
            diffusers.ZImageTransformer2DModel,
            tmp_path / "split/diffusion_models/z_image.safetensors",
        ),
        "vae": (diffusers.AutoencoderKL, tmp_path / "split/vae/ae.safetensors"),
    }
    for name, (kind, file) in parts.items():
        options = {"torch_dtype": torch.bfloat16, "local_files_only": True}
        known = loaded(partial(kind.from_pretrained, tiny / name, **options))
        for path in (file, whole):
            single = partial(kind.from_single_file, str(path), config=str(tiny / name), **options)
            assert state(loaded(single)) == state(known)


def test_diffusers_opens_the_transformer_of_flux2(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    kind = diffusers.Flux2Transformer2DModel
    write_flux2(tmp_path / "flux")
    store, own = ImageLayout(tmp_path / "store"), tmp_path / "flux/transformer"
    create(store, NAME, tmp_path / "flux")
    export(store, NAME, tmp_path / "split", layout="comfyui")
    file = tmp_path / "split/diffusion_models/flux2.safetensors"
    options = {"local_files_only": True}
    single = partial(kind.from_single_file, str(file), config=str(own), **options)
    assert state(loaded(single)) == state(loaded(partial(kind.from_pretrained, own, **options)))
