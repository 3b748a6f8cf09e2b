"""OpenAI's images API: ``POST /v1/images/...``, ``/v1/models``, and picture links."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from aiohttp import web

from clowder_aimage.api import answer_stream
from clowder_aimage.api.model_catalog import ModelCatalog
from clowder_aimage.api.model_choice import SelectedModel, choose_model
from clowder_aimage.api.model_kind import PICTURES, check_kind
from clowder_aimage.api.model_list import describe_use
from clowder_aimage.api.openai import operation as openai_operation
from clowder_aimage.api.openai import stream as openai_stream
from clowder_aimage.api.openai.stream import KeepPicture
from clowder_aimage.api.parameter_field import convert_parameter_error
from clowder_aimage.api.picture import link as picture_link
from clowder_aimage.api.picture import output as picture_output
from clowder_aimage.api.picture.control_field import convert_controlnet_error, find_controlnet
from clowder_aimage.api.picture.lora_field import PromptedLoras
from clowder_aimage.api.picture.request import (
    REPAINTS,
    EditRequest,
    ImageRequest,
    VariationRequest,
    read_request,
)
from clowder_aimage.api.picture.source import iter_ignored_links, take_pictures
from clowder_aimage.api.picture.upload import PictureUpload, PictureUploads, StoredPictures
from clowder_aimage.api.picture.warning import collect_warnings
from clowder_aimage.api.request_body import read_query, record_ignored
from clowder_aimage.api.service import Service
from clowder_aimage.api.text.enhance_field import PromptEnhancer
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.event import Event, ImageEvent
from clowder_aimage.engine.executor import run_generation, run_io
from clowder_aimage.errors import AImageError, ModelError, NotFoundError, UsageError
from clowder_aimage.generation.request import MAX_REFERENCES, GenerateRequest, LoraUse
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.app import POLICY
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN, Route, share
from clowder_aimage.oci import Reference

# Bytes of the pictures of an answer in one piece
_MAX_ANSWER = 512 << 20

_OnParameters = Callable[[GenerateRequest, str, Sequence[str]], None]
_ErrorT = TypeVar("_ErrorT", bound=Exception)


def build_routes(service: Service, uploads: PictureUploads) -> list[Route]:
    """Return the routes of OpenAI's API."""
    images, models = ImageRoutes(service, uploads), ModelCatalog(service)

    async def list_models(_: Request) -> web.StreamResponse:
        data = await run_io(models.list_all)
        return web.json_response({"object": "list", "data": data})

    async def get_model(request: Request) -> web.StreamResponse:
        return web.json_response(await run_io(models.find, request.match_info["id"]))

    return [
        share(openai_operation.GENERATE, partial(images.answer, ImageRequest)),
        share(openai_operation.EDIT, partial(images.answer, EditRequest)),
        share(openai_operation.VARY, partial(images.answer, VariationRequest)),
        share(openai_operation.LIST_MODELS, list_models),
        share(openai_operation.GET_MODEL, get_model),
        share(openai_operation.FETCH_PICTURE, images.fetch),
    ]


@dataclass(frozen=True, slots=True)
class _Work:
    """A request, its model, the AImages of its adapters by index, its pictures and their target.

    ``warnings`` are sentences about what has no effect, once the parameters are known; the model
    adds some when it begins.
    """

    body: ImageRequest
    loras: PromptedLoras
    selected: SelectedModel
    adapters: Mapping[int, Reference]
    pictures: StoredPictures | None
    # The name to push the pictures to
    target: Reference | None
    enhancer: PromptEnhancer | None = None
    warnings: list[str] = field(default_factory=list)


