"""Kinds of AImages, and the interfaces for them: known without loading a model."""

from __future__ import annotations

from clowder_aimage.dialect import AImage
from clowder_aimage.http.api_error import OLLAMA, OPENAI, ApiError
from clowder_aimage.model.stored_ability import is_runnable
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.model.text.text_facts import is_embedder
from clowder_aimage.oci import Reference

PICTURES, TEXT, EMBEDDER = "image", "text", "embedder"
_ADAPTER, _CONTROLNET, _OTHER = "adapter", "controlnet", "other"
_ROUTES = {
    (OPENAI, PICTURES): "/v1/images/generations",
    (OPENAI, TEXT): "/v1/chat/completions",
    (OPENAI, EMBEDDER): "/v1/embeddings",
    (OLLAMA, PICTURES): "/api/generate",
    (OLLAMA, TEXT): "/api/chat",
    (OLLAMA, EMBEDDER): "/api/embed",
}
_DOES = {
    PICTURES: "generates pictures",
    TEXT: "is a language model",
    EMBEDDER: "computes embeddings",
}


def classify_model(aimage: AImage) -> str:
    """Return PICTURES, TEXT or EMBEDDER for a runnable model, else another word."""
    properties = aimage.properties
    if properties.get("format") == "lora" or "adapter" in properties:
        return _ADAPTER
    if properties.get("format") == "controlnet":
        return _CONTROLNET
    if find_runtime(aimage) is not None:
        return EMBEDDER if is_embedder(aimage) else TEXT
    return PICTURES if is_runnable(aimage) else _OTHER


def check_kind(reference: Reference, aimage: AImage, *kinds: str, interface: str = OPENAI) -> None:
    """Raise ApiError if the AImage is of none of ``kinds``. The message names the right route."""
    kind = classify_model(aimage)
    if kind not in kinds:
        raise build_unsupported_error(reference, kind, kinds[0], interface)


def build_unsupported_error(
    reference: Reference, kind: str = _OTHER, expected: str = PICTURES, interface: str = OPENAI
) -> ApiError:
    """Return the error for an AImage that a route cannot serve."""
    if kind in _DOES:
        message = f"{_DOES[kind]}; use {_ROUTES[interface, kind]}"
    elif kind == _ADAPTER:
        message = "is an adapter; name its base model"
    elif kind == _CONTROLNET:
        message = "is a ControlNet; name an image model, and this as controlnet"
    else:
        message = f"is not a supported {'image' if expected == PICTURES else 'language'} model"
    message = f"model {reference} {message}"
    return ApiError(422, message, code="model_not_supported", param="model")
