"""Sidecars of a model file: its metadata from Civitai and AUTOMATIC1111's web UI.

``NAME.civitai.info`` is a version in Civitai's API, as Civitai Helper writes it; ``NAME.json`` is
the same, a model of that API, or the metadata of the web UI; ``NAME.preview.png`` is a picture.
Sources: Civitai REST API, "GET /api/v1/models/:modelId" and "/model-versions/:id"; AUTOMATIC1111,
``modules/ui_extra_networks_user_metadata.py`` and
``extensions-builtin/Lora/ui_edit_user_metadata.py``.

They are written by strangers: only known fields of the right type and size are read.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import left_out, model_tree
from clowder_aimage.formats.inventory import Inventory, clean_text
from clowder_aimage.formats.left_out import LeftOut
from clowder_aimage.formats.model_tree import SourceFile

# A later one replaces the fields of an earlier one: the web UI's are the owner's own.
_DOCUMENTS = (".civitai.info", ".json")
_PICTURES = tuple(
    f"{middle}{ending}" for middle in (".preview", "") for ending in left_out.PICTURE_ENDINGS
)
_MAX_JSON = 1024 * 1024
_MAX_DESCRIPTION = 2000
_MAX_WORDS = 100
_MAX_WEIGHT = 100
_MAX_ID = 2**53
# Characters of a description that are read.
_MAX_HTML = 64 * 1024
_TAG = re.compile(r"<[^<>]*>")
_NO_JSON = "named as a sidecar, but not valid JSON"
_LARGE = "a sidecar of more than 1 MiB"
_VERSION_KEYS = ("trainedWords", "baseModel", "modelId")
_WEBUI_KEYS = ("activation text", "preferred weight", "sd version")
_USES = ("None", "Image", "RentCivit", "Rent", "Sell")
_FLAGS = ("allowNoCredit", "allowDerivatives", "allowDifferentLicense")
_ADAPTER_FIELDS = ("triggerWords", "weight", "base")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The facts and the files of a model's sidecars, and those that are not packed.

    ``facts`` are properties of the AImage config, and ``weight`` of an adapter.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def read_sidecar(path: Path) -> Sidecar:
    """Return the readable sidecars of the model file at ``path``."""
    facts: dict[str, Any] = {}
    files: list[SourceFile] = []
    omitted: list[LeftOut] = []
    for ending in _DOCUMENTS:
        document = path.with_name(path.stem + ending)
        if not document.is_file():
            continue
        if reason := _judge(document, _MAX_JSON, _LARGE):
            omitted.append(LeftOut(document.name, reason))
            continue
        try:
            stated = parse_sidecar(document.read_bytes(), path.name)
        except FormatError:
            omitted.append(LeftOut(document.name, _NO_JSON))
            continue
        if stated:
            facts |= stated
            files.append(model_tree.build_source_file(None, document, document.name))
    for ending in _PICTURES:
        picture = path.with_name(path.stem + ending)
        if not picture.is_file():
            continue
        if reason := _judge_picture(picture):
            omitted.append(LeftOut(picture.name, reason))
        else:
            files.append(model_tree.build_source_file(None, picture, picture.name))
    return Sidecar(facts, tuple(files), tuple(omitted))


def describe_adapter(description: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an adapter with the metadata of its sidecars.

    The name of the base in the file itself is the exact one.
    """
    stated = {key: facts[key] for key in _ADAPTER_FIELDS if key in facts}
    if "base" in description:
        stated.pop("base", None)
    title = {"title": facts["name"]} if "name" in facts else {}
    return {**description, **title, **stated}


def add_sidecar(inventory: Inventory, path: Path) -> Inventory:
    """Return the inventory of the model file at ``path`` with its sidecars."""
    sidecar = read_sidecar(path)
    facts = dict(sidecar.facts)
    if "adapter" in inventory.facts:
        facts["adapter"] = describe_adapter(inventory.facts["adapter"], facts)
        for key in _ADAPTER_FIELDS:
            facts.pop(key, None)
    facts.pop("weight", None)
    names = {file.name for file in inventory.files}
    files = [file for file in sidecar.files if file.name not in names]
    return replace(
        inventory,
        facts={**inventory.facts, **facts},
        files=tuple(sorted((*inventory.files, *files), key=lambda file: file.name)),
        left_out=tuple(sorted({*inventory.left_out, *sidecar.left_out})),
    )


