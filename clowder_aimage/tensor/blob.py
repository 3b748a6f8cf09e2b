"""Contents of a tensor blob: the logical tensors that its header describes.

A quantized tensor ``n`` is stored as ``n`` (the codes), ``n.scale``, and for affine types
``n.bias``. nvfp4 from other tools may add ``n.global_scale``, and scales of activations
(``n.input_scale``, ``n.input_global_scale``), unused by the runtimes here. ``__metadata__`` has the
type and group size, for the blob (``quant_type``, ``group_size``) or, if tensors of several types
share it, for each tensor (``n.quant_type``, ``n.group_size``). Files of MLX have ``x.scales`` and
``x.biases`` beside ``x.weight``. Format: ollama, "Tensor Blob Format", and its x/create.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor.header import Header, TensorInfo
from clowder_aimage.tensor.quantization import GROUP_SIZE, QUANT_TYPE, Quantization

SCALE, BIAS, GLOBAL_SCALE = ".scale", ".bias", ".global_scale"
# The only name in blobs of ollama's first generation.
LEGACY_KEY = "data"
# Codes are packed into words of this dtype.
CODES = "U32"
WEIGHT = ".weight"
# MLX appends these to the name without WEIGHT.
MLX_PARTS = {SCALE: ".scales", BIAS: ".biases"}
# Scales of activations, which are ignored.
INPUTS = (".input_scale", ".input_global_scale")


@dataclass(frozen=True, slots=True)
class BlobTensor:
    """One logical tensor.

    ``key`` is its name in the header, ``shape`` the shape of the logical tensor, ``dtype`` a
    safetensors dtype or the name of a quantization. ``parts`` maps SCALE, BIAS and GLOBAL_SCALE
    to their names in the header.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    quantization: Quantization | None
    parts: Mapping[str, str]


def read_tensors(header: Header) -> dict[str, BlobTensor]:
    """Return the logical tensors of a blob, by name and in the order of its header.

    Raises:
        FormatError: Codes lack a type, scales or biases, have extra ones or a group size that does
            not match, or the wrong dtypes or shapes for their type; or metadata describe a
            quantization that does not exist.
    """
    tensors = header.tensors
    # The keys of parts, by the key of their codes.
    groups: dict[str, dict[str, str]] = {}
    part_keys: set[str] = set()
    for key, info in tensors.items():
        if info.dtype == CODES and (parts := _find_parts(key, tensors)):
            groups[key] = parts
            part_keys.update(parts.values())
            part_keys.update(key + word for word in INPUTS)
    if shared := sorted(part_keys & groups.keys()):
        raise FormatError(f"{shared[0][:200]} has scales, but belongs to another tensor")
    if header.metadata:
        _check_claims(header, groups, part_keys)
    return {
        key: _read_quantized(key, header, groups[key])
        if key in groups
        else BlobTensor(key, info.dtype, info.shape, None, {})
        for key, info in tensors.items()
        if key not in part_keys
    }


def find_tensor(tensors: Mapping[str, BlobTensor], name: str, component: str) -> BlobTensor:
    """Return the tensor ``name`` of ``component``, as named by any generation of blobs.

    Candidates are the name itself, the name with its component, and LEGACY_KEY. Source: ollama,
    x/imagegen/manifest.

    Raises FormatError if the blob has no candidate, or also other tensors.
    """
    for key in (name, f"{component}/{name}", LEGACY_KEY):
        if key in tensors:
            if len(tensors) > 1:
                raise _build_ambiguity_error(tensors, key, name, component)
            return tensors[key]
    raise FormatError(
        f"{_qualify_name(component, name)}: the blob contains {_join_names(tensors)} instead"
    )


