"""Parsing and validation of OpenAI image requests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("numpy")
pytest.importorskip("prometheus_client")

from clowder_aimage.api.openai.image import _with_param
from clowder_aimage.api.picture.request import (
    PRESETS,
    ImageRequest,
    read_request,
)
from clowder_aimage.api.picture.upload import StoredPictures
from clowder_aimage.api.request_body import read_object, record_ignored
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.check import build_parameter_error
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import MAX_TEXT, GenerateRequest
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import RESPONSE_HEADERS, LocalRequest
from clowder_aimage.oci import Descriptor
from clowder_aimage.pictures.input_file import InputFile


def image_request(raw: bytes | None = None, **fields: object) -> ImageRequest:
    body = json.dumps({"prompt": "a dog"} | fields).encode() if raw is None else raw
    return read_request(read_object(body), seed=42)


def refused(raw: bytes | None = None, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        image_request(raw, **fields)
    return caught.value


def with_param(error: UsageError, body: ImageRequest) -> Any:
    return _with_param(error, body, body.adapters)


def aimage(family: str = "z-image", **defaults: object) -> AImage:
    config = {"schemaVersion": 1, "family": family, "components": {}, "defaults": defaults}
    return AImage(json.dumps(config).encode(), ())


def test_missing_fields_take_the_defaults_of_the_model() -> None:
    wish = image_request()
    own: dict[str, Any] = {"width": 32, "height": 48, "steps": 9, "guidance": 2}
    own |= {"guidance_end": 0.5, "cache_threshold": 0.2}
    expected = GenerateRequest.of("a dog", seed=42, **own)
    assert wish.build_request(aimage(**own)) == expected
    assert wish.build_request(aimage()) == GenerateRequest.of("a dog", seed=42)
    assert wish.encoding == PictureEncoding()
    assert (wish.dimensions, wish.response_format, wish.stream) == ("auto", "b64_json", False)


def test_all_fields_are_parsed() -> None:
    wish = image_request(
        model="z-image",
        size="1024x768",
        n=3,
        seed=7,
        steps=4,
        negative_prompt="a cat",
        guidance=2.5,
        guidance_end=0.5,
        shift=3,
        cache_threshold=0.1,
        png_facts=False,
        quality="high",
        output_format="webp",
        output_compression=80,
        background="opaque",
        response_format="url",
        stream=True,
        partial_images=2,
        stream_format="openai",
        user="somebody",
        moderation="low",
        style="vivid",
    )
    assert wish.build_request(aimage(), 2) == GenerateRequest.of(
        "a dog",
        width=1024,
        height=768,
        steps=4,
        seed=7,
        negative="a cat",
        guidance=2.5,
        guidance_end=0.5,
        shift=3.0,
        cache_threshold=0.1,
        n=3,
        previews=2,
    )
    assert wish.encoding == PictureEncoding("webp", 80, has_facts=False)
    assert (wish.response_format, wish.stream, wish.stated["previews"]) == ("url", True, 2)
    assert [*wish.iter_ignored()] == ["style"]
    assert "somebody" not in repr(wish)


def test_null_fields_are_treated_as_missing() -> None:
    assert (
        image_request(size=None, n=None, stream=None, seed=None, steps=None, model=None)
        == image_request()
    )


def test_diffusers_field_names_are_synonyms() -> None:
    wish = image_request(num_inference_steps=5, guidance_scale=1)
    parameters = wish.build_request(aimage())
    assert (parameters.sampling.steps, parameters.guidance.scale) == (5, 1.0)
    assert image_request(steps=5, num_inference_steps=5).stated["steps"] == 5
    assert refused(steps=5, num_inference_steps=6).param == "steps"


@pytest.mark.parametrize(
    ("quality", "steps"),
    [("low", 5), ("medium", 9), ("auto", 9), ("standard", 9), ("high", 18), ("hd", 18)],
)
def test_a_quality_preset_scales_the_steps_of_the_model(quality: str, steps: int) -> None:
    assert image_request(quality=quality).build_request(aimage(steps=9)).sampling.steps == steps


def test_a_quality_preset_scales_eight_steps_by_default() -> None:
    assert image_request(quality="low").build_request(aimage()).sampling.steps == 4


def test_a_quality_preset_stays_between_1_and_1000_steps() -> None:
    assert image_request(quality="max").build_request(aimage(steps=900)).sampling.steps == 1000
    assert image_request(quality="low").build_request(aimage(steps=1)).sampling.steps == 1


def test_steps_override_a_quality_preset() -> None:
    assert image_request(quality="high", steps=3).build_request(aimage(steps=9)).sampling.steps == 3


def test_a_negative_prompt_requires_guidance() -> None:
    wish = image_request(negative_prompt="a cat")
    with pytest.raises(UsageError, match="requires guidance above 0") as caught:
        wish.build_request(aimage())
    assert with_param(caught.value, wish).param == "negative_prompt"
    assert wish.build_request(aimage(guidance=3)).guidance.negative == "a cat"
    assert image_request(negative_prompt="").build_request(aimage()).guidance.negative is None


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("prompt", "", "missing_required_parameter"),
        ("prompt", 3, "invalid_type"),
        ("prompt", "\ud800", "invalid_value"),
        ("prompt", "x" * (MAX_TEXT + 1), "invalid_value"),
        ("model", 3, "invalid_type"),
        ("model", "m" * 1025, "invalid_value"),
        ("size", "١٠٢٤x1024", "invalid_value"),
        ("size", "100x100", "invalid_value"),
        ("size", "8208x16", "invalid_value"),
        ("size", "99999999999x16", "invalid_value"),
        ("size", 1024, "invalid_type"),
        ("n", 0, "invalid_value"),
        ("n", 1025, "invalid_value"),
        ("n", "2", "invalid_type"),
        ("seed", -(1 << 63) - 1, "invalid_value"),
        ("seed", 2**64, "invalid_value"),
        ("steps", 0, "invalid_value"),
        ("steps", 1001, "invalid_value"),
        ("guidance", -0.1, "invalid_value"),
        ("guidance", "2", "invalid_type"),
        ("guidance_end", 1.1, "invalid_value"),
        ("cache_threshold", -0.1, "invalid_value"),
        ("shift", 0.0009, "invalid_value"),
        ("shift", 1001, "invalid_value"),
        ("width", 100, "invalid_value"),
        ("width", 8208, "invalid_value"),
        ("height", -16, "invalid_value"),
        ("height", 64.5, "invalid_type"),
        ("png_facts", "no", "invalid_type"),
        ("quality", "ultra", "invalid_value"),
        ("quality", 1, "invalid_type"),
        ("output_format", "gif", "invalid_value"),
        ("output_compression", 101, "invalid_value"),
        ("response_format", "bytes", "invalid_value"),
        ("background", "transparent", "unsupported_value"),
        ("background", "blue", "invalid_value"),
        ("stream", 1, "invalid_type"),
        ("partial_images", 4, "invalid_value"),
        ("stream_format", "sse", "invalid_value"),
        ("pull", "sometimes", "invalid_value"),
        ("strict", "yes", "invalid_type"),
    ],
)
def test_invalid_fields_are_refused_by_name(field: str, value: object, code: str) -> None:
    error = refused(json.dumps({"prompt": "a dog", field: value}).encode())
    assert (error.status, error.param, error.code) == (400, field, code)
    assert len(error.message) < 200
    error.message.encode("ascii")


def test_a_larger_picture_is_reduced_unless_a_size_is_given() -> None:
    photo = InputFile(Descriptor.of("image/png", b""), 4000, 3000)
    pictures = StoredPictures((photo,))
    for wish, said in (
        (
            image_request(),
            "image has 4000 x 3000 pixels, and is reduced to 2352x1760; size sets another",
        ),
        (image_request(width=64), ""),
        (image_request(expand=[0, 0, 48, 0]), ""),
    ):
        request = wish.build_request(aimage(), pictures=pictures)
        found = wish.list_warnings(request, pictures, has_size=wish.has_size)
        assert len(found) == bool(said) and all(one.startswith(said) for one in found)
    assert image_request().build_request(aimage(), pictures=pictures).sampling.width == 2352
    request = image_request().build_request(aimage("flux2"), pictures=pictures)  # a megapixel
    assert (request.sampling.width, request.sampling.height, len(request.input.references)) == (
        1168,
        880,
        1,
    )
    assert (
        "is reduced to 1168x880"
        in image_request().list_warnings(request, pictures, has_size=False)[0]
    )


def test_only_models_that_paint_take_the_mask_of_a_cut_out_image() -> None:
    cut_out = InputFile(
        Descriptor.of("image/png", b""), 64, 64, is_transparent=True, is_cut_out=True
    )
    pictures = StoredPictures((cut_out,), "alpha", is_mask_implied=True)
    for model, mask, said in (
        (aimage(), "alpha", "image has transparent parts, which are painted: it has no mask"),
        (aimage("flux2"), None, "image has transparent parts, which are white for the model"),
    ):
        request = image_request().build_request(model, pictures=pictures)
        assert request.input.mask == mask
        assert image_request().list_warnings(request, pictures, has_size=False) == [said]


def test_the_largest_seed_depends_on_the_number_of_pictures() -> None:
    assert image_request(seed=2**64 - 10, n=10).first_seed == 2**64 - 10
    assert refused(seed=2**64 - 9, n=10).param == "seed"


def test_the_largest_and_smallest_sizes_are_accepted() -> None:
    assert image_request(size="8192x2048").size == "8192x2048"
    assert image_request(size="16x16").size == "16x16"


def test_one_side_is_combined_with_the_default_of_the_model() -> None:
    wish = image_request(width=64)
    assert (wish.dimensions, wish.sides) == ("auto", ("width",))
    parameters = wish.build_request(aimage(width=32, height=48))
    assert (parameters.sampling.width, parameters.sampling.height) == (64, 48)


def test_width_and_height_must_agree_with_size() -> None:
    assert image_request(width=64, height=48).dimensions == "64x48"
    assert image_request(size="64x48", height=48).dimensions == "64x48"
    assert image_request(size="auto", width=64).size == "auto"
    error = refused(size="64x48", height=64)
    assert (error.param, error.message) == ("height", "height is 64, but size is 64x48")


def test_width_and_height_have_the_same_limit_as_size() -> None:
    assert refused(width=8208).message == "width must be a multiple of 16 from 16 to 8192, not 8208"
    assert refused(size="16x8208").message == (
        "size must have a height that is a multiple of 16 from 16 to 8192"
    )


def test_a_size_refusal_names_a_field_of_the_request() -> None:
    message = "width 64 and height 8192 are too large for this machine: much"
    for fields, param in ({"height": 8192}, "height"), ({"size": "64x8192"}, "size"):
        refusal = UsageError(message, hint="use a smaller size", parameter="height")
        error = with_param(refusal, image_request(**fields))
        assert isinstance(error, ApiError)
        assert (error.param, error.message) == (param, f"{message}; use a smaller size")


def test_missing_fields_take_the_defaults_of_the_worker() -> None:
    defaults: dict[str, Any] = {"pull": "never", "stream_format": "openai", "png_facts": False}
    wish = read_request(read_object(b'{"prompt": "a"}'), **defaults)
    assert (wish.pull, wish.stream_format, wish.encoding.has_facts) == ("never", "openai", False)
    said = b'{"prompt": "a", "pull": "always", "stream_format": "auto", "png_facts": true}'
    wish = read_request(read_object(said), **defaults)
    assert (wish.pull, wish.stream_format, wish.encoding.has_facts) == ("always", "auto", True)


def test_a_request_without_a_prompt_is_refused() -> None:
    error = refused(b'{"model": "z-image"}')
    assert (error.status, error.param, error.code) == (400, "prompt", "missing_required_parameter")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"a dog"',
        b"null",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "guidance": NaN}',
        b'{"prompt": "a", "guidance": Infinity}',
        b'{"prompt": "a", "guidance": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}",
        b"prompt=a+dog",
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(raw: bytes) -> None:
    error = refused(raw)
    assert (error.status, error.code) == (400, "invalid_json")


def test_unknown_fields_are_ignored_and_listed() -> None:
    assert [*image_request(watermark=True, cfg=2).iter_ignored()] == ["cfg", "watermark"]


def test_unknown_fields_are_refused_with_strict() -> None:
    request = LocalRequest("POST", "/v1/images/generations", scope="infer")
    with pytest.raises(ApiError) as caught:
        record_ignored(request, image_request(strict=1, cfg=2))
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unknown_parameter", "cfg")
    record_ignored(request, image_request(strict=True, moderation="low", user="x"))
    assert not request.get(RESPONSE_HEADERS)


@pytest.mark.parametrize(
    ("parameter", "param"),
    [("width", "width"), ("height", "width"), ("negative", "negative_prompt"), ("shift", "shift")],
)
def test_a_refusal_by_the_model_names_the_field_of_the_request(parameter: str, param: str) -> None:
    error = with_param(
        build_parameter_error(parameter, "is wrong", "do this"), image_request(width=1024)
    )
    assert isinstance(error, ApiError)
    message = f"{param if parameter == 'negative' else parameter} is wrong; do this"
    assert (error.status, error.param, error.message) == (400, param, message)


def test_a_refusal_of_no_parameter_has_no_field() -> None:
    error = UsageError("something else is wrong")
    assert with_param(error, image_request()) is error


def test_the_documentation_names_every_field_and_preset() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    section = text.partition("### Fields of a request")[2].partition("### Streams")[0]
    section += (Path(__file__).parents[2] / "docs" / "parameters.md").read_text("utf-8")
    documented = set(re.findall(r"`([a-z_]+)`", section))
    assert ImageRequest.model_fields.keys() | ImageRequest.NO_EFFECT <= documented
    assert set(PRESETS) <= documented


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "dall-e-3"}, "url"),
        ({"model": "dall-e-2:latest", "response_format": None}, "url"),
        ({"model": "dall-e-3", "response_format": "b64_json"}, "b64_json"),
        ({"model": "dall-e-3", "stream": True}, "b64_json"),
        ({"model": "gpt-image-1"}, "b64_json"),
        ({}, "b64_json"),
    ],
)
def test_dall_e_models_default_to_links(fields: dict[str, Any], expected: str) -> None:
    body = read_request(read_object(json.dumps({"prompt": "a dog"} | fields).encode()))
    assert body.response_format == expected
