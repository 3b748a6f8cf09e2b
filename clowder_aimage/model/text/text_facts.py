"""Properties of a language model from its files, without loading it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from clowder_aimage.content.decompress import open_decompressed
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import AImage
from clowder_aimage.dialect.packing import has_packed_layers, is_packed, is_tar
from clowder_aimage.document.strict_json import ParseCache
from clowder_aimage.errors import AImageError, ModelError, is_passing
from clowder_aimage.formats.gguf_header import count_tensors, find_value, has_tensor
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.ability import ENCODER, LLAMA, MLX_LM, Ability
from clowder_aimage.model.text.embedding_recipe import Read, read_recipe
from clowder_aimage.model.text.encoder_config import find_word_kind, is_encoder, read_encoder
from clowder_aimage.model.text.language_model import CHAT, COMPLETION, EMBEDDING, THINKING, TOOLS
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.model.text.template_file import find_templates
from clowder_aimage.model.text.thought_format import has_thinking
from clowder_aimage.model.text.tool_call_format import has_tools
from clowder_aimage.oci import Digest, mediatype
from clowder_aimage.tensor.config_fields import parse_object

# Bytes of a tokenizer's configuration, or of a GGUF file's metadata
_MAX_FILE = 16 << 20
# Bytes at the beginning of a part of a GGUF model that has the number of its tensors
_LEAST_HEAD = 16
# The way to pool of a model that ranks documents (enum llama_pooling_type)
_RANK = 4
# The keys of templates in GGUF by name
GGUF_TEMPLATES = {
    "default": "tokenizer.chat_template",
    "tool_use": "tokenizer.chat_template.tool_use",
}
_CONFIG = "tokenizer_config.json"
_NO_TOKENIZER = "it has no tokenizer that can be read"
# Architectures that compute embeddings only: ggml-org/llama.cpp, src/llama-arch.cpp, and classes of
# Transformers without a language modeling head
_EMBEDDERS = re.compile(r"bert|embed|t5encoder|(?<!LMHead)Model$|ForMaskedLM$")


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The ability of a language model, its context in tokens if known, and its template.

    ``is_final`` is false while files that decide them are missing.
    """

    ability: Ability
    context: int | None
    template: str
    is_final: bool = True


_CACHE = ParseCache()


def is_embedder(aimage: AImage) -> bool:
    """Return True if the architecture of a language model computes embeddings only."""
    return _EMBEDDERS.search(str(aimage.properties.get("architecture"))) is not None


def read_text_facts(store: ImageLayout, manifest: Digest, aimage: AImage) -> TextFacts:
    """Return the properties of a language model; its files are read only once.

    The template is empty if its file is damaged, or not in the store yet.
    """
    if _is_known_late(aimage):
        ability = Ability((COMPLETION,), find_runtime(aimage) or "")
        return TextFacts(ability, _find_context(aimage), "", is_final=False)
    try:
        size = sum(len(layer.name) for layer in aimage.layers)
        read = partial(_read_facts, store, aimage)
        return _CACHE.get((store.root, manifest), size, read)
    except (AImageError, OSError) as error:
        kind = EMBEDDING if is_embedder(aimage) else COMPLETION
        # What is missing may arrive; what is damaged stays so
        fault = "" if is_passing(error) else str(error)
        ability = Ability((kind,), find_runtime(aimage) or "", fault=fault)
        return TextFacts(ability, _find_context(aimage), "", is_final=not is_passing(error))


def _is_known_late(aimage: AImage) -> bool:
    """Return True if the files can be read only once they are unpacked."""
    if find_runtime(aimage) == LLAMA:
        return has_packed_layers(aimage)
    return any(map(is_tar, aimage.layers))


def _find_context(aimage: AImage) -> int | None:
    stated = aimage.properties.get("context")
    return stated if type(stated) is int else None


def _read_facts(store: ImageLayout, aimage: AImage) -> TextFacts:
    is_gguf = find_runtime(aimage) == LLAMA
    return (_read_gguf_facts if is_gguf else _read_transformers_facts)(store, aimage)


def _read_gguf_facts(store: ImageLayout, aimage: AImage) -> TextFacts:
    heads = _read_gguf_heads(store, aimage)
    head, context = heads[0] if heads else b"", _find_context(aimage)
    pooling = find_value(head, f"{aimage.properties.get('architecture')}.pooling_type")
    if fault := _find_gguf_fault(heads, pooling):
        return TextFacts(Ability((), LLAMA, fault=fault), context, "")
    # A template of a layer has precedence over the template in GGUF's metadata, as in llama.cpp
    templates = _read_templates(store, aimage) or {
        name: text
        for name, key in GGUF_TEMPLATES.items()
        if isinstance(text := find_value(head, key), str)
    }
    if pooling or is_embedder(aimage):
        return TextFacts(Ability((EMBEDDING,), LLAMA), context, templates.get("default", ""))
    return _describe_writer(Ability((COMPLETION,), LLAMA), context, templates)


