"""ollama's ``/api/generate`` for image models.

The fields are those of ollama's image generation until July 2026 (ollama,
server/routes.go, ``handleImageGenerate``; docs/api.md): ``width``, ``height``, ``steps``, and the
``seed`` in ``options``; ``images`` in base64; ``completed`` of ``total`` steps while it runs,
``image`` at the end. Extensions, such as ``guidance``, may be in ``options`` too. ``stop``, with an
empty prompt, ends the model's work after the current step.
"""

from __future__ import annotations

import base64
import secrets
import time
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, NotRequired, Self

from aiohttp import web
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from clowder_aimage.api import model_list
from clowder_aimage.api.field_rule import FieldRule, requires
from clowder_aimage.api.model_kind import EMBEDDER, PICTURES, TEXT, check_kind, classify_model
from clowder_aimage.api.ollama.request import OllamaBody, OllamaRequest
from clowder_aimage.api.ollama.text import answer_prompt, read_named
from clowder_aimage.api.ollama.text_body import OllamaPromptBody
from clowder_aimage.api.parameter_field import (
    ParameterBody,
    Prompt,
    convert_parameter_error,
    with_parameters,
)
from clowder_aimage.api.picture.control_field import convert_controlnet_error, find_controlnet
from clowder_aimage.api.picture.field import PictureFields
from clowder_aimage.api.picture.lora_field import LoraFields, PromptedLoras
from clowder_aimage.api.picture.source import (
    CONTROL,
    IMAGES,
    BarePictureSources,
    iter_ignored_links,
    take_bare_pictures,
)
from clowder_aimage.api.picture.upload import PictureUploads, StoredPictures
from clowder_aimage.api.picture.warning import collect_warnings
from clowder_aimage.api.request_body import check_fields, record_ignored
from clowder_aimage.api.service import Service
from clowder_aimage.api.text.enhance_field import EnhanceFields, PromptEnhancer
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.event import Event, ImageEvent, StartedEvent
from clowder_aimage.errors import AImageError, ModelError, UsageError
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.parameter import list_parameters
from clowder_aimage.generation.request import (
    MAX_REFERENCES,
    GenerateRequest,
    Guidance,
    LoraUse,
    Sampling,
)
from clowder_aimage.http import operation
from clowder_aimage.http.api_error import OLLAMA
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.operation import COMPUTES, Answer, Operation
from clowder_aimage.http.route import INFER, Route, share
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.pipeline import Step

_ZEROS = ("width", "height", "steps")


def _with_defaults(schema: dict[str, Any]) -> None:
    """Add ollama's defaults to the schema of a body: 0."""
    fields = schema.get("properties", {})
    for name in _ZEROS:
        if name in fields:
            text = fields[name].pop("description", "")
            fields[name] = {"anyOf": [fields[name], {"const": 0}], "description": text}


class _Options(ParameterBody):
    model_config = ConfigDict(json_schema_extra=_with_defaults)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_defaults(cls, fields: Any) -> Any:
        """Leave out ollama's defaults: a size or steps of 0."""
        if not isinstance(fields, dict):
            return fields
        zeros = {name for name in _ZEROS if type(fields.get(name)) in (int, float)}
        return {name: value for name, value in fields.items() if not (name in zeros and value == 0)}


@with_parameters(Sampling, Guidance)
class OllamaPictureOptions(_Options):
    """The fields of a picture that may be in ``options`` too."""


@with_parameters(Sampling, Guidance)
class OllamaPictureBody(_Options, OllamaBody, EnhanceFields, PictureFields):
    """A request of ``/api/generate`` for an image model."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (requires((IMAGES, CONTROL), "prompt"),)

    prompt: Prompt = ""
    options: OllamaPictureOptions = Field(
        OllamaPictureOptions(), description="Another place of the fields of the picture."
    )
    png_facts: bool | None = None
    loras: LoraFields = Field(default_factory=list)
    trigger: bool = False

    def with_options(self) -> Self:
        """Return the request with the parameters that are only in its ``options``."""
        stated, options = self.stated, self.options.stated
        fields = {parameter.name: parameter.field for parameter in self.PARAMETERS}
        only = {fields[name]: value for name, value in options.items() if name not in stated}
        return self.model_copy(update=only)

    @property
    def first_seed(self) -> int:
        """The seed of the picture, drawn if the body has none."""
        return int(self.stated.get("seed", secrets.randbits(32)))

    @property
    def has_size(self) -> bool:
        """Return True if a side is stated."""
        return bool({"width", "height"} & self.stated.keys())

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ApiError for wrong values, before a model is loaded for the request."""
        plain = {
            parameter.name for owner in (Sampling, Guidance) for parameter in list_parameters(owner)
        }
        stated = {**self.options.stated, **self.stated}
        try:
            GenerateRequest.draft(**{name: stated[name] for name in stated.keys() & plain})
        except UsageError as error:
            raise convert_parameter_error(error) from None
        return self


class OllamaPictureFields(OllamaPictureBody, BarePictureSources):
    """A request for a picture, of an image model."""


