"""The chat templates and the special tokens in the files of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clowder_aimage.errors import ChatTemplateError
from clowder_aimage.tensor.config_fields import parse_object

DEFAULT, TOOL_USE = "default", "tool_use"
_FILES = {
    DEFAULT: "chat_template.jinja",
    TOOL_USE: f"additional_chat_templates/{TOOL_USE}.jinja",
}
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def find_templates(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, str]:
    """Return the templates by name: those of files, else those in ``tokenizer_config.json``.

    ``read`` returns a file of the tokenizer's folder, or None. The result can be empty.

    Raises:
        ChatTemplateError, ModelError: A file is malformed.
    """
    # The order of transformers: files have precedence over the configuration
    files = {
        name: _decode_text(path, data)
        for name, path in _FILES.items()
        if (data := read(path)) is not None
    }
    if DEFAULT in files:
        return files
    return _add_default(_read_templates(config, read) | files)


def _read_templates(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, str]:
    """Return the templates in JSON files by name."""
    sources = config.get("chat_template")
    if sources is None and (data := read("chat_template.json")) is not None:
        sources = parse_object("chat_template.json", data).get("chat_template")
    if isinstance(sources, str):
        return {DEFAULT: sources}
    if isinstance(sources, list):
        sources = {
            source.get("name"): source.get("template")
            for source in sources
            if isinstance(source, dict)
        }
    if not isinstance(sources, dict):
        return {}
    # Other ones, such as "rag", need what no request has
    return {
        name: text for name, text in sources.items() if name in _FILES and isinstance(text, str)
    }


def _add_default(templates: dict[str, str]) -> dict[str, str]:
    if templates and DEFAULT not in templates:
        return {**templates, DEFAULT: templates[TOOL_USE]}
    return templates


def parse_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a configuration names: ``bos_token`` and others.

    A value is a text, or an object with the text as ``content``.
    """
    tokens = {}
    for role in _ROLES:
        value = config.get(f"{role}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[f"{role}_token"] = value
    return tokens


def _decode_text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ChatTemplateError(f"{name} is not UTF-8") from None