def find_group(
    tensors: Mapping[str, BlobTensor], prefix: str, component: str
) -> dict[str, BlobTensor]:
    """Return all tensors of a packed group, by their names without ``component``.

    The layer is named ``prefix``, such as ``model.layers.1.mlp.experts``. Stacked experts may be
    named as siblings of it (``model.layers.1.mlp.switch_mlp.up_proj.weight``).

    Raises:
        FormatError: The blob is empty, a tensor is outside of the group or has its name, or two
            tensors have the same name.
    """
    parent, layer_name = prefix.rpartition(".")[0], _qualify_name(component, prefix)
    group: dict[str, BlobTensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(f"{component}/")
        if name == prefix:
            raise _build_ambiguity_error(tensors, key, prefix, component)
        if (parent and not name.startswith(f"{parent}.")) or name in group:
            raise FormatError(f"{layer_name}: the blob contains {key[:200]} of another group")
        group[name] = tensor
    if not group:
        raise FormatError(f"{layer_name}: the blob contains no tensors")
    return group


def check_layer(
    tensor: BlobTensor, name: str, dtype: str | None, shape: tuple[int, ...] | None
) -> None:
    """Compare a tensor with its layer, whose dtype and shape may be None.

    Layers state the name of the quantization and the logical shape; those of other tools state
    U32 and the shape of the codes.

    Raises FormatError if the dtype or shape differs.
    """
    if (dtype, shape) == (tensor.dtype, tensor.shape):
        # The common case.
        return
    valid = [(tensor.dtype, tensor.shape)]
    if tensor.quantization is not None:
        valid.append((CODES, tensor.quantization.compute_codes_shape(tensor.shape)))
    if not any(
        dtype in (None, expected_dtype) and shape in (None, expected_shape)
        for expected_dtype, expected_shape in valid
    ):
        expected = [dtype or "", str(list(shape)) if shape is not None else ""]
        raise FormatError(
            f"{name[:200]}: the blob contains {tensor.dtype} {list(tensor.shape)}, "
            f"its layer has {' '.join(filter(None, expected))}"
        )


def _find_parts(key: str, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    parts = {
        suffix: key + suffix for suffix in (SCALE, BIAS, GLOBAL_SCALE) if key + suffix in tensors
    }
    if key.endswith(WEIGHT):
        stem = key.removesuffix(WEIGHT)
        mlx = {suffix: stem + word for suffix, word in MLX_PARTS.items() if stem + word in tensors}
        if mlx and (parts or stem + GLOBAL_SCALE in tensors):
            raise FormatError(f"{key[:200]} has two sets of scales")
        parts = parts or mlx
    if parts and SCALE not in parts:
        raise FormatError(f"{key[:200]} has {next(iter(parts.values()))[-100:]}, but no scales")
    return parts


def _check_claims(
    header: Header, groups: Mapping[str, Mapping[str, str]], part_keys: AbstractSet[str]
) -> None:
    tensors, metadata = header.tensors, header.metadata
    for claim in metadata:
        key, _, word = claim.rpartition(".")
        if word in (QUANT_TYPE, GROUP_SIZE) and key in tensors and key not in groups:
            raise FormatError(f"{key[:200]} is marked as quantized, but has no scales")
    if QUANT_TYPE not in metadata:
        return
    for key, info in tensors.items():
        # Codes and their parts are checked against the shapes of their type instead.
        if key in groups or key in part_keys:
            continue
        if info.dtype == CODES:
            raise FormatError(f"{key[:200]} is marked as quantized, but has no scales")
        if key + SCALE in tensors:
            raise FormatError(f"{key[:200]} has scales, but dtype {info.dtype} instead of {CODES}")
    if not groups:
        raise FormatError(f"{QUANT_TYPE} is {metadata[QUANT_TYPE]!r:.40}, but nothing is quantized")


def _read_quantized(key: str, header: Header, parts: Mapping[str, str]) -> BlobTensor:
    codes, scales = header.tensors[key].shape, header.tensors[parts[SCALE]].shape
    quantization = _parse_quantization(key, header.metadata, codes, scales)
    shape = quantization.compute_shape(codes) if codes else ()
    if not quantization.fits(shape):
        raise FormatError(
            f"{key[:200]}: codes of shape {list(codes)} do not fit "
            f"{quantization.type.name} in groups of {quantization.group_size}"
        )
    if quantization.type.has_bias != (BIAS in parts):
        has = "requires biases" if quantization.type.has_bias else "does not support biases"
        raise FormatError(f"{key[:200]}: {quantization.type.name} {has}")
    expected = quantization.compute_scales_shape(shape)
    for part_key in (parts[suffix] for suffix in (SCALE, BIAS) if suffix in parts):
        info = header.tensors[part_key]
        if info.shape != expected or info.dtype not in quantization.type.scale_dtypes:
            kinds = " or ".join(quantization.type.scale_dtypes)
            raise FormatError(
                f"{part_key[:200]}: {info.dtype} {list(info.shape)}, but "
                f"{quantization.type.name} in groups of {quantization.group_size} "
                f"requires {kinds} {list(expected)}"
            )
    if GLOBAL_SCALE in parts:
        _check_global(parts[GLOBAL_SCALE], header.tensors[parts[GLOBAL_SCALE]], shape, quantization)
    return BlobTensor(key, quantization.type.name, shape, quantization, parts)


def _parse_quantization(
    key: str, metadata: Mapping[str, str], codes: tuple[int, ...], scales: tuple[int, ...]
) -> Quantization:
    # A missing group size follows from the shapes, because the defaults of two tools differ.
    name = metadata.get(f"{key}.{QUANT_TYPE}", metadata.get(QUANT_TYPE))
    if name is None:
        raise FormatError(f"{key[:200]} has scales, but no {QUANT_TYPE}")
    size: str | int | None = metadata.get(f"{key}.{GROUP_SIZE}", metadata.get(GROUP_SIZE))
    try:
        if size is None and codes and scales and scales[-1]:
            size = Quantization.parse(name).compute_shape(codes)[-1] // scales[-1]
        return Quantization.parse(name, size)
    except FormatError as error:
        raise FormatError(f"{key[:200]}: {error}") from None


def _check_global(
    key: str, info: TensorInfo, shape: tuple[int, ...], quantization: Quantization
) -> None:
    """Check a global scale: one factor per tensor, per matrix of a stack, or per row.

    Trailing ones are allowed. Only nvfp4 has a global scale.
    """
    # Tools write one factor per matrix of a stack as (n, 1, 1) or as (n,).
    factors = info.shape
    while factors and factors[-1] == 1 and factors != shape[: len(factors)]:
        factors = factors[:-1]
    if (
        quantization.type.name != "nvfp4"
        or info.dtype != "F32"
        or len(info.shape) > len(shape)
        or len(factors) >= len(shape)
        or factors != shape[: len(factors)]
    ):
        raise FormatError(f"{key[:200]}: {info.dtype} {list(info.shape)} is not an nvfp4 scale")


def _build_ambiguity_error(
    tensors: Mapping[str, BlobTensor], key: str, name: str, component: str
) -> FormatError:
    names = _join_names(tensors.keys() - {key})
    return FormatError(f"{_qualify_name(component, name)}: the blob also contains {names}")


def _qualify_name(component: str, name: str) -> str:
    """Return the name of the layer. Language models have no components: theirs is ""."""
    return f"{component}/{name}" if component else name


def _join_names(names: Iterable[str], limit: int = 8) -> str:
    names = sorted(names)
    remainder = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(name[:120] for name in names[:limit]) or "nothing") + remainder
