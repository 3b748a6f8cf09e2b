"""A job: a request of the HTTP interfaces, as a gateway puts it on the queue.

The fields of the body were validated by the gateway with the code of the worker. The worker
validates them once more, as those of any client: other programs may write to the queue. The seed is
in the fields, so a second attempt gives the same picture.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.field import DigestText, Id, Line
from clowder_aimage.fleet.name import INTERACTIVE, PRIORITIES
from clowder_aimage.oci import read_json

# The most bytes of an encoded job
MAX_JOB = 192 << 20
_BYTES = "base64"


@dataclass(frozen=True, slots=True)
class FleetJob:
    """A request to a worker. Each may serve it that has, or may pull, the manifest ``digest``.

    ``asked`` is the name of the model that the client sent, ``model`` the name that the gateway
    resolved it to.
    ``scope`` is that of the client's token, ``caller`` an opaque name of the client. ``fields`` are
    those of the body, of a form as texts, bytes of files, or lists of them; None without a body.
    ``timeout`` is in seconds.
    ``size`` is the number of bytes of the encoded job, before that of the request's body.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    id: Id
    path: Annotated[str, Field(pattern="^/", max_length=1 << 16)]
    scope: Line
    caller: Line
    asked: Annotated[str, Field(max_length=1 << 16)]
    model: Annotated[str, Field(max_length=1024)]
    digest: DigestText | Literal[""]
    method: Annotated[str, Field(pattern="^[A-Z]{1,16}$")] = "POST"
    priority: Annotated[str, Field(pattern=f"^(?:{'|'.join(PRIORITIES)})$")] = INTERACTIVE
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] | None = None
    is_form: Annotated[bool, Field(strict=True)] = False
    timeout: Annotated[float, Field(strict=True, ge=0)] | None = None
    size: int = field(default=0, compare=False)

    def encode(self) -> bytes:
        """Return the job as JSON."""
        values = asdict(self)
        del values["size"]
        if self.is_form and self.fields is not None:
            values["fields"] = {name: _encode_field(value) for name, value in self.fields.items()}
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> FleetJob:
        """Return the job in JSON. Raises FormatError."""
        values = read_json(raw, "the job", MAX_JOB)
        try:
            job = _JOB.validate_python({**values, "size": len(raw)})
            if job.is_form and job.fields is not None:
                job = replace(
                    job,
                    fields={
                        key: _decode_field(field_value) for key, field_value in job.fields.items()
                    },
                )
        except (LookupError, TypeError, ValueError):
            raise FormatError("the job is invalid, or was written by another version") from None
        return job

    def with_model(self, name: str) -> FleetJob:
        """Return the job with ``name`` as the model in its body; ``model`` stays."""
        return replace(self, fields={**(self.fields or {}), "model": name})


_JOB = TypeAdapter(FleetJob)


def _encode_field(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    return [_encode_field(element) for element in value] if isinstance(value, list) else value


def _decode_field(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value[_BYTES])
    return [_decode_field(element) for element in value] if isinstance(value, list) else value
