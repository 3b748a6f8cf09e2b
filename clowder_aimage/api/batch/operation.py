"""The operations of files and batches (OpenAI, "Files" and "Batch"): fields and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from clowder_aimage.api.batch.stored_file import LIFETIME, FileObject, Owner
from clowder_aimage.api.request_body import (
    OpenBody,
    Parameters,
    RequestBody,
    StrictQuery,
)
from clowder_aimage.engine.batch_line import MAX_FILE, Url
from clowder_aimage.http.operation import BATCH, Answer, Operation
from clowder_aimage.http.route import INFER

MIN_LIFETIME = 3600  # seconds
# Limits of the metadata; the last two are in characters
_PAIRS, _KEY, _VALUE = 16, 64, 512


class FileExpiry(RequestBody):
    """The seconds that files are kept."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFETIME, le=LIFETIME)]


def _leave_out_nulls(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {key: text for key, text in value.items() if text is not None}


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    is_short = all(len(key) <= _KEY and len(text) <= _VALUE for key, text in value.items())
    if len(value) > _PAIRS or not is_short:
        raise ValueError(
            f"must have at most {_PAIRS} pairs, with keys of {_KEY} and values of {_VALUE} "
            "characters"
        )
    return value


class BatchBody(OpenBody):
    """A batch. Unknown fields are ignored, or refused with `strict`."""

    input_file_id: Annotated[str, Field(max_length=64)] = Field(
        description="A file with the purpose `batch`: each line has `custom_id`, `method`, `url` "
        "and `body`."
    )
    endpoint: Url = Field(description="The `url` of all lines.")
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[str, str],
            BeforeValidator(_leave_out_nulls),
            AfterValidator(_check_metadata),
            Field(
                json_schema_extra={
                    "maxProperties": _PAIRS,
                    "propertyNames": {"maxLength": _KEY},
                    "additionalProperties": {"type": ["string", "null"], "maxLength": _VALUE},
                }
            ),
        ]
        | None
    ) = None
    output_expires_after: FileExpiry | None = None


class FileForm(RequestBody):
    """The requests of a batch."""

    model_config = ConfigDict(extra="forbid")

    file: bytes = Field(description=f"JSON lines, up to {MAX_FILE >> 20} MiB.")
    purpose: Literal["batch"]
    anchor: Literal["created_at"] = Field(default="created_at", alias="expires_after[anchor]")
    seconds: int = Field(
        default=LIFETIME, ge=MIN_LIFETIME, le=LIFETIME, alias="expires_after[seconds]"
    )


class BatchesQuery(Parameters):
    """A part of a list."""

    after: str | None = Field(default=None, description="The entries after that with this id.")
    limit: int = Field(default=20, ge=1, le=100, description="The entries at most.")


class FilesQuery(Parameters):
    """A part of the list of files."""

    purpose: Literal["batch", "batch_output"] | None = Field(
        default=None, description="The files with this purpose."
    )
    order: Literal["asc", "desc"] = Field(default="desc", description="By the time of creation.")
    after: str | None = Field(default=None, description="The entries after that with this id.")
    limit: int = Field(default=10_000, ge=1, le=10_000, description="The entries at most.")


class FilePath(Parameters):
    """The place of a file."""

    id: str = Field(description="The id of the file.", examples=["file-0123456789abcdef01234567"])


class BatchPath(Parameters):
    """The place of a batch."""

    id: str = Field(description="The id of the batch.", examples=["batch_0123456789abcdef01234567"])


class DeletedFile(TypedDict):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileList(TypedDict):
    """Files, the latest first."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RequestCounts(TypedDict):
    """The numbers of a batch's requests."""

    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: Annotated[
        dict[str, Any] | None, Field(description="The lines that are malformed, up to 20.")
    ]
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: Annotated[str | None, Field(description="Responses with the status 200.")]
    error_file_id: Annotated[
        str | None, Field(description="Other responses, and requests without one.")
    ]
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    expires_at: int
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    owner: NotRequired[Owner]


class BatchList(TypedDict):
    """Batches, the latest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


_FILE, _BATCH = "/v1/files/{id}", "/v1/batches/{id}"
UPLOAD = Operation(
    "POST",
    "/v1/files",
    INFER,
    BATCH,
    "uploadFile",
    "Upload the requests of a batch.",
    (Answer("The file.", FileObject),),
    limit=None,
    form=FileForm,
    refusals=(413, 429, 503, 507),
)
LIST_FILES = Operation(
    "GET",
    "/v1/files",
    INFER,
    BATCH,
    "listFiles",
    "List the files of this token, the latest first; those of all for an administrator.",
    (Answer("The files.", FileList),),
    query=FilesQuery,
    refusals=(404, 503),
)
SHOW_FILE = Operation(
    "GET",
    _FILE,
    INFER,
    BATCH,
    "showFile",
    "Describe a file.",
    (Answer("The file.", FileObject),),
    path_fields=FilePath,
    refusals=(404, 503),
)
DELETE_FILE = Operation(
    "DELETE",
    _FILE,
    INFER,
    BATCH,
    "deleteFile",
    "Delete a file that no running batch needs, or a record that cannot be read.",
    (Answer("The file is deleted.", DeletedFile),),
    path_fields=FilePath,
    refusals=(404, 409, 503),
)
READ_FILE = Operation(
    "GET",
    f"{_FILE}/content",
    INFER,
    BATCH,
    "readFile",
    "Download a file.",
    (Answer("The bytes.", media=("application/octet-stream",)),),
    path_fields=FilePath,
    refusals=(404, 503),
    has_head=False,
)
CREATE_BATCH = Operation(
    "POST",
    "/v1/batches",
    INFER,
    BATCH,
    "createBatch",
    "Begin a batch.",
    (
        Answer(
            "The batch, whose requests are checked before the first is sent.",
            BatchObject,
        ),
    ),
    body=BatchBody,
    query=StrictQuery,
    refusals=(404, 413, 429, 503, 507),
)
LIST_BATCHES = Operation(
    "GET",
    "/v1/batches",
    INFER,
    BATCH,
    "listBatches",
    "List the batches of this token, the latest first; those of all for an administrator.",
    (Answer("The batches.", BatchList),),
    query=BatchesQuery,
    refusals=(404, 503),
)
SHOW_BATCH = Operation(
    "GET",
    _BATCH,
    INFER,
    BATCH,
    "showBatch",
    "Describe a batch.",
    (Answer("The batch.", BatchObject),),
    path_fields=BatchPath,
    refusals=(404, 503),
)
CANCEL_BATCH = Operation(
    "POST",
    f"{_BATCH}/cancel",
    INFER,
    BATCH,
    "cancelBatch",
    "Cancel a batch; what was answered is kept.",
    (Answer("The batch.", BatchObject),),
    path_fields=BatchPath,
    refusals=(404, 409, 503, 507),
)