def _judge_picture(path: Path) -> str:
    """Return the reason to leave out a picture, empty for none."""
    if reason := _judge(path, left_out.MAX_PICTURE, left_out.LARGE_PICTURE):
        return reason
    return "" if left_out.is_picture(model_tree.read_start(path)) else left_out.NO_PICTURE


def _judge(path: Path, limit: int, reason: str) -> str:
    """Return ``reason`` for a file of more than ``limit`` bytes, that for a link, or no text."""
    try:
        model_tree.check_inside(model_tree.find_boundary(path.parent), path)
    except ModelError:
        return left_out.LINK_OUT
    return reason if path.stat().st_size > limit else ""


def parse_sidecar(raw: bytes, file_name: str) -> dict[str, Any]:
    """Return the facts in a sidecar of the model file ``file_name``; none for another document.

    Raises FormatError: It is not strict JSON.
    """
    value = read_json(raw.removeprefix(b"\xef\xbb\xbf"), "the sidecar", _MAX_JSON)
    if not isinstance(value, dict):
        return {}
    if isinstance(versions := value.get("modelVersions"), list):
        facts = _parse_version(_choose_version(versions, file_name), value)
    elif any(key in value for key in _VERSION_KEYS):
        model = value.get("model")
        facts = _parse_version(value, model if isinstance(model, dict) else {})
    elif any(key in value for key in _WEBUI_KEYS):
        facts = _parse_webui(value)
    else:
        return {}
    return {key: fact for key, fact in facts.items() if fact not in (None, [], {})}


def _choose_version(versions: list[Any], file_name: str) -> Mapping[str, Any]:
    """Return the version of a model that has the file, else the only one."""
    objects = [version for version in versions if isinstance(version, dict)]
    for version in objects:
        files = version.get("files")
        for entry in files if isinstance(files, list) else ():
            if isinstance(entry, dict) and entry.get("name") == file_name:
                return version
    return objects[0] if len(objects) == 1 else {}


def _parse_version(version: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    number, version_number = version.get("modelId", model.get("id")), version.get("id")
    described = _clean_html(model.get("description")) or _clean_html(version.get("description"))
    return {
        "name": clean_text(model.get("name")),
        "description": described,
        "triggerWords": list(_iter_words(version.get("trainedWords"))),
        "base": clean_text(version.get("baseModel")),
        "permissions": _parse_permissions(model),
        "source": _build_source(number, version_number),
    }


def _parse_webui(value: Mapping[str, Any]) -> dict[str, Any]:
    base = clean_text(value.get("sd version"))
    return {
        "description": _clean_html(value.get("description")),
        "triggerWords": list(_iter_words([value.get("activation text")])),
        # The web UI writes "Unknown" and 0 for what its user did not set.
        "base": None if base == "Unknown" else base,
        "weight": _parse_weight(value.get("preferred weight")),
        "source": _build_source(value.get("modelId"), value.get("modelVersionId")),
    }


def _parse_weight(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < abs(value) <= _MAX_WEIGHT else None


def _iter_words(value: object) -> Iterator[str]:
    texts = [clean_text(text) for text in value[:_MAX_WORDS]] if isinstance(value, list) else []
    yield from dict.fromkeys(word for text in texts if text and (word := text.strip(" ,")))


def _parse_permissions(model: Mapping[str, Any]) -> dict[str, Any]:
    permissions: dict[str, Any] = {
        key: model[key] for key in _FLAGS if isinstance(model.get(key), bool)
    }
    uses = model.get("allowCommercialUse")
    # Older answers have one text, newer ones a list, some a list in braces.
    uses = uses[:200].strip("{}").split(",") if isinstance(uses, str) else uses
    if isinstance(uses, list):
        known = [use for use in _USES if use in uses]
        permissions["allowCommercialUse"] = known or ["None"]
    return dict(sorted(permissions.items()))


def _build_source(model: object, version: object) -> str | None:
    if not _is_id(model):
        return None
    chosen = f"?modelVersionId={version}" if _is_id(version) else ""
    return f"https://civitai.com/models/{model}{chosen}"


def _is_id(value: object) -> bool:
    return type(value) is int and 0 < value < _MAX_ID


def _clean_html(value: object) -> str | None:
    """Return the text of a description in HTML, on one line."""
    if not isinstance(value, str):
        return None
    text = html.unescape(_TAG.sub(" ", value[:_MAX_HTML]))
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    return " ".join(words)[:_MAX_DESCRIPTION].strip() or None
