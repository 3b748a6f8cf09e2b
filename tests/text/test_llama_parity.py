"""Greedy texts of llama.cpp are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xllamacpp

from clowder_aimage.model.llama import model as llama_model
from clowder_aimage.model.llama.params import make_params
from tests.text.llama_models import complete, load, write, write_plain
from tests.text.tiny_gguf import write_gguf

pytestmark = pytest.mark.integration
LENGTH = 64


def make_exact_params(*paths: Any, **options: Any) -> xllamacpp.CommonParams:
    """Return parameters with attention in F32, as that of transformers is here."""
    params = make_params(*paths, **options)
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return params


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_greedy_text_is_that_of_transformers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_model, "make_params", make_exact_params)
    torch = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    directory = write_plain(tmp_path / "model", kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = "the red ball is on the table"
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    ids = torch.tensor([[*bos, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
    drawn = network.generate(ids, max_new_tokens=LENGTH, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(drawn, skip_special_tokens=True)
    model = load(write_gguf(tmp_path / "model.gguf", directory))
    assert write(model, complete(prompt, LENGTH)) == expected
    assert len(drawn) == LENGTH
