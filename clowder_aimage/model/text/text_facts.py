"""Properties of a language model from its files, without loading it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import partial

from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import AImage
from clowder_aimage.document.strict_json import ParseCache
from clowder_aimage.errors import AImageError, is_passing
from clowder_aimage.formats.gguf_header import find_value
from clowder_aimage.formats.transformers import POOLING
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.text.language_model import CHAT, COMPLETION, EMBEDDING, THINKING, TOOLS
from clowder_aimage.oci import Digest, mediatype
from clowder_aimage.tensor.config_fields import parse_object

# Bytes of a tokenizer's configuration, or of a GGUF file's metadata
_MAX_FILE = 16 << 20
_TOOLS = re.compile(r"\btools\b")
_THINKING = re.compile(r"enable_thinking|<think>")
_CONFIG = "tokenizer_config.json"
# Architectures that compute embeddings only: ggml-org/llama.cpp, src/llama-arch.cpp, and classes of
# Transformers without a language modeling head
_EMBEDDERS = re.compile(r"bert|embed|t5encoder|(?<!LMHead)Model$|ForMaskedLM$")


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The capabilities of a language model, its context in tokens if known, and its template.

    ``is_final`` is false while files that decide them are missing.
    """

    capabilities: tuple[str, ...]
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
    stated = aimage.properties.get("context")
    context = stated if type(stated) is int else None
    try:
        size = sum(len(layer.name) for layer in aimage.layers)
        read = partial(_read_facts, store, aimage, context)
        return _CACHE.get((store.root, manifest), size, read)
    except (AImageError, OSError) as error:
        kind = EMBEDDING if is_embedder(aimage) else COMPLETION
        return TextFacts((kind,), context, "", is_final=not is_passing(error))


def _read_facts(store: ImageLayout, aimage: AImage, context: int | None) -> TextFacts:
    if is_embedder(aimage):
        return TextFacts((EMBEDDING,), context, "")
    template = _read_template(store, aimage)
    # A template of a layer has precedence over the template in GGUF's metadata, as in llama.cpp
    if head := _read_gguf_head(store, aimage):
        template = template or str(find_value(head, "tokenizer.chat_template") or "")
        if find_value(head, f"{aimage.properties.get('architecture')}.pooling_type"):
            return TextFacts((EMBEDDING,), context, template)
    capabilities = [CHAT] if template else []
    capabilities += [COMPLETION]
    capabilities += [EMBEDDING] if aimage.find(POOLING) else []
    capabilities += [TOOLS] if _TOOLS.search(template) else []
    capabilities += [THINKING] if _THINKING.search(template) else []
    return TextFacts(tuple(capabilities), context, template, is_final=_can_render())


def _can_render() -> bool:
    """Return True if templates can be read; the package may be installed later."""
    return importlib.util.find_spec("jinja2") is not None


def _read_gguf_head(store: ImageLayout, aimage: AImage) -> bytes:
    """Return the first bytes of the first GGUF file, or nothing."""
    for layer in aimage.layers:
        if layer.descriptor.media_type == mediatype.AIMAGE_GGUF:
            with store.find_path(layer.descriptor).open("rb") as file:
                return file.read(_MAX_FILE)
    return b""


def _read_template(store: ImageLayout, aimage: AImage) -> str:
    """Return the default template in a file; without jinja2 nothing can be rendered."""
    try:
        from clowder_aimage.model.text.chat_template import find_templates
    except ModuleNotFoundError:
        return ""

    def read(name: str) -> bytes | None:
        layer = aimage.find(name) or aimage.find(f"model/{name}")
        if layer is None:
            return None
        return read_all(store.open(layer.descriptor), layer.descriptor, _MAX_FILE)

    config = parse_object(_CONFIG, data) if (data := read(_CONFIG)) else {}
    return find_templates(config, read).get("default", "")
