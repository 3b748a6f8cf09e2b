"""The operations of OpenAI's images API, of its list of models, and of linked pictures."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from clowder_aimage.api.model_choice import MODEL_HEADERS
from clowder_aimage.api.model_list import UsedLora
from clowder_aimage.api.parameter_field import ParameterBody, with_parameters
from clowder_aimage.api.picture import link as picture_link
from clowder_aimage.api.picture.request import EditRequest, ImageRequest, Size, VariationRequest
from clowder_aimage.api.picture.source import PictureSources
from clowder_aimage.api.request_body import Parameters, StrictQuery
from clowder_aimage.generation.request import MAX_REFERENCES, Output
from clowder_aimage.http.operation import COMPUTES, OPENAI, Answer, Operation
from clowder_aimage.http.route import INFER, OPEN

# A file of a form
_FILLED: JsonDict = {"minLength": 1}
_File = Annotated[bytes, Field(json_schema_extra=_FILLED)]


class ImageFields(ImageRequest, PictureSources):
    """A request for pictures. Unknown fields are ignored and listed in `X-Aimage-Ignored`."""


class EditFields(EditRequest, PictureSources):
    """A request for pictures that begin with another."""


class VariationFields(VariationRequest, PictureSources):
    """A request for pictures that begin with another, without a prompt."""


@with_parameters(Output, without=("previews",))
class VariationForm(ParameterBody):
    """Also the other fields of the JSON body, as texts."""

    image: bytes = Field(json_schema_extra=_FILLED, description="A PNG, JPEG or WebP file.")
    model: str = ""
    size: Size = "auto"
    control: bytes = Field(
        default=b"", json_schema_extra=_FILLED, description="A file that guides a ControlNet."
    )


class EditForm(VariationForm):
    """Also the other fields of the JSON body, as texts."""

    image: list[_File] = Field(  # type: ignore[assignment]
        json_schema_extra={"minItems": 1},
        max_length=MAX_REFERENCES,
        description="PNG, JPEG or WebP files: one, or up to the `max_images` of the model. Also "
        "`image[]`.",
    )
    mask: bytes = Field(
        default=b"",
        json_schema_extra=_FILLED,
        description="A file as large as the image, of which `painted` is painted.",
    )
    prompt: str = Field(json_schema_extra=_FILLED)


class PictureEntry(TypedDict):
    """A picture."""

    b64_json: NotRequired[str]
    url: NotRequired[str]
    revised_prompt: NotRequired[
        Annotated[str, Field(description="The prompt that a language model has written.")]
    ]


class PushedPictures(TypedDict):
    """The artifact that was pushed."""

    push: str
    digest: str


class Images(TypedDict):
    """Pictures."""

    created: int
    data: list[PictureEntry]
    background: str
    output_format: str
    quality: str
    size: str
    usage: dict[str, Any]
    loras: NotRequired[
        Annotated[list[UsedLora], Field(description="The adapters that were used, if any.")]
    ]
    warnings: NotRequired[
        Annotated[list[str], Field(description="Sentences about what has no effect.")]
    ]
    output: NotRequired[PushedPictures]


class ModelObject(TypedDict):
    """A model that can be run, an alias, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: NotRequired[
        Annotated[
            list[str],
            Field(
                description="`image`; or of `chat`, `completion`, `embedding`, `tools` and "
                "`thinking` those that the files of a language model show."
            ),
        ]
    ]
    max_images: NotRequired[
        Annotated[int, Field(ge=0, description="The pictures that a request may have.")]
    ]
    defaults: NotRequired[Annotated[dict[str, Any], Field(description="Those of requests.")]]
    context_length: NotRequired[
        Annotated[int, Field(description="The tokens of a prompt and its text.")]
    ]
    parent: NotRequired[
        Annotated[str | None, Field(description="The name of an adapter's base in the store.")]
    ]
    adapter: NotRequired[
        Annotated[dict[str, Any], Field(description="The properties of an adapter.")]
    ]


class ModelObjects(TypedDict):
    """The models that can be run."""

    object: Literal["list"]
    data: list[ModelObject]


class ModelPath(Parameters):
    """The place of a model."""

    id: str = Field(description="The name of the model, including slashes.", examples=["tiny"])


class LinkPath(Parameters):
    """The place of a linked picture."""

    name: str = Field(description="From the link.")


class LinkQuery(Parameters):
    """The signature of a link."""

    expires: str = Field(default="", description="From the link.")
    signature: str = Field(default="", description="From the link.")


_PICTURES = Answer(
    "The pictures; with `stream`, a stream of events.",
    Images,
    media=("text/event-stream",),
    headers={
        "X-Aimage-Seed": "The same seed generates the same picture.",
        **MODEL_HEADERS,
        "X-Aimage-Digest": "The manifest of that AImage; not with `stream`.",
        "X-Aimage-Warning": "Sentences about what has no effect; with `stream`, if they "
        "are known at its start.",
    },
)
GENERATE = Operation(
    "POST",
    "/v1/images/generations",
    INFER,
    OPENAI,
    "generate",
    "Generate pictures from a prompt.",
    (_PICTURES,),
    details="Events are `progress` and `done`; for OpenAI's SDKs, or as set by `stream_format` or "
    "`partial_images`, they are `image_generation.partial_image` and `image_generation.completed`. "
    "An error after the first event is sent as the event `error`.",
    limit=None,
    body=ImageFields,
    query=StrictQuery,
    refusals=COMPUTES,
)
EDIT = Operation(
    "POST",
    "/v1/images/edits",
    INFER,
    OPENAI,
    "edit",
    "Generate pictures that begin with another.",
    (_PICTURES,),
    details="The body is a form with files, or JSON as for `/v1/images/generations`. Events are "
    "`image_edit.partial_image` and `image_edit.completed` for OpenAI's SDKs.",
    limit=None,
    body=EditFields,
    form=EditForm,
    query=StrictQuery,
    refusals=COMPUTES,
)
VARY = Operation(
    "POST",
    "/v1/images/variations",
    INFER,
    OPENAI,
    "vary",
    "Generate pictures that begin with another, without a prompt.",
    (_PICTURES,),
    details="The body is a form with a file, or JSON as for `/v1/images/edits`.",
    limit=None,
    body=VariationFields,
    form=VariationForm,
    query=StrictQuery,
    refusals=COMPUTES,
)
LIST_MODELS = Operation(
    "GET",
    "/v1/models",
    INFER,
    OPENAI,
    "listModels",
    "List the models that can be run, their aliases, and the adapters.",
    (Answer("The models.", ModelObjects),),
)
GET_MODEL = Operation(
    "GET",
    "/v1/models/{id:.+}",
    INFER,
    OPENAI,
    "getModel",
    "Get a model.",
    (Answer("The model.", ModelObject),),
    path_fields=ModelPath,
    refusals=(404,),
)
FETCH_PICTURE = Operation(
    "GET",
    picture_link.PATH + "{name}",
    # The link is signed
    OPEN,
    OPENAI,
    "fetchPicture",
    "Get a picture by a link from `response_format: url`.",
    (Answer("The picture.", media=("image/png", "image/jpeg", "image/webp")),),
    path_fields=LinkPath,
    query=LinkQuery,
    refusals=(404, 410),
)
