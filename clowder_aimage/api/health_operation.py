"""The operations of health, events, and the description of a server."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.request_body import Parameters
from clowder_aimage.http.operation import HEALTH, PAGE, Answer, Operation
from clowder_aimage.http.route import INFER, OPEN


class Alive(TypedDict):
    """A server that runs."""

    status: Literal["ok"]


class Reason(TypedDict):
    """A reason against the readiness of a server."""

    reason: str
    model: NotRequired[Annotated[str, Field(description="Only in a response to a known token.")]]
    detail: NotRequired[Annotated[str, Field(description="Only in a response to a known token.")]]


class Readiness(TypedDict):
    """The readiness of a server, and the reasons against it."""

    status: Literal["ok", "unavailable"]
    reasons: list[Reason]
    warnings: NotRequired[
        Annotated[list[str], Field(description="Problems that do not affect it.")]
    ]


class ModelBatch(TypedDict):
    """The pictures of a loaded model that are computed at once."""

    model: str
    limits: Annotated[
        list[tuple[int, int]],
        Field(
            description="The most forward passes at once, by the pixels of a picture; one for "
            "larger pictures. A picture with guidance has two in each step."
        ),
    ]
    requests: Annotated[int, Field(description="The requests that are computed now.")]


class WorkerFacts(TypedDict):
    """A server, and the scope of the request's token."""

    version: str
    scope: Literal["admin", "infer", "node"] | None
    default_model: NotRequired[str | None]
    enhancer: NotRequired[str | None]
    batches: NotRequired[list[ModelBatch]]
    fleet: NotRequired[Annotated[str, Field(description="The fleet of a gateway.")]]


class EventHeaders(Parameters):
    """The headers of a request for events."""

    last_event: str | None = Field(
        default=None, alias="Last-Event-ID", description="Resume after this event."
    )


ALIVE = Operation(
    "GET",
    "/healthz",
    OPEN,
    HEALTH,
    "alive",
    "Check that the server is running.",
    (Answer("The server is running.", Alive),),
)
READY = Operation(
    "GET",
    "/readyz",
    OPEN,
    HEALTH,
    "ready",
    "Check that the server is ready for requests.",
    (
        Answer("The server is ready.", Readiness),
        Answer(
            "The server is not ready, with the reasons. Without a token, models are not named.",
            Readiness,
            503,
            headers={"Retry-After": "Seconds."},
        ),
    ),
)
WORKER = Operation(
    "GET",
    "/v1/worker",
    OPEN,
    HEALTH,
    "worker",
    "Show what the token of the request allows.",
    (Answer("The version, and the scope of the token.", WorkerFacts),),
    details="`default_model`, `enhancer`, `batches` and `fleet` are only in responses to requests "
    "with a known token, or if the server requires none.",
)
EVENTS = Operation(
    "GET",
    "/v1/events",
    INFER,
    HEALTH,
    "events",
    "Stream events.",
    (
        Answer(
            "Server-sent events, each with an id, a type and JSON data.",
            media=("text/event-stream",),
        ),
    ),
    headers=EventHeaders,
    refusals=(400,),
)
DESCRIBE = Operation(
    "GET",
    "/openapi.json",
    OPEN,
    HEALTH,
    "describe",
    "Get this description.",
    (Answer("OpenAPI 3.1.", dict[str, object]),),
)
SHOW = Operation(
    "GET",
    "/docs",
    OPEN,
    HEALTH,
    "describePage",
    "Get this description as a page.",
    (Answer("The page, without scripts.", media=("text/html",)),),
)
HELLO = Operation(
    "GET",
    "/",
    OPEN,
    PAGE,
    "hello",
    "Check that the server is running, or show the page to a browser.",
    (Answer("A short text, or the page.", media=("text/plain", "text/html")),),
    details="A request whose `Accept` has `text/html` gets the page, unless the server has none.",
)