class ImageRoutes:
    """Handlers that generate pictures and serve linked pictures."""

    def __init__(self, service: Service, uploads: PictureUploads) -> None:
        self._service, self._uploads = service, uploads
        self._pictures = picture_link.PictureLinks()

    async def answer(self, kind: type[ImageRequest], request: Request) -> web.StreamResponse:
        """Respond with pictures, in one piece or as a stream."""
        async with self._uploads.open(request) as upload:
            # Requests that begin with a picture may be forms
            fields = await upload.body.read_fields(may_be_form=kind is not ImageRequest)
            return await self._answer(request, upload, fields, kind)

    async def _answer(
        self,
        request: Request,
        upload: PictureUpload,
        fields: dict[str, Any],
        kind: type[ImageRequest],
    ) -> web.StreamResponse:
        service, names = self._service, ("pull", "stream_format", "png_facts")
        ignored_links = list(islice(iter_ignored_links(fields), MAX_REFERENCES))
        sources = take_pictures(fields)
        defaults = {name: getattr(service.settings, name) for name in names}
        body = read_request(fields, kind, is_form=upload.body.is_form, **defaults)
        record_ignored(request, body, ignored_links)
        body.check_rules(sources)
        may_pull = request.get("scope") == ADMIN
        target = await picture_output.resolve_target(
            body.output, service, may_push=may_pull, is_streamed=body.stream
        )
        selected = await choose_model(service, body, [PICTURES], may_pull=may_pull)
        request["model"] = selected.reference
        implies_mask = kind is EditRequest and not body.stated.keys() & REPAINTS
        pictures = await upload.keep(
            sources, body.painted, selected.aimage, implies_mask=implies_mask
        )
        loras = body.adapters
        if selected.adapter is not None:
            loras = loras.prepend(selected.adapter)
        try:
            # Checked before a model is pulled
            body.build_request(selected.aimage, pictures=pictures)
        except UsageError as error:
            raise _with_param(error, body, loras) from None
        headers = {"X-Aimage-Seed": str(body.first_seed)}
        headers |= selected.build_headers(service, body)
        enhancer = PromptEnhancer.of(service, body, loras.prompt, body.first_seed, selected.pull)
        adapters = await loras.resolve_references(service)
        work = _Work(body, loras, selected, adapters, pictures, target, enhancer)
        if not body.stream:
            return await self._respond_at_once(request, work, headers)
        dialect = openai_stream.choose(body, request.headers)
        stream_form = openai_stream.create_stream(dialect, body, self._build_keeper(request, body))
        previews = body.stated.get("previews", 0) if dialect.startswith("openai") else 0
        events = self._generate(work, stream_form.on_parameters, previews)
        form = answer_stream.StreamForm(
            stream_form.iter_frames,
            stream_form.end,
            partial(_with_param, body=body, loras=loras),
            work.warnings,
        )
        return await answer_stream.stream_events(request, events, form, headers)

    async def fetch(self, request: Request) -> web.StreamResponse:
        """Respond with the picture of a link."""
        query = read_query(request, openai_operation.LinkQuery)
        try:
            picture = self._pictures.find(
                request.match_info["name"], query.expires, query.signature
            )
        except picture_link.ExpiredError as error:
            raise ApiError(410, f"{error}; {error.hint}", code="picture_expired") from None
        except NotFoundError as error:
            raise ApiError(404, f"{error}; {error.hint}", code="picture_not_found") from None
        max_age = max(0, picture.expires - int(time.time()))
        headers = {
            "Cache-Control": f"private, max-age={max_age}, immutable",
            "Content-Security-Policy": f"{POLICY}; sandbox",
        }
        return web.Response(body=picture.data, content_type=picture.media_type, headers=headers)

    def _generate(
        self, work: _Work, on_parameters: _OnParameters, previews: int = 0
    ) -> AsyncGenerator[Event, None]:
        """Yield events until all pictures are complete; ``on_parameters`` takes the parameters."""
        body, selected = work.body, work.selected

        def make(aimage: AImage) -> GenerateRequest:
            check_kind(selected.reference, aimage, PICTURES)
            parameters = body.build_request(aimage, previews, work.pictures)
            parameters = work.enhancer.apply(parameters) if work.enhancer else parameters
            parameters = find_controlnet(self._service, parameters, aimage)
            parameters = work.loras.resolve(self._service, parameters, aimage)
            work.warnings[:] = body.list_warnings(parameters, work.pictures, has_size=body.has_size)
            on_parameters(
                parameters, body.compute_final_size(parameters, work.pictures), work.warnings
            )
            return parameters

        generate = partial(
            self._service.engine.generate,
            selected.reference,
            make,
            encoding=body.encoding,
            pull=selected.pull,
            adapters=work.adapters,
            stored=selected.stored,
        )
        events = work.enhancer.enhance_then(generate, body.count) if work.enhancer else generate()
        return collect_warnings(events, work.warnings)

    async def _respond_at_once(
        self, request: Request, work: _Work, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Respond with all pictures at once; cancel if the client disconnects."""
        body = work.body
        pictures: list[ImageEvent] = []
        used = list[LoraUse]()

        def on_parameters(parameters: GenerateRequest, *_: object) -> None:
            used[:] = parameters.adapters.loras

        try:
            async with contextlib.aclosing(self._generate(work, on_parameters)) as events:
                async for event in events:
                    if isinstance(event, ImageEvent):
                        pictures.append(event)
                        _check_size(pictures)
        except AImageError as error:
            raise _with_param(error, body, work.loras) from None
        if len(pictures) < body.count:
            raise ModelError(f"the model generated {len(pictures)} of {body.count} pictures")
        keep = self._build_keeper(request, body)
        headers["X-Aimage-Digest"] = pictures[0].digest
        has_links = body.response_format == "url"
        encode = partial(_answer, body, pictures, keep)
        # Links are made in the event loop, which owns the pictures
        answer = encode() if has_links else await run_generation(encode)
        answer |= describe_use(used, work.warnings)
        if work.target is not None:
            answer["output"] = await picture_output.push_events(
                self._service, work.target, pictures, body.encoding.kind
            )
        text = await run_generation(json.dumps, answer)
        response = web.Response(text=text, content_type="application/json", headers=headers)
        answer_stream.add_warnings(response.headers, work.warnings)
        return response

    def _build_keeper(self, request: Request, body: ImageRequest) -> KeepPicture:
        """Return a function that keeps a picture and returns its URL on this host."""
        base = self._service.settings.public_url or f"{request.scheme}://{request.host}"
        loop = asyncio.get_running_loop()

        def keep(picture: ImageEvent) -> str:
            loop.call_later(picture_link.LIFETIME + 1, self._pictures.purge)
            return base + self._pictures.keep(picture.data, body.encoding.kind)

        return keep


def _answer(body: ImageRequest, pictures: list[ImageEvent], keep: KeepPicture) -> dict[str, Any]:
    sample = pictures[0]
    return {
        "created": int(time.time()),
        "data": [openai_stream.build_entry(picture, body, keep) for picture in pictures],
        "background": "opaque",
        "output_format": body.encoding.kind,
        "quality": openai_stream.translate_quality(body),
        "size": f"{sample.width}x{sample.height}",
        "usage": openai_stream.build_usage(),
    }


def _check_size(pictures: Sequence[ImageEvent]) -> None:
    """Raise ApiError if pictures are too large for an answer in one piece."""
    if sum(len(picture.data) for picture in pictures) > _MAX_ANSWER:
        message = f"n has more pictures than an answer of {_MAX_ANSWER >> 20} MiB holds"
        raise ApiError(400, f"{message}; use stream, or a smaller n", param="n")


def _with_param(error: _ErrorT, body: ImageRequest, loras: PromptedLoras) -> _ErrorT | AImageError:
    """Return the error with the request field that the pipeline or an adapter rejected."""
    if not isinstance(error, AImageError):
        return error
    if "adapter" in error.facts:
        return loras.convert_error(error)
    if "controlnet" in error.facts:
        return convert_controlnet_error(error)
    # A side has the name of the field that states it
    sides = dict.fromkeys(("width", "height"), body.sides[0] if body.sides else "size")
    return convert_parameter_error(error, sides | {name: name for name in body.sides})
