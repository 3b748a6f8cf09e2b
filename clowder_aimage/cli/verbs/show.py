"""The verb ``show``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

from clowder_aimage.cli.console.card_text import render_card
from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.onnx_text import (
    format_signature,
)
from clowder_aimage.cli.console.option import (
    connection_options,
    get_settings,
    verb,
)
from clowder_aimage.cli.console.output import (
    format_count,
    format_fields,
    format_number,
    format_size,
    format_table,
    open_output,
    print_result,
    wants_value,
)
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.platform import format_cell
from clowder_aimage.content.store import Source
from clowder_aimage.dialect import AImage, Layer
from clowder_aimage.errors import UsageError
from clowder_aimage.layout.completeness import Completeness, describe_missing
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.ability import Ability
from clowder_aimage.model.stored_ability import IMAGE
from clowder_aimage.oci import Reference
from clowder_aimage.show import ShownIndex, read_card
from clowder_aimage.show import show as describe

# Characters of the facts of adapters.
_WIDE = 400
# Layers that are listed by default for a model without components.
_FEW = 20
_OURS = re.compile(
    r"application/vnd\.clowder\.aimage\.(?:model|adapter)\.([a-z0-9]+)\.layer\.v1(\+\w+)?"
)
_PERMISSIONS = {
    "allowNoCredit": "without credit",
    "allowDerivatives": "derivatives",
    "allowDifferentLicense": "other permissions for derivatives",
}
# properties of the config, above the size and below the number of parameters
_KIND = ("family", "pipeline", "format", "name", "architecture")
# the rows of properties whose names are those of other rows
_TITLES = {"name": "title"}
_MORE = (*("quantization", "context", "formatVersion"), *("license", "source", "created"))


@examples("aimage show shapes", f"aimage show --remote {NAME}")
@verb
@stored_argument()
@click.option("--layers", is_flag=True, help="List every layer.")
@click.option(
    "--remote", is_flag=True, is_eager=True, help="Read REF from its registry, not from the store."
)
@click.option("--card", is_flag=True, help="Print the model card, its README.md.")
@connection_options
def show(reference: Reference, layers: bool, remote: bool, card: bool) -> None:
    """Show the config, the components and the sizes of the AImage REF in the store.

    For an index, show its manifests. With --remote only the manifest and the config are fetched,
    and the card with --card. A pipe receives the bytes of the card.
    """
    chosen = get_settings()
    if card and layers:
        raise UsageError("--card cannot be combined with --layers")
    display: Callable[[Source, Reference], None] = _print_card
    if not card:
        display = partial(_print_facts, has_layers=layers)
    if remote:
        from clowder_aimage.registry import Repository

        with Repository(reference, chosen.build_client_options()) as repository:
            display(repository, reference)
        return
    if chosen.has_connection:
        raise UsageError("--plain-http, --insecure and --ca-file require --remote")
    display(chosen.layout, reference)


def _print_card(source: Source, reference: Reference) -> None:
    raw = read_card(source, reference)
    text = raw.decode("utf-8-sig", "replace")
    if wants_value() or sys.stdout.isatty():
        print_result({"reference": str(reference), "card": text}, render_card(text).splitlines())
    else:
        with open_output("-") as target:
            write_all(target.fileno(), raw)


def _print_facts(source: Source, reference: Reference, *, has_layers: bool) -> None:
    shown = describe(source, reference)
    value = shown.to_json()
    if isinstance(shown, ShownIndex):
        print_result(value, _format_index(value))
        return
    lines = _format_aimage(shown.reference, shown.stored, shown.completeness, shown.ability)
    if has_layers:
        lines += ["", *_format_layers(shown.stored.aimage)]
    for item in shown.signatures.items():
        lines += ["", *format_signature(*item)]
    print_result(value, lines)


def _format_index(value: dict[str, Any]) -> list[str]:
    head = format_fields(
        [("name", value["reference"]), ("digest", value["digest"]), ("kind", "index")]
    )
    rows = [("VARIANT", "PLATFORM", "SIZE", "DIGEST")]
    for manifest in value["manifests"]:
        length = format_size(manifest["blobs"]) if "blobs" in manifest else "missing"
        variant, platform = (format_cell(manifest.get(key, "")) for key in ("variant", "platform"))
        rows.append((variant, platform, length, manifest["digest"]))
    return [*head, "", *format_table(rows)]


def _format_aimage(
    reference: Reference,
    stored: StoredAImage,
    completeness: Completeness,
    ability: Ability | None,
) -> list[str]:
    config = stored.aimage.properties
    total = sum(layer.descriptor.size for layer in stored.aimage.layers)
    pairs = [
        ("name", str(reference)),
        ("digest", str(stored.descriptor.digest)),
        ("dialect", stored.dialect.name),
        *((_TITLES.get(key, key), format_cell(str(config[key]))) for key in _KIND if key in config),
        ("size", format_size(total)),
    ]
    if completeness.missing:
        blobs = format_count(len(completeness.missing), "blob")
        size = format_size(completeness.missing_size)
        lacks = f"{describe_missing(stored, completeness)}; {blobs}, {size}"
        pairs.append(("missing", lacks))
    if isinstance(config.get("parameters"), int):
        dtype = config.get("dtype", "")
        pairs.append(("parameters", f"{format_number(config['parameters'])} {dtype}".strip()))
    pairs += [(key, format_cell(str(config[key]))) for key in _MORE if key in config]
    pairs += _format_publication(config)
    pairs += [] if ability is None else _format_ability(ability)
    if isinstance(defaults := config.get("defaults"), dict):
        text = ", ".join(f"{name} {value}" for name, value in defaults.items())
        pairs.append(("defaults", format_cell(text)))
    if config.get("pickled"):
        pairs.append(("pickled", "yes: loading it runs its code"))
    pairs += [(f"adapter {name}".strip(), text) for name, text in _format_adapters(config)]
    adapter_uses = {
        "uses": _format_uses(config, "loras", "adapter"),
        "fused": _format_uses(config, "fused", "name"),
    }
    pairs += [(key, text) for key, text in adapter_uses.items() if text]
    if stored.aimage.subject is not None:
        pairs.append(("belongs to", str(stored.aimage.subject.digest)))
    return [*format_fields(pairs), "", *_format_components(stored.aimage)]


def _format_publication(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the publisher's statements about the model."""
    pairs = []
    if isinstance(permissions := config.get("permissions"), dict):
        shown = [_format_permission(key, value) for key, value in sorted(permissions.items())]
        pairs.append(("permissions", ", ".join(filter(None, shown))))
    if isinstance(words := config.get("triggerWords"), list):
        pairs.append(("trigger words", ", ".join(map(str, words))))
    pairs += [(key, str(config[key])) for key in ("base", "description") if key in config]
    return [(key, _format_line(text)) for key, text in pairs if text]


