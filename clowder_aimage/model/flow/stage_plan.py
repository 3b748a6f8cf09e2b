"""The stages of a generation, with estimates of their memory."""

from __future__ import annotations

from clowder_aimage.generation.request import REFERENCE_PIXELS, GenerateRequest
from clowder_aimage.model.flow.family import FlowFamily, list_texts
from clowder_aimage.model.flow.memory_budget import Module, Stage
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.picture_encoder import PictureEncoder

# Of the size of a layer's input, in a step cache
CACHED_ARRAYS = 2


def count_step_pixels(request: GenerateRequest) -> int:
    """Return the most pixels of a step: those of the picture and of its references."""
    return request.sampling.pixels + len(request.input.references) * REFERENCE_PIXELS


def plan_stages(
    family: FlowFamily, networks: FlowNetworks, request: GenerateRequest, control: Module | None
) -> tuple[Stage, Stage, Stage]:
    """Return the stages of a request; ``control`` is its control network."""
    library, budget = networks.library, networks.budget
    pixels, seen_pixels, layer = request.sampling.pixels, count_step_pixels(request), family.layer
    tokens, length = _compute_lengths(family, networks, request)
    text = family.text_encoder
    sizes = text.hidden_size, text.intermediate_size, text.num_attention_heads
    encode = library.estimate_layer_memory(*sizes, tokens)
    denoise = library.estimate_layer_memory(*layer, length)
    decodes = request.output.previews > 0 and family.draft is None
    drawing = "previews" if decodes else "denoise"
    measured = budget.estimate_work(drawing, seen_pixels, denoise)
    # On a CPU, numpy's arrays are not measured
    denoise = max(denoise, measured) if library.memory.is_shared else measured
    if request.sampling.cache_threshold:
        count = CACHED_ARRAYS * len(list_texts(family, request))
        denoise += count * length * layer[0] * library.itemsize
    decode = budget.estimate_work(
        "decode", pixels, library.estimate_decoding_memory(family.vae.widest, pixels)
    )
    modules = [networks.transformer]
    if control is not None:
        modules.append(control)
        denoise += control.config.hint_width * length * library.itemsize
    if decodes:
        modules.append(networks.vae)
        denoise = max(denoise, decode)
    return (
        Stage("encode", (networks.text_encoder,), encode),
        Stage(drawing, tuple(modules), denoise),
        Stage("decode", (networks.vae,), decode),
    )


def plan_pictures(encoder: PictureEncoder, request: GenerateRequest) -> list[Stage]:
    """Return the stage that encodes the pictures of a request, if it has any."""
    if request.input.references:
        return [encoder.plan(REFERENCE_PIXELS)]
    if request.input.image is None and request.control.image is None:
        return []
    return [encoder.plan(request.sampling.pixels)]


def estimate_least_memory(
    family: FlowFamily, networks: FlowNetworks, width: int, height: int
) -> int:
    """Return the bytes of the arrays at full size that the decoder has at the same time."""
    narrow, *wide = family.vae.block_out_channels[:2]
    # of the input and the result of a convolution
    channels = max(narrow, *wide) + narrow
    return channels * width * height * networks.library.itemsize


def _compute_lengths(
    family: FlowFamily, networks: FlowNetworks, request: GenerateRequest
) -> tuple[int, int]:
    """Return the most tokens of a text, and those of the transformer's sequence."""
    multiple = family.TOKEN_MULTIPLE
    longest = family.TEXT_LENGTH or max(
        len(networks.tokens(text).ids) for text in list_texts(family, request)
    )
    tokens = _round_up(longest, multiple)
    return tokens, tokens + _round_up(
        count_step_pixels(request) // family.sides.multiple**2, multiple
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
