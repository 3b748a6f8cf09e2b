"""The control network of a request: an AImage in the store, or one that the model has itself."""

from __future__ import annotations

from functools import partial

from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.model_fetch import find
from clowder_aimage.errors import AImageError, FormatError, NotFoundError, UsageError
from clowder_aimage.formats.controlnet import is_packed_with
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.http.api_error import ApiError, convert_error
from clowder_aimage.model.adapter_source import ControlSource

FIELD = "controlnet"


def find_controlnet(service: Service, request: GenerateRequest, model: AImage) -> GenerateRequest:
    """Return a request with the digest of its control network. Raises ApiError."""
    if request.control.image is None:
        return request
    if request.control.network is None:
        if is_packed_with(model):
            return request
        message = f"{FIELD} is required: this model has none of its own"
        raise ApiError(422, message, code="controlnet_required", param=FIELD)
    try:
        name = str(service.resolve_reference(request.control.network))
        source = ControlSource(service.store, partial(find, service.store))
        return request.change(controlnet=source.name(name))
    except AImageError as error:
        error.facts[FIELD] = request.control.network
        raise convert_controlnet_error(error) from None


def convert_controlnet_error(error: AImageError) -> AImageError:
    """Return the response to an error of a control network; other errors unchanged."""
    if FIELD not in error.facts or isinstance(error, ApiError):
        return error
    if isinstance(error, NotFoundError):
        error.hint = "create or pull it: requests do not fetch it"
    api_failure = convert_error(error)
    message = f"{FIELD}: {api_failure.message.encode('ascii', 'backslashreplace').decode()}"
    if isinstance(error, NotFoundError):
        return ApiError(404, message, code="controlnet_not_found", param=FIELD)
    if isinstance(error, UsageError | FormatError):
        return ApiError(400, message, code="invalid_controlnet", param=FIELD)
    return error
