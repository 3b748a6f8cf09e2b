"""The operations of Clowder's storage API."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.name_field import name_schema
from clowder_aimage.api.request_body import Parameters, RequestBody
from clowder_aimage.api.store.operation import MissingBlobs
from clowder_aimage.http.operation import CONTENT, TRANSFERS, Answer, Operation
from clowder_aimage.http.route import ADMIN
from clowder_aimage.oci.reference import build_pattern

_OCI = name_schema(build_pattern(is_remote=True), "[Oo][Cc][Ii]://")
_OLLAMA = name_schema(build_pattern(), "[Oo][Ll][Ll][Aa][Mm][Aa]:///*")


class ContentBody(RequestBody):
    """The content to pull."""

    url: str = Field(
        description="`oci://` or `ollama://`, followed by a name.",
        json_schema_extra={"anyOf": [_OCI, _OLLAMA]},
    )
    credentials: str = Field(
        default="",
        description="Used for this pull only: a token, or base64 of `user:password`.",
        json_schema_extra={"pattern": "^[!-~]*$"},
    )
    credentialsType: str = Field(  # noqa: N815 - the storage manager's name
        default="",
        description="`Bearer` or `Basic`.",
        json_schema_extra={"pattern": "^([Bb][Ee][Aa][Rr][Ee][Rr]|[Bb][Aa][Ss][Ii][Cc])?$"},
    )


class Content(TypedDict):
    """Content that is stored or being pulled."""

    url: str
    digest: NotRequired[str]
    size: NotRequired[int]
    status: Literal["complete", "partial", "pulling"]
    missing: NotRequired[MissingBlobs]
    completed: NotRequired[int]
    total: NotRequired[int]


class ContentList(TypedDict):
    """The content of a store."""

    content: list[Content]


class ContentPath(Parameters):
    """The place of content."""

    url: str = Field(
        description="The content's URL in base64 (of either alphabet), such as that of "
        "`oci://registry.example.com/team/model:v1`.",
        pattern="^[A-Za-z0-9_-]+$",
        examples=["b2NpOi8vdGVhbS9hYnNlbnQ6djE"],
    )


_PLACE = {"Location": "The path of the content."}
LIST = Operation(
    "GET",
    "/content/",
    ADMIN,
    CONTENT,
    "listContent",
    "List the content that is stored or being pulled.",
    (Answer("The content.", ContentList),),
)
ADD = Operation(
    "POST",
    "/content/",
    ADMIN,
    CONTENT,
    "addContent",
    "Pull content.",
    (
        Answer("The content was stored already.", Content, headers=_PLACE),
        Answer("The content was pulled.", Content, 201, headers=_PLACE),
    ),
    body=ContentBody,
    refusals=(*TRANSFERS, 409, 422),
)
GET = Operation(
    "GET",
    # Standard base64 contains slashes
    "/content/{url:.+}",
    ADMIN,
    CONTENT,
    "getContent",
    "Get the state of content.",
    (
        Answer("The content is complete.", Content),
        Answer("The content is partial or being pulled.", Content, 206),
    ),
    path_fields=ContentPath,
    refusals=(404,),
)
DELETE = Operation(
    "DELETE",
    GET.path,
    ADMIN,
    CONTENT,
    "removeContent",
    "Delete content.",
    (Answer("It was deleted.", status=204),),
    path_fields=ContentPath,
    refusals=(404, 409),
)
