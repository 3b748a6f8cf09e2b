"""The space before a text: tokenizer_config.json decides over tokenizer.json.

Transformers' classes make their own pre-tokenizer, and take the words of tokenizer.json only.
Source: transformers 5.24, ``models/*/tokenization_*.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clowder_aimage.model.text.bpe_file import is_byte_level

_KEY = "add_prefix_space"
# Those with the metasymbol of SentencePiece, by the class and by the model of a class
_METASPACE = ("XLMRobertaTokenizer", "CamembertTokenizer", "xlm-roberta", "camembert")


def has_prefix_space(config: Mapping[str, Any], model_type: object) -> bool:
    """Return True if a configuration decides over the space before a text."""
    stated = type(config.get(_KEY)) is bool
    return stated and (is_byte_level(config, model_type) or _is_metaspace(config, model_type))


def set_prefix_space(value: Mapping[str, Any], config: Mapping[str, Any], kind: object) -> bool:
    """Change the pre-tokenizer of tokenizer.json; return True if it was another one.

    kind: the ``model_type`` of the network.
    """
    if not has_prefix_space(config, kind):
        return False
    nodes = [*_list_splits(value.get("pre_tokenizer"))]
    changes = [_change(node, is_first=config[_KEY]) for node in nodes]
    return any(changes)


def _is_metaspace(config: Mapping[str, Any], model_type: object) -> bool:
    name = config.get("tokenizer_class") or model_type
    return str(name).removesuffix("Fast") in _METASPACE


def _change(node: dict[str, Any], *, is_first: bool) -> bool:
    before = dict(node)
    if node.get("type") == "ByteLevel":
        node[_KEY] = is_first
    elif node.get("type") == "Metaspace":
        # The older name of the same setting must not contradict it
        node.pop(_KEY, None)
        node["prepend_scheme"] = "always" if is_first else "never"
    return node != before


def _list_splits(component: Any) -> Iterator[dict[str, Any]]:
    """Yield a pre-tokenizer with those in it."""
    if isinstance(component, dict):
        yield component
        inner = component.get("pretokenizers")
        yield from (node for node in inner or () if isinstance(node, dict))
