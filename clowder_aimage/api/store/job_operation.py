"""The operations on jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from clowder_aimage.api.name_field import TagName
from clowder_aimage.api.picture.lora_field import LoraFields
from clowder_aimage.api.request_body import Parameters, RequestBody
from clowder_aimage.engine.job_queue import Status
from clowder_aimage.http.operation import STORE, Answer, Operation
from clowder_aimage.http.route import ADMIN
from clowder_aimage.importer.recipe import (
    AUTO,
    DTYPES,
    GROUP_SIZES,
    build_grouped_pattern,
    build_quantize_pattern,
)

_ABSENT: JsonDict = {name: {"type": "null"} for name in ("dtype", "quantize", "group_size")}
_FUSE: JsonDict = {
    "kind": {"const": "fuse"},
    "loras": {"type": "array", "minItems": 1},
    "attach": {"enum": [False, None]},
    **_ABSENT,
}
_CONVERT: JsonDict = {
    "kind": {"const": "convert"},
    "loras": {"type": ["array", "null"], "maxItems": 0},
}


_GROUPED: JsonDict = {
    "if": {"required": ["group_size"], "properties": {"group_size": {"type": "number"}}},
    "then": {
        "required": ["quantize"],
        "properties": {"quantize": {"type": "string", "pattern": build_grouped_pattern()}},
    },
}
_ATTACHED: JsonDict = {
    "if": {
        "required": ["attach", "dtype"],
        "properties": {"attach": {"const": True}, "dtype": {"const": AUTO}},
    },
    "then": {"required": ["quantize"], "properties": {"quantize": {"type": "string"}}},
}


class JobRequest(RequestBody):
    """The AImage to change, the name of the new one, and the change."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [_GROUPED, _ATTACHED],
            "anyOf": [
                {"required": ["loras"], "properties": _FUSE},
                {
                    "required": ["dtype"],
                    "properties": {**_CONVERT, "dtype": {"type": "string"}},
                },
                {
                    "required": ["quantize"],
                    "properties": {**_CONVERT, "quantize": {"type": "string"}},
                },
            ],
        }
    )

    kind: Literal["convert", "fuse"] = Field(
        description="`convert` needs `quantize` or `dtype`, `fuse` needs `loras`."
    )
    model: str = Field(min_length=1, max_length=1024, examples=["tiny"])
    target: TagName = Field(
        min_length=1,
        max_length=1024,
        description="The name of the new AImage, which nothing has yet.",
        examples=["tiny:int8"],
    )
    dtype: Annotated[str, Field(json_schema_extra={"enum": [*DTYPES, AUTO]})] | None = None
    quantize: str | None = Field(
        default=None,
        max_length=256,
        json_schema_extra={"pattern": f"^{build_quantize_pattern()}$"},
        description="A type, such as `int8`, for the transformer; or "
        "`transformer=int4,text_encoder=int8`.",
        examples=["int8"],
    )
    group_size: Annotated[int, Field(json_schema_extra={"enum": [*GROUP_SIZES]})] | None = None
    attach: bool = Field(default=False, description="Make the new AImage a variant of the other.")
    loras: LoraFields = Field(default_factory=list)


class JobError(TypedDict):
    """The failure of a job."""

    message: str
    code: str | None


class JobFacts(TypedDict):
    """A job."""

    id: str
    object: Literal["job"]
    kind: str
    model: Annotated[str, Field(description="The AImage that is changed.")]
    target: str
    status: Status
    stage: Annotated[
        str | None, Field(description="`reading` while values are examined, then `writing`.")
    ]
    completed: Annotated[int, Field(description="Bytes of the stage that are done.")]
    total: Annotated[int, Field(description="Bytes of the stage.")]
    created: str | None
    started: str | None
    ended: str | None
    result: Annotated[
        dict[str, Any] | None,
        Field(
            description="The `digest` and the `size` of the new AImage, the bytes that are `new` "
            "in the store, and a `remark`."
        ),
    ]
    error: JobError | None


class Jobs(TypedDict):
    """The jobs, the latest first."""

    object: Literal["list"]
    data: list[JobFacts]


class JobPath(Parameters):
    """The place of a job."""

    id: str = Field(description="The id of the job.", examples=["4f1dcf1b1d0e0123"])


LIST_JOBS = Operation(
    "GET",
    "/v1/jobs",
    ADMIN,
    STORE,
    "listJobs",
    "List the jobs, the latest first.",
    (Answer("The jobs.", Jobs),),
)
ADD_JOB = Operation(
    "POST",
    "/v1/jobs",
    ADMIN,
    STORE,
    "addJob",
    "Quantize an AImage, or fuse adapters into it.",
    (Answer("The job was queued.", JobFacts, 202, headers={"Location": "The path of the job."}),),
    body=JobRequest,
    refusals=(404, 409, 503),
)
SHOW_JOB = Operation(
    "GET",
    "/v1/jobs/{id}",
    ADMIN,
    STORE,
    "showJob",
    "Describe a job.",
    (Answer("The job.", JobFacts),),
    path_fields=JobPath,
    refusals=(404,),
)
CANCEL_JOB = Operation(
    "DELETE",
    "/v1/jobs/{id}",
    ADMIN,
    STORE,
    "cancelJob",
    "End a job, or forget one that is over.",
    (Answer("The job, which is over.", JobFacts),),
    path_fields=JobPath,
    refusals=(404,),
)