def _find_gguf_fault(heads: Sequence[bytes], pooling: object) -> str:
    """Return why a GGUF model cannot run, as far as the first bytes of its files say."""
    if not any(map(count_tensors, heads)):
        return "it has a vocabulary and no weights"
    head = heads[0]
    # The names of all tensors are in the first bytes
    is_whole = len(heads) == 1 and (len(head) < _MAX_FILE or b"blk.0." in head)
    if is_whole and not has_tensor(head, "token_embd.weight"):
        return "it is not a language model: it has no tensor token_embd.weight"
    return "it ranks documents; only text and embeddings are supported" if pooling == _RANK else ""


def _read_transformers_facts(store: ImageLayout, aimage: AImage) -> TextFacts:
    read = partial(_read_file, store, aimage)
    config = parse_object("config.json", read("config.json") or b"{}")
    if is_encoder(config):
        return _read_encoder_facts(aimage, config, read)
    templates, context = _read_templates(store, aimage), _find_context(aimage)
    template = templates.get("default", "")
    network: dict[str, Any] = {key: config.get(key) for key in ("model_type", "architectures")}
    ability = Ability((COMPLETION,), MLX_LM, network)
    if not (_has(aimage, "tokenizer.json") or _has(aimage, "vocab.json", "merges.txt")):
        return TextFacts(replace(ability, fault=_NO_TOKENIZER), context, template)
    settings = importlib.import_module("clowder_aimage.model.mlxlm.network_config")
    if fault := str(settings.find_fault(config)):
        return TextFacts(replace(ability, fault=fault), context, template)
    try:
        has_pooling = read_recipe(read).has_pooling
    except ModelError as error:
        return TextFacts(replace(ability, fault=str(error)), context, template)
    if is_embedder(aimage):
        fault = "" if has_pooling else "its files state no pooling of embeddings"
        ability = replace(ability, capabilities=(EMBEDDING,), fault=fault)
        return TextFacts(ability, context, "")
    capabilities = (COMPLETION, EMBEDDING) if has_pooling else (COMPLETION,)
    return _describe_writer(replace(ability, capabilities=capabilities), context, templates)


def _read_encoder_facts(aimage: AImage, config: Mapping[str, Any], read: Read) -> TextFacts:
    ability = Ability((EMBEDDING,), ENCODER)
    settings = parse_object(_CONFIG, read(_CONFIG) or b"{}")
    has_words = _has(aimage, "vocab.txt") and find_word_kind(settings, config.get("model_type"))
    if not (_has(aimage, "tokenizer.json") or has_words):
        return TextFacts(replace(ability, fault=_NO_TOKENIZER), None, "")
    try:
        _, recipe = read_encoder(config, read)
    except ModelError as error:
        return TextFacts(replace(ability, fault=error.message), None, "")
    return TextFacts(ability, recipe.max_length, "")


def _has(aimage: AImage, *names: str) -> bool:
    return all(aimage.find(name) or aimage.find(f"model/{name}") for name in names)


def _describe_writer(
    ability: Ability, context: int | None, templates: Mapping[str, str]
) -> TextFacts:
    """Return the facts of a model that writes texts, with what its templates add."""
    source, template = "\n".join(templates.values()), templates.get("default", "")
    capabilities = [CHAT] if source else []
    capabilities += ability.capabilities
    capabilities += [TOOLS] if has_tools(source) else []
    capabilities += [THINKING] if has_thinking(source) else []
    ability = replace(ability, capabilities=tuple(capabilities))
    return TextFacts(ability, context, template, is_final=_can_render())


def _can_render() -> bool:
    """Return True if templates can be read; the package may be installed later."""
    return importlib.util.find_spec("jinja2") is not None


def _read_gguf_heads(store: ImageLayout, aimage: AImage) -> list[bytes]:
    """Return the first bytes of each GGUF file of a model."""
    heads: list[bytes] = []
    for layer in aimage.layers:
        if layer.descriptor.media_type == mediatype.AIMAGE_GGUF:
            with store.find_path(layer.descriptor).open("rb") as file:
                # The metadata are those of the first part
                heads.append(file.read(_LEAST_HEAD if heads else _MAX_FILE))
    return heads


def _read_file(store: ImageLayout, aimage: AImage, name: str) -> bytes | None:
    """Return the bytes of a file of a model, or None."""
    layer = aimage.find(name) or aimage.find(f"model/{name}")
    if layer is None:
        return None
    if not is_packed(layer):
        return read_all(store.open(layer.descriptor), layer.descriptor, _MAX_FILE)
    with open_decompressed(store, layer.descriptor, layer.content, limit=_MAX_FILE) as file:
        return file.read()


def _read_templates(store: ImageLayout, aimage: AImage) -> dict[str, str]:
    """Return the templates in files by name; without jinja2 nothing can be rendered."""
    if not _can_render():
        return {}
    read = partial(_read_file, store, aimage)
    config = parse_object(_CONFIG, data) if (data := read(_CONFIG)) else {}
    return find_templates(config, read)
