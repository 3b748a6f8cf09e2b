"""The operations of ollama's API that are not only of language models (ollama, docs/api.md)."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.model_details import ModelDetails
from clowder_aimage.api.model_list import UsedLora
from clowder_aimage.api.name_field import Name, TagName
from clowder_aimage.api.request_body import ModelBody, NamedBody, RequestBody, TransferBody
from clowder_aimage.http.operation import OLLAMA, TRANSFERS, Answer, Operation
from clowder_aimage.http.route import ADMIN, INFER, OPEN


class CopyBody(RequestBody):
    """The name of a model, and another one for it."""

    source: Name = Field(min_length=1, examples=["tiny"])
    destination: TagName = Field(min_length=1, examples=["team/tiny:v2"])


class Version(TypedDict):
    """A version."""

    version: str


class OllamaModel(TypedDict):
    """A model in the store."""

    name: str
    model: str
    digest: str
    size: int
    modified_at: str
    details: ModelDetails
    capabilities: list[str]


class OllamaModels(TypedDict):
    """The models in the store."""

    models: list[OllamaModel]


class LoadedModel(TypedDict):
    """A model in memory."""

    name: str
    model: str
    digest: str
    size: int
    size_vram: int
    device: str
    expires_at: str
    details: ModelDetails
    variants: NotRequired[
        Annotated[
            list[str],
            Field(description="Other names that it serves: AImages of the same base."),
        ]
    ]
    context_length: NotRequired[
        Annotated[int, Field(description="The tokens of a prompt and its text.")]
    ]
    loras: NotRequired[
        Annotated[list[UsedLora], Field(description="The adapters of the last request.")]
    ]


class LoadedModels(TypedDict):
    """The models in memory."""

    models: list[LoadedModel]


class ShownModel(TypedDict):
    """Details of a model."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class TransferStatus(TypedDict):
    """The status of a transfer."""

    status: str


VERSION = Operation(
    "GET",
    "/api/version",
    OPEN,
    OLLAMA,
    "version",
    "Get the version.",
    (
        Answer(
            "The version.",
            Version,
            headers={"X-Aimage-Version": "The version; other servers do not send it."},
        ),
    ),
)
TAGS = Operation(
    "GET",
    "/api/tags",
    INFER,
    OLLAMA,
    "tags",
    "List the models in the store.",
    (Answer("The models.", OllamaModels),),
)
PS = Operation(
    "GET",
    "/api/ps",
    INFER,
    OLLAMA,
    "ps",
    "List the models in memory.",
    (Answer("The models.", LoadedModels),),
)
SHOW = Operation(
    "POST",
    "/api/show",
    INFER,
    OLLAMA,
    "show",
    "Show a model.",
    (Answer("Details of the model.", ShownModel),),
    body=ModelBody,
    refusals=(404,),
)
_TRANSFERRED = Answer(
    "`success`; with `stream` (the default), lines for each blob before it.",
    TransferStatus,
    media=("application/x-ndjson",),
)
PULL = Operation(
    "POST",
    "/api/pull",
    ADMIN,
    OLLAMA,
    "pull",
    "Pull a model from the registry in its name.",
    (_TRANSFERRED,),
    body=TransferBody,
    refusals=TRANSFERS,
)
PUSH = Operation(
    "POST",
    "/api/push",
    ADMIN,
    OLLAMA,
    "push",
    "Push a model to the registry in its name.",
    (_TRANSFERRED,),
    body=TransferBody,
    refusals=TRANSFERS,
)
COPY = Operation(
    "POST",
    "/api/copy",
    ADMIN,
    OLLAMA,
    "copy",
    "Copy a model to another name.",
    (Answer("The name was added."),),
    body=CopyBody,
    refusals=(404, 503, 507),
)
DELETE = Operation(
    "DELETE",
    "/api/delete",
    ADMIN,
    OLLAMA,
    "delete",
    "Delete a name.",
    (Answer("It was deleted."),),
    body=NamedBody,
    refusals=(404, 409, 503),
)
