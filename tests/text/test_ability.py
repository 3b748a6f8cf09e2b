"""Models are listed with what they can do here, and other requests are refused before a load."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.errors import UnrunnableError
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model import ability as module
from clowder_aimage.model.ability import Ability
from clowder_aimage.model.stored_ability import find_ability
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.importer.formats_gguf import LLAMA, UINT32, WEIGHTS, gguf
from tests.program import need_package
from tests.text.tiny_encoder import write_encoder, write_json
from tests.text.tiny_text import add_pooling, write_model

pytest.importorskip("jinja2", reason="jinja2 is not installed")
need_package("mlx_lm")


def pack(root: Path, source: Path) -> Ability:
    layout = ImageLayout(root / "store")
    create(layout, Reference.parse("a"), source)
    stored = read_aimage(layout, Reference.parse("a"))
    return find_ability(layout, stored.descriptor.digest, stored.aimage)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_compressed_files_are_read(tmp_path: Path, compression: str) -> None:
    layout, form = (
        ImageLayout(tmp_path / "store"),
        ModelForm(whole_files=True, compression=compression),
    )
    path = write_model(tmp_path / "model")
    packed = create(layout, Reference.parse("a"), path, form=form)
    ability = find_ability(layout, packed.descriptor.digest, packed.aimage)
    assert ability.list_capabilities() == ("chat", "completion", "tools", "thinking")


def test_a_network_that_is_not_known_yet_is_no_obstacle() -> None:
    assert Ability(("completion",), "mlx-lm").list_capabilities() == ("completion",)


def change(path: Path, **fields: Any) -> Path:
    config = json.loads((path / "config.json").read_text("utf-8"))
    write_json(path / "config.json", config | fields)
    return path


def set_pooling(path: Path, mode: str) -> Path:
    write_json(path / "1_Pooling/config.json", {"pooling_mode": mode})
    return path


def write_gguf(path: Path, tensors: Any, *pairs: Any) -> Path:
    path.mkdir()
    (path / "a.gguf").write_bytes(gguf([*LLAMA, *pairs], tensors))
    return path / "a.gguf"


def drop(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).unlink()
    return path


CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}
# The model, what it can do, and a part of the reason why it cannot
MODELS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "a chat": (lambda to: write_model(to, "llama"), ("chat", "completion", "tools"), ""),
    "an encoder": (write_encoder, ("embedding",), ""),
    "an encoder without a pooling": (
        lambda to: write_encoder(to, pooling=None),
        ("embedding",),
        "",
    ),
    "a classifier": (
        lambda to: change(write_encoder(to, pooling=None), **CLASSIFIER),
        (),
        "computes no embeddings",
    ),
    "a classifier with a pooling": (
        lambda to: change(write_encoder(to), **CLASSIFIER),
        ("embedding",),
        "",
    ),
    "an unknown encoder": (
        lambda to: change(write_encoder(to), model_type="modernbert", architectures=["X"]),
        (),
        "no network of the type 'modernbert'",
    ),
    "another encoder": (
        lambda to: change(write_encoder(to), position_embedding_type="relative_key"),
        (),
        "position_embedding_type",
    ),
    "an encoder without a tokenizer": (
        lambda to: drop(write_encoder(to), "tokenizer.json"),
        (),
        "no tokenizer",
    ),
    "a chat without a tokenizer": (
        lambda to: drop(write_model(to), "tokenizer.json"),
        (),
        "no tokenizer",
    ),
    "an unknown network": (
        lambda to: change(write_model(to), model_type="unheard_of"),
        (),
        "no network of the type 'unheard_of'",
    ),
    "an activation that the network lacks": (
        lambda to: write_model(to, hidden_act="gelu"),
        (),
        "hidden_act = 'gelu' is not supported",
    ),
    "a network that needs a package": (
        lambda to: change(write_model(to), model_type="olmo"),
        (),
        "needs the package hf_olmo",
    ),
    "a setting of another type": (
        lambda to: write_model(to, rope_theta="5e3"),
        (),
        "rope_theta = '5e3'",
    ),
    "states without a pooling": (
        lambda to: change(write_model(to), architectures=["Qwen3Model"]),
        (),
        "no pooling",
    ),
    "states with a pooling": (
        lambda to: add_pooling(change(write_model(to), architectures=["Qwen3Model"])),
        ("embedding",),
        "",
    ),
    "an unknown pooling": (
        lambda to: set_pooling(add_pooling(write_model(to)), "sum"),
        (),
        "pooling_mode",
    ),
    "a vocabulary": (lambda to: write_gguf(to, []), (), "a vocabulary and no weights"),
    "a projector": (
        lambda to: write_gguf(to, [("v.blk.0.weight", *WEIGHTS[0][1:])]),
        (),
        "no tensor token_embd.weight",
    ),
    "a ranker": (
        lambda to: write_gguf(to, WEIGHTS, ("llama.pooling_type", UINT32, 4)),
        (),
        "ranks documents",
    ),
    "pictures": (lambda _: TINY, ("image",), ""),
}


@pytest.mark.parametrize(("write", "capabilities", "reason"), MODELS.values(), ids=MODELS)
def test_what_a_model_can_do(
    tmp_path: Path, write: Any, capabilities: tuple[str, ...], reason: str
) -> None:
    ability = pack(tmp_path, write(tmp_path / "model"))
    assert ability.list_capabilities() == capabilities
    obstacle = ability.find_obstacle()
    assert (obstacle is None) == (not reason) and reason in str(obstacle)
    if reason:
        with pytest.raises(UnrunnableError, match="a:latest cannot run here: "):
            ability.check("a:latest")


@pytest.mark.parametrize(
    ("runtime", "missing", "extra"),
    [
        ("mlx-lm", "mlx_lm", "text"),
        ("llama.cpp", "xllamacpp", "llama"),
        ("the encoder", "tokenizers", "mlx"),
        ("pipelines", "mlx torch", "mlx"),
    ],
)
def test_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, runtime: str, missing: str, extra: str
) -> None:
    ability = Ability(("x",), runtime, {"model_type": "qwen3"})
    gone = missing.split()
    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name in gone else find_spec("json")
    )
    assert ability.list_capabilities() == ()
    obstacle = ability.find_obstacle()
    assert obstacle is not None and obstacle.message == f"it needs the extra [{extra}]"
    assert obstacle.advice == {"hint": None, "remedy": "install_extra", "extra": extra}


def test_networks_without_the_library_of_gguf_are_advised() -> None:
    with pytest.raises(UnrunnableError) as raised:
        Ability(("embedding",), "mlx-lm", {"model_type": "modernbert"}).check("x")
    assert raised.value.hint == "convert it to GGUF, which llama.cpp may run"
