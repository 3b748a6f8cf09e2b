"""Results of packing a model, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clowder_aimage.cli.console.left_out_text import describe_left_out
from clowder_aimage.cli.console.output import (
    format_count,
    format_number,
    format_size,
    note,
    print_result,
    remark,
)
from clowder_aimage.importer import PackedModel, Recipe
from clowder_aimage.importer.decision import WeightReport
from clowder_aimage.oci import Reference


def print_packed(reference: Reference, packed: PackedModel, recipe: Recipe) -> None:
    """Print the result of packing."""
    value = report_packed(reference, packed, recipe)
    print_result(value, str(packed.descriptor.digest))


def report_packed(reference: Reference, packed: PackedModel, recipe: Recipe) -> dict[str, Any]:
    """Print a summary of packing to stderr; return the result for programs."""
    value = encode_result(reference, packed)
    remark(format_result(value, packed, recipe))
    # Also with -q: files would be lost without a word
    for line in describe_left_out(packed.left_out):
        note(line)
    return value


def encode_result(reference: Reference, packed: PackedModel) -> dict[str, Any]:
    """Return the result for programs."""
    layers = [written.layer for written in packed.layers]
    shared = [written.layer for written in packed.layers if written.existed]
    report = packed.report
    config = packed.aimage.properties
    value: dict[str, Any] = {
        "reference": str(reference),
        "digest": str(packed.descriptor.digest),
        "mediaType": packed.descriptor.media_type,
        **({"format": config["format"]} if "format" in config else {}),
        "tensors": report.tensors,
        "files": sum(not layer.is_tensor for layer in layers),
        "parameters": config.get("parameters", report.parameters),
        "size": sum(layer.descriptor.size for layer in layers),
        "alreadyThere": {
            "layers": len(shared),
            "size": sum(layer.descriptor.size for layer in shared),
        },
    }
    cast = [
        {"from": source, "to": target, "tensors": count}
        for (source, target), count in sorted(report.cast.items())
    ]
    decoded = [
        {"from": kind, "to": dtype, "tensors": count}
        for (kind, dtype), count in sorted(report.decoded.items())
    ]
    changes = {
        "quantization": dict(report.quantized),
        "decoded": decoded,
        "cast": cast,
        "saved": report.saved,
        "ignored": report.ignored,
        "leftOut": [{"path": file.path, "reason": file.reason} for file in packed.left_out],
    }
    return value | {key: change for key, change in changes.items() if change}


def format_result(value: dict[str, Any], packed: PackedModel, recipe: Recipe) -> str:
    """Return the result for people: a line, and one for each change to weights."""
    present = value["alreadyThere"]
    lines = [
        f"{value['reference']}: {_describe_content(value)}, {format_size(value['size'])}; "
        f"{present['layers']} of {len(packed.layers)} blobs ({format_size(present['size'])}) "
        "were in the store already",
        *(_describe_quantization(name, facts) for name, facts in packed.report.quantized.items()),
        *_describe_decoding(packed.report, recipe),
        *_describe_cast(packed.report, recipe),
    ]
    if saved := packed.report.saved:
        than = "less" if saved > 0 else "more"
        lines.append(f"the weights take {format_size(abs(saved))} {than} than before")
    if packed.report.ignored:
        left_out = format_count(packed.report.ignored, "scale")
        lines.append(f"{left_out} of activations left out: only weights are quantized")
    if packed.aimage.properties.get("pickled"):
        lines.append("warning: contains pickled Python, and loading it runs its code")
    return "\n".join(lines)


def _describe_content(value: Mapping[str, Any]) -> str:
    files, parameters = format_count(value["files"], "file"), format_number(value["parameters"])
    if value["tensors"]:
        return f"{format_count(value['tensors'], 'tensor')} ({parameters} parameters) and {files}"
    if value.get("format") == "files":
        return files
    counted = f" ({parameters} parameters)" if value["parameters"] else ""
    return f"{value.get('format', 'a model')} in {files}{counted}"


def _describe_quantization(component: str, facts: Mapping[str, Any]) -> str:
    unchanged = facts.get("kept", {})
    groups = f" in groups of {facts['group_size']}" if "group_size" in facts else ""
    if facts.get("scales") == "row":
        groups = " with one scale for each row (fp8)"
    count, total = facts["tensors"], facts["tensors"] + sum(unchanged.values())
    line = f"{component or 'the model'}: {count} of {total} tensors are {facts['type']}{groups}"
    if not unchanged:
        return line
    most = sorted(unchanged.items(), key=lambda item: (-item[1], item[0]))
    return f"{line}; not quantized: {', '.join(f'{count} ({why})' for why, count in most)}"


def _describe_decoding(report: WeightReport, recipe: Recipe) -> Iterator[str]:
    for (kind, dtype), count in sorted(report.decoded.items()):
        loss = ", without loss" if dtype == "BF16" else ""
        yield f"{format_count(count, 'tensor')} decoded from {kind} to {dtype}{loss}"
    if recipe.dtype is None and any(dtype == "F32" for _, dtype in report.decoded):
        yield "--dtype bf16 would round the decoded values, and take half of the space"


def _describe_cast(report: WeightReport, recipe: Recipe) -> Iterator[str]:
    is_auto = recipe.dtype == "auto"
    for (source, target), count in sorted(report.cast.items()):
        why = ", without loss: their values are" if is_auto else " instead of"
        tensors = format_count(count, "tensor")
        yield f"{tensors} stored as {target}{why} {target if is_auto else source}"
    if is_auto and not report.cast and not report.quantized:
        yield "no F32 tensor has only BF16 values: all are stored unchanged"
