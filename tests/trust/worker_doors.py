"""The doors of a worker: its routes, by which models are listed, described, used and moved."""

from __future__ import annotations

import base64
import itertools
import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.trust.world import Outcome, World
from tests.worker.conftest import LocalWorker, answer_to

_numbers = itertools.count()
Body = Callable[[World], Any]
_UPLOAD = "multipart/form-data; boundary=part"


@dataclass(frozen=True)
class Route:
    """A route of a worker as a door, by the method and the path in the table.

    ``is_list``: it lists models, or hides one that is refused. ``then`` is the route that shows
    what came of it. ``reaches`` is in the text of what has passed the policy, and fails afterwards.
    ``pulls``: the store lacks the model.
    """

    route: str
    body: Body | None = None
    reaches: str = ""
    path: Callable[[World], str] | None = None
    pulls: bool = False
    is_list: bool = False
    then: Route | None = None

    def attempt(self, world: World, worker: LocalWorker) -> Outcome:
        """Try the route. A model that is not found, or not listed, is refused."""
        method, _, path = self.route.partition(" ")
        path = path if self.path is None else self.path(world)
        if self.body is None:
            outcome = send(worker, method, path)
        elif isinstance(body := self.body(world), bytes):
            outcome = send(worker, method, path, body, _UPLOAD)
        else:
            outcome = send(worker, method, path, json.dumps(body).encode())
        if self.is_list and (outcome.code == -404 or world.name not in outcome.text):
            return Outcome(-403, outcome.text)
        return outcome if self.then is None else self.then.attempt(world, worker)

    def passes(self, outcome: Outcome) -> bool:
        if self.reaches:
            return self.reaches in outcome.text
        return -300 < outcome.code <= -200


def send(
    worker: LocalWorker, method: str, path: str, body: bytes | None = None, kind: str = ""
) -> Outcome:
    headers = {"Content-Type": kind or "application/json"} if body is not None else {}
    request = urllib.request.Request(worker.url + path, body, headers, method=method)
    status, _, data = answer_to(request)
    text = data.decode("utf-8", "replace")
    # An error in a stream has a status of its own
    return Outcome(-403 if "signature_required" in text else -status, text)


def _named(**fields: Any) -> Body:
    return lambda world: {"model": world.name, **fields}


def _form(**fields: str) -> Body:
    """Return the body of an upload, with a picture."""

    def build(world: World) -> bytes:
        parts = b""
        for name, text in {"model": world.name, **fields}.items():
            head = f'--part\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
            parts += head.encode() + text.encode() + b"\r\n"
        head = '--part\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n'
        head += "Content-Type: image/png\r\n\r\n"
        return parts + head.encode() + world.picture.read_bytes() + b"\r\n--part--\r\n"

    return build


def _content_path(world: World) -> str:
    url = base64.urlsafe_b64encode(f"oci://{world.name}".encode()).decode()
    return f"/content/{url}"


def _with(field: str) -> Body:
    """Return a request to another model, which uses the one of the world in a field."""

    def build(world: World) -> dict[str, object]:
        body: dict[str, object] = {"model": "base", "prompt": "a", field: world.name}
        if field == "loras":
            body[field] = [{"model": world.name}]
        elif field == "controlnet":
            body["control"] = base64.b64encode(world.picture.read_bytes()).decode()
        return body

    return build


_MESSAGES = [{"role": "user", "content": "a"}]
_NO_TEXT = "generates pictures"
_NO_RUN = "missing tensors"

ROUTES = [
    Route("GET /api/tags", is_list=True),
    Route("GET /v1/models", is_list=True),
    Route("GET /v1/models/{id}", path=lambda world: f"/v1/models/{world.name}", is_list=True),
    Route("GET /content/", is_list=True),
    Route("GET /content/{url}", path=_content_path),
    Route("POST /api/show", _named()),
    Route(
        "POST /api/copy",
        lambda world: {"source": world.name, "destination": "open/copied:v1"},
        then=Route("POST /api/show", lambda _: {"model": "open/copied:v1"}),
    ),
    Route("POST /api/push", _named(stream=False)),
    Route("POST /api/chat", _named(messages=_MESSAGES, stream=False), _NO_TEXT),
    Route("POST /api/generate", _named(prompt="a", stream=False), _NO_RUN),
    Route("POST /api/embed", _named(input="a"), _NO_TEXT),
    Route("POST /api/embeddings", _named(prompt="a"), _NO_TEXT),
    Route("POST /v1/chat/completions", _named(messages=_MESSAGES), _NO_TEXT),
    Route("POST /v1/completions", _named(prompt="a"), _NO_TEXT),
    Route("POST /v1/embeddings", _named(input="a"), _NO_TEXT),
    Route("POST /v1/images/generations", _named(prompt="a"), _NO_RUN),
    Route("POST /v1/images/edits", _form(prompt="a"), _NO_RUN),
    Route("POST /v1/images/variations", _form(), _NO_RUN),
    Route("POST /v1/images/generations", _with("loras"), "is not an adapter"),
    Route("POST /v1/images/generations", _with("controlnet"), "is not a ControlNet"),
    Route("POST /v1/images/generations", _with("enhance"), "model_not_supported"),
    Route(
        "POST /v1/jobs",
        lambda world: {
            "kind": "convert",
            "model": world.name,
            "target": f"job:{next(_numbers)}",
            "dtype": "f16",
        },
    ),
    Route("POST /api/pull", _named(stream=False), pulls=True),
    Route("POST /content/", lambda world: {"url": f"oci://{world.name}"}, pulls=True),
    Route("POST /v1/images/generations", _named(prompt="a"), _NO_RUN, pulls=True),
]