class OllamaPicture(TypedDict):
    """A line of an answer, or the whole answer: a picture or a text."""

    model: str
    created_at: str
    response: str
    done: bool
    done_reason: NotRequired[str]
    image: NotRequired[Annotated[str, Field(description="The picture, in base64.")]]
    seed: NotRequired[int]
    width: NotRequired[int]
    height: NotRequired[int]
    digest: NotRequired[
        Annotated[str, Field(description="The manifest of the AImage that generated the picture.")]
    ]
    loras: NotRequired[
        Annotated[
            list[model_list.UsedLora], Field(description="The adapters that were used, if any.")
        ]
    ]
    warnings: NotRequired[
        Annotated[list[str], Field(description="Sentences about what has no effect.")]
    ]


GENERATE = Operation(
    "POST",
    "/api/generate",
    INFER,
    operation.OLLAMA,
    "ollamaGenerate",
    "Generate a picture or a text, as the model does. Without a prompt: load the model, or unload "
    "it with `keep_alive: 0`.",
    (
        Answer(
            "The answer; with `stream` (the default), one line for each part before it.",
            OllamaPicture,
            media=("application/x-ndjson",),
            headers={
                "X-Aimage-Warning": "Sentences about what has no effect; with `stream`, if "
                "they are known at its start."
            },
        ),
    ),
    limit=None,
    body=OllamaPictureFields | OllamaPromptBody,
    refusals=COMPUTES,
)


class OllamaGeneration(OllamaRequest):
    """A request to load, unload or stop a model, or to generate a picture."""

    def __init__(
        self,
        service: Service,
        request: Request,
        body: OllamaPictureBody,
        pictures: StoredPictures | None,
        stored: StoredAImage | None,
    ) -> None:
        super().__init__(service, request, body, stored)
        self._picture_body = body
        self._seed = body.first_seed
        self._adapters = PromptedLoras.of(body.prompt, body.loras, has_words=body.trigger)
        self._to_request = partial(body.request, self._adapters.prompt, pictures, seed=self._seed)
        # Checked before a model is pulled
        self._to_request(None)
        self._warn = partial(body.list_warnings, pictures=pictures, has_size=body.has_size)
        self._used: tuple[LoraUse, ...] = ()
        self._picture: ImageEvent | None = None

    async def answer(self) -> web.StreamResponse:
        """Respond to the request. Raises AImageError."""
        has_prompt = bool(self._picture_body.prompt or self._picture_body.enhance)
        return await (self._generate() if has_prompt else self.change())

    async def _generate(self) -> web.StreamResponse:
        adapters, facts = self._adapters, self._picture_body.png_facts
        terms, seed = self.build_terms(), self._seed
        pull = str(terms.get("pull", NEVER))
        enhancer = PromptEnhancer.of(self.service, self._picture_body, adapters.prompt, seed, pull)
        has_facts = self.service.settings.png_facts if facts is None else facts

        def make(aimage: AImage) -> GenerateRequest:
            check_kind(self.reference, aimage, PICTURES, interface=OLLAMA)
            request = self._to_request(aimage)
            request = enhancer.apply(request) if enhancer else request
            request = find_controlnet(self.service, request, aimage)
            request = adapters.resolve(self.service, request, aimage)
            self._used = request.adapters.loras
            self.warnings[:] = self._warn(request)
            return request

        generate = partial(
            self.service.engine.generate,
            self.reference,
            make,
            encoding=PictureEncoding(has_facts=has_facts),
            adapters=await adapters.resolve_references(self.service),
            **terms,
        )
        events = enhancer.enhance_then(generate) if enhancer else generate()
        events = collect_warnings(events, self.warnings)
        return await self.stream(events, self._receive_event)

    def explain(self, error: AImageError) -> AImageError:
        return convert_parameter_error(
            convert_controlnet_error(self._adapters.convert_error(error))
        )

    def _receive_event(self, event: Event) -> dict[str, Any] | None:
        """Return the line for an event."""
        if isinstance(event, ImageEvent):
            self._picture = event
        if isinstance(event, Step):
            return self.build_line(completed=event.index, total=event.total)
        return self.build_line() if isinstance(event, StartedEvent) else None

    def finish(self) -> dict[str, Any]:
        if (picture := self._picture) is None:
            raise ModelError("the model generated no picture")
        return self.build_line(
            done=True,
            done_reason="stop",
            image=base64.b64encode(picture.data).decode(),
            **{name: getattr(picture, name) for name in ("seed", "width", "height")},
            digest=picture.digest.removeprefix("sha256:"),
            **model_list.describe_use(self._used, self.warnings),
            total_duration=time.monotonic_ns() - self.started_ns,
        )


async def generate(uploads: PictureUploads, request: Request) -> web.StreamResponse:
    """Respond to ``POST /api/generate``: with a picture, or with a text of a language model."""
    async with uploads.open(request) as upload:
        fields = await upload.body.read_fields()
        service = uploads.service
        stored = await read_named(service, fields)
        if stored is not None and classify_model(stored.aimage) in (TEXT, EMBEDDER):
            return await answer_prompt(service, request, fields, stored)
        ignored_links = list(islice(iter_ignored_links(fields), MAX_REFERENCES))
        sources = take_bare_pictures(fields)
        body = check_fields(fields, OllamaPictureBody).with_options()
        record_ignored(request, body, ignored_links)
        body.check_rules(sources)
        pictures = await upload.keep(sources, body.painted)
        work = OllamaGeneration(service, request, body, pictures, stored)
        return await work.answer()


def build_routes(uploads: PictureUploads) -> list[Route]:
    """Return the route that generates pictures."""
    return [share(GENERATE, partial(generate, uploads))]
