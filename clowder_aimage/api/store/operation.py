"""The operations on a store: its content, referrers, adapters, and jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.request_body import Parameters
from clowder_aimage.http.operation import STORE, Answer, Operation
from clowder_aimage.http.route import INFER


class MissingBlobs(TypedDict):
    """The blobs that the store lacks."""

    blobs: int
    size: int


class StoredManifest(TypedDict):
    """A manifest in the store with its names."""

    names: list[str]
    digest: str
    size: Annotated[int, Field(description="Bytes of all blobs that it needs and the store has.")]
    unique: Annotated[
        int,
        Field(description="Bytes that nothing else needs: removing its names frees them."),
    ]
    shared: Annotated[int, Field(description="size - unique.")]
    missing: MissingBlobs
    kind: Annotated[
        str,
        Field(description="`image`, `text`, `embedder`, `adapter`, `controlnet` or `other`."),
    ]
    family: str | None
    precision: Annotated[Any, Field(description="The type of its weights, such as `int8`.")]
    defaults: Annotated[Any, Field(description="Its defaults for requests.")]
    subject: Annotated[str | None, Field(description="The digest of the AImage that it is about.")]


class DiskFacts(TypedDict):
    """The disk, in bytes."""

    store: Annotated[int, Field(description="All blobs.")]
    unneeded: Annotated[int, Field(description="Blobs that no name needs.")]
    unfinished: Annotated[int, Field(description="Unfinished downloads.")]
    free: Annotated[int | None, Field(description="`null` if the file system does not report it.")]
    total: Annotated[int | None, Field(description="The file system.")]


class MemoryFacts(TypedDict):
    """The memory, in bytes."""

    budget: Annotated[int | None, Field(description="For all models.")]
    available: Annotated[int | None, Field(description="Available to a new process.")]
    used: Annotated[int, Field(description="The models in memory.")]
    planned: Annotated[int, Field(description="The blobs of models that are being loaded.")]
    models: Annotated[
        int | None,
        Field(description="The largest number of models in memory; `null` if memory is the limit."),
    ]


class StoreFacts(TypedDict):
    """The content of the store, the disk and the memory."""

    object: Literal["store"]
    data: list[StoredManifest]
    disk: DiskFacts
    memory: MemoryFacts


class Referrer(TypedDict):
    """An artifact whose subject is an AImage."""

    name: Annotated[
        str | None, Field(description="Its name in the store; null if only the registry has it.")
    ]
    digest: str
    kind: Annotated[
        str,
        Field(
            description="`pictures`, `signature`, `sbom`, `attestation`, `variant`, `adapter`, "
            "`controlnet`, `aimage` (an AImage of a registry), or another word."
        ),
    ]
    artifact_type: str | None
    size: int
    annotations: dict[str, str]


class Referrers(TypedDict):
    """The referrers of an AImage."""

    object: Literal["list"]
    subject: str
    data: list[Referrer]


class AdapterFacts(TypedDict):
    """An adapter in the store, or in the directory of adapters."""

    id: Annotated[str, Field(description="Its name in `loras`.")]
    group: Annotated[
        str, Field(description="The directory of a file, or of the repository; may be empty.")
    ]
    triggers: list[str]
    title: str | None
    weight: Annotated[float | None, Field(description="The strength that it recommends.")]
    type: str | None
    rank: int | None
    base: str | None
    suitable: Annotated[
        bool | None, Field(description="Whether it fits the model; null if that is not known.")
    ]
    reason: Annotated[str | None, Field(description="Why it does not fit.")]


class Adapters(TypedDict):
    """The adapters."""

    object: Literal["list"]
    data: list[AdapterFacts]


_Name = Annotated[str, Field(description="The name of an AImage in the store.", examples=["tiny"])]


class ReferrersQuery(Parameters):
    """An AImage, and the places to search for its referrers."""

    model: _Name
    registry: Literal["true", "false"] = Field(
        default="false",
        description="Whether the registry of the name is asked too, which needs the scope admin.",
    )


class AdaptersQuery(Parameters):
    """The AImage that adapters may suit."""

    model: _Name | None = None


DESCRIBE = Operation(
    "GET",
    "/v1/store",
    INFER,
    STORE,
    "describeStore",
    "Describe the content of the store, the disk and the memory.",
    (Answer("The store.", StoreFacts),),
    refusals=(503,),
)
REFERRERS = Operation(
    "GET",
    "/v1/referrers",
    INFER,
    STORE,
    "listReferrers",
    "List the artifacts whose subject is an AImage.",
    (Answer("The referrers.", Referrers),),
    query=ReferrersQuery,
    refusals=(404, 502, 503),
)
ADAPTERS = Operation(
    "GET",
    "/v1/adapters",
    INFER,
    STORE,
    "listAdapters",
    "List the adapters, and whether they suit a model.",
    (Answer("The adapters.", Adapters),),
    query=AdaptersQuery,
    refusals=(404, 503),
)