def _format_permission(key: str, value: object) -> str:
    if key == "allowCommercialUse" and isinstance(value, list):
        return f"commercial use: {' '.join(map(str, value)).lower()}"
    name = _PERMISSIONS.get(key, "")
    return f"{name}: {'yes' if value else 'no'}" if name and isinstance(value, bool) else ""


def _format_ability(ability: Ability) -> list[tuple[str, str]]:
    """Return the capabilities of a language model here, or the reason why a model cannot run."""
    if obstacle := ability.find_obstacle():
        advice = format_advice(obstacle)
        reason = f"{obstacle}; {advice}" if advice else str(obstacle)
        return [("capabilities", format_cell(f"none here: {reason}"))]
    named = ", ".join(ability.list_capabilities())
    return [("capabilities", named)] if named not in ("", IMAGE) else []


def _format_adapters(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the adapter itself, without a name, or the adapters packed with the model."""
    adapters = []
    if isinstance(adapter := config.get("adapter"), dict):
        adapters.append(("", _format_adapter(adapter)))
    if isinstance(packed := config.get("adapters"), dict):
        adapters += [
            (format_cell(name), _format_adapter(facts))
            for name, facts in sorted(packed.items())
            if isinstance(facts, dict)
        ]
    return adapters


def _format_uses(config: Mapping[str, Any], key: str, name: str) -> str:
    """Format adapters with their strengths: ``ink 0.8, style -0.5``."""
    entries = config.get(key)
    uses = [use for use in entries if isinstance(use, dict)] if isinstance(entries, list) else []
    text = ", ".join(f"{use.get(name)} {use.get('strength')}" for use in uses)
    return _format_line(text) if text else ""


def _format_adapter(facts: Mapping[str, Any]) -> str:
    """Format an adapter: ``lora, rank 16, 42 layers; trigger "sks"; weight 0.8; of ORG/MODEL``."""
    head = [str(facts.get("type", "unknown type"))]
    head += [f"rank {facts['rank']}"] if "rank" in facts else []
    if isinstance(facts.get("targets"), list):
        head.append(format_count(len(facts["targets"]), "layer"))
    parts = [", ".join(head)]
    words = facts.get("triggerWords")
    if isinstance(words, list) and words:
        parts.append("trigger " + ", ".join(f'"{word}"' for word in words[:5]))
    parts += [f"weight {facts['weight']}"] if "weight" in facts else []
    parts += [f"of {facts['base']}"] if "base" in facts else []
    return _format_line("; ".join(parts))


def _format_line(text: str) -> str:
    """Return the facts of adapters on one line."""
    return " ".join(text.split())[:_WIDE]


def _format_components(aimage: AImage) -> list[str]:
    described = aimage.properties.get("components")
    described = described if isinstance(described, dict) else {}
    if not described and len(aimage.layers) <= _FEW:
        return _format_layers(aimage)
    names = sorted({layer.component for layer in aimage.layers})
    components = {
        name: component for name, component in described.items() if isinstance(component, dict)
    }
    quantized = {name: _format_quantization(components.get(name, {})) for name in names}
    rows = [("COMPONENT", "CLASS", "TENSORS", "SIZE", "QUANTIZED")]
    for name in names:
        layers, kind = aimage.list_layers(name), components.get(name, {}).get("class", "")
        tensors = sum(layer.is_tensor for layer in layers)
        total = sum(layer.descriptor.size for layer in layers)
        rows.append((name or "(top)", str(kind), str(tensors), format_size(total), quantized[name]))
    return format_table(rows if any(quantized.values()) else [row[:-1] for row in rows])


def _format_quantization(component: Mapping[str, Any]) -> str:
    """Format the quantization of a component: ``int8 (39 of 120 tensors)``; "" for none."""
    facts = component.get("quantization")
    if not isinstance(facts, dict) or "type" not in facts:
        return ""
    kind, count, total = (
        format_cell(str(facts["type"])),
        facts.get("tensors"),
        component.get("tensors"),
    )
    if type(count) is not int:
        return kind
    of = f"{count} of {total} tensors" if type(total) is int else format_count(count, "tensor")
    return f"{kind} ({of})"


def _format_layers(aimage: AImage) -> list[str]:
    rows = [("LAYER", "TYPE", "SHAPE", "SIZE", "DIGEST")]
    for layer in aimage.layers:
        shape = "x".join(map(str, layer.shape)) if layer.shape is not None else ""
        plain = layer.descriptor
        rows.append(
            (layer.name, _format_type(layer), shape, format_size(plain.size), plain.digest.short)
        )
    return [*format_table(rows), format_count(len(aimage.layers), "layer")]


def _format_type(layer: Layer) -> str:
    """Return the dtype of a tensor, the format of a file, or another tool's media type."""
    if layer.dtype is not None:
        return layer.dtype
    match = _OURS.fullmatch(layer.descriptor.media_type)
    return f"{match[1]}{match[2] or ''}" if match else layer.descriptor.media_type
