"""OpenAI's images API: ``POST /v1/images/generations``, ``/v1/models``, and links to pictures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from aiohttp import web

from clowder_aimage.dialect import AImage
from clowder_aimage.errors import AImageError, FormatError, ModelError, NotFoundError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.worker import error as fault
from clowder_aimage.worker.api import link, sse
from clowder_aimage.worker.api.image_request import ImageRequest, read_request, wrong
from clowder_aimage.worker.api.openai_model import Models, is_runnable, read_model, unknown_model
from clowder_aimage.worker.api.openai_stream import (
    Keep,
    Telling,
    choose,
    entry,
    quality,
    telling,
    usage,
)
from clowder_aimage.worker.engine import ALWAYS, IF_MISSING, NEVER, Job
from clowder_aimage.worker.error import ApiError
from clowder_aimage.worker.event import Event, Picture
from clowder_aimage.worker.route import ADMIN, INFER, OPEN, Route
from clowder_aimage.worker.service import Service

# What the pipeline calls its fields, and clients theirs
_PARAMS = {"width": "size", "height": "size", "negative": "negative_prompt"}
_FIELDS = {"steps", "seed", "guidance", "n", "prompt"}
_MOST_IGNORED = 20  # names in a header

_log = logging.getLogger(__name__)


def routes(service: Service) -> list[Route]:
    """What OpenAI's clients ask for."""
    images, models = Images(service), Models(service)

    async def list_models(_: web.Request) -> web.StreamResponse:
        data = await asyncio.to_thread(models.all)
        return web.json_response({"object": "list", "data": data})

    async def get_model(request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        return web.json_response(await asyncio.to_thread(models.one, name))

    return [
        Route("POST", "/v1/images/generations", images.generate, INFER),
        Route("GET", "/v1/models", list_models, INFER),
        Route("GET", "/v1/models/{id:.+}", get_model, INFER),
        Route("GET", link.PATH + "{name}", images.fetch, OPEN),  # its signature says who may
    ]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The AImage that a request means, if it is here, and whether it may be fetched."""

    reference: Reference
    aimage: AImage | None
    pull: str


class Images:
    """Makes pictures, and hands out those that are kept."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pictures = link.Pictures()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer with pictures, in one piece or as they come."""
        strict = request.query.get("strict", "") in ("1", "true")
        wish = read_request(await request.read(), strict=strict)
        chosen = await self._choose(wish, may_pull=request.get("scope") == ADMIN)
        request["model"] = chosen.reference
        headers = _headers(wish, chosen.reference)
        if not wish.is_stream:
            return await self._whole(request, wish, self._made(wish, chosen, 0), headers)
        dialect = choose(wish, request.headers)
        said = telling(dialect, wish, self._keeper(request, wish))
        previews = (wish.partial_images or 0) if dialect.startswith("openai") else 0
        return await _streamed(request, said, self._made(wish, chosen, previews), headers)

    async def fetch(self, request: web.Request) -> web.StreamResponse:
        """A picture that is kept, by the link to it."""
        query = request.query
        name, expires = request.match_info["name"], query.get("expires", "")
        try:
            kept = self._pictures.find(name, expires, query.get("signature", ""))
        except link.ExpiredError as error:
            raise ApiError(410, f"{error}; {error.hint}", code="picture_expired") from None
        except NotFoundError as error:
            raise ApiError(404, f"{error}; {error.hint}", code="picture_not_found") from None
        left = max(0, kept.expires - int(time.time()))
        headers = {
            "Cache-Control": f"private, max-age={left}, immutable",
            "Content-Security-Policy": "default-src 'none'; sandbox",
        }
        return web.Response(body=kept.data, content_type=kept.media_type, headers=headers)

    async def _choose(self, wish: ImageRequest, *, may_pull: bool) -> Chosen:
        """What is to make the pictures. What is not here, and may or can not be fetched, is the
        worker's default, if it has one.

        Raises:
            ApiError: there is no such model, or it makes no pictures.
        """
        pull = wish.pull if may_pull else NEVER
        reference = self._meant(wish.model)
        aimage = await self._read(reference) if reference else None
        if aimage is None and not (reference and reference.registry and pull != NEVER):
            if self._service.default is None:
                raise unknown_model(wish.model or "")
            reference = self._service.reference(None)
            aimage = await self._read(reference)
            if aimage is None and not (reference.registry and pull != NEVER):
                raise unknown_model(wish.model or str(reference))
        assert reference is not None  # noqa: S101 - it is the default at least
        if reference.registry is None and pull == ALWAYS:
            pull = IF_MISSING
        return Chosen(reference, aimage, pull)

    def _meant(self, name: str | None) -> Reference | None:
        """The AImage by that name; None for what cannot be one. Raises ApiError."""
        try:
            return self._service.reference(name)
        except UsageError as error:
            if name:
                return None
            code = "missing_required_parameter"
            raise ApiError(400, error.message, code=code, param="model") from None

    async def _read(self, reference: Reference) -> AImage | None:
        try:
            stored = await asyncio.to_thread(read_model, self._service.store, reference)
        except NotFoundError:
            return None
        except FormatError:
            raise _no_pictures(reference) from None
        return stored.aimage

    async def _made(
        self, wish: ImageRequest, chosen: Chosen, previews: int
    ) -> AsyncGenerator[Event, None]:
        """Events until all pictures are made. An AImage that is not here is fetched first: it says
        how many steps a preset means."""
        engine, reference = self._service.engine, chosen.reference
        aimage, pull = chosen.aimage, chosen.pull
        if aimage is None or pull == ALWAYS:
            async with contextlib.aclosing(engine.pull(reference)) as moved:
                async for event in moved:
                    yield event
            aimage, pull = await self._read(reference), IF_MISSING
            if aimage is None:
                raise unknown_model(str(reference))
        if not is_runnable(aimage):
            raise _no_pictures(reference)
        wishes = wish.wishes(aimage)
        job = Job(reference, wish.prompt, wishes, wish.encoding, previews=previews, pull=pull)
        async with contextlib.aclosing(engine.generate(job)) as made:
            async for done in made:
                yield done

    async def _whole(
        self,
        request: web.Request,
        wish: ImageRequest,
        events: AsyncGenerator[Event, None],
        headers: dict[str, str],
    ) -> web.StreamResponse:
        """All pictures in one answer; none are made for a client that has left."""
        pictures: list[Picture] = []
        try:
            async with contextlib.aclosing(sse.ticking(events)) as coming:
                async for event in coming:
                    if sse.is_gone(request):
                        raise ConnectionResetError("the client has left")
                    if isinstance(event, Picture):
                        pictures.append(event)
        except AImageError as error:
            raise _meant(error) from None
        if len(pictures) < wish.n:
            raise ModelError(f"the model made {len(pictures)} of {wish.n} pictures")
        keep = self._keeper(request, wish)
        body = await asyncio.to_thread(json.dumps, _answer(wish, pictures, keep))
        return web.Response(text=body, content_type="application/json", headers=headers)

    def _keeper(self, request: web.Request, wish: ImageRequest) -> Keep:
        """Keeps a picture, and says at which address of this host it is."""
        base = f"{request.scheme}://{request.host}"
        loop = asyncio.get_running_loop()

        def keep(picture: Picture) -> str:
            loop.call_later(link.LIFETIME + 1, self._pictures.purge)
            return base + self._pictures.keep(picture.data, wish.output_format)

        return keep


def _no_pictures(reference: Reference) -> ApiError:
    return wrong("model", f"{reference} makes no pictures", "model_not_supported")


def _answer(wish: ImageRequest, pictures: list[Picture], keep: Keep) -> dict[str, Any]:
    """What OpenAI's ``ImagesResponse`` has."""
    preset = quality(wish)
    first = pictures[0]
    return {
        "created": int(time.time()),
        "data": [entry(picture, wish, keep) for picture in pictures],
        "background": "opaque",
        "output_format": wish.output_format,
        "quality": "medium" if preset == "auto" else preset,
        "size": f"{first.width}x{first.height}",
        "usage": usage(),
    }


def _headers(wish: ImageRequest, reference: Reference) -> dict[str, str]:
    """What an answer says beside its body: the seed, which model, and fields without meaning."""
    headers = {"X-Aimage-Seed": str(wish.seed), "X-Aimage-Model": str(reference)}
    if wish.ignored:
        names = [quote(name[:60].encode("utf-8", "replace"), safe="") for name in wish.ignored]
        headers["X-Aimage-Ignored"] = ", ".join(names[:_MOST_IGNORED])
    return headers


async def _streamed(
    request: web.Request,
    said: Telling,
    events: AsyncGenerator[Event, None],
    headers: dict[str, str],
) -> web.StreamResponse:
    """Tell of events as they come. What is refused at once has a status of its own; an error after
    that is an event. A client that leaves ends the work."""
    async with contextlib.aclosing(sse.ticking(events)) as coming:
        try:
            first = await anext(coming)
        except AImageError as error:
            raise _meant(error) from None
        stream = sse.Stream(request, headers)
        await stream.open()
        await _forward(stream, said, first, coming, request)
        return await stream.close()


async def _forward(
    stream: sse.Stream,
    said: Telling,
    event: Event | None,
    coming: AsyncGenerator[Event | None, None],
    request: web.Request,
) -> None:
    try:
        while True:
            if event is None:
                await stream.keep_alive()
            else:
                await stream.send(*said.frames(event))
            event = await anext(coming)
    except StopAsyncIteration:
        await stream.send(*said.end())
    except ConnectionError:
        raise
    except Exception as error:
        await stream.send(sse.frame("error", _fault(request, error)))


def _fault(request: web.Request, error: Exception) -> str:
    """The error as an event's data."""
    if not isinstance(error, AImageError):
        _log.error("a stream failed: %s", type(error).__name__)  # its text may hold a prompt
        error = ApiError(500, "the worker failed; its log says at what", code="internal_error")
    found = fault.api_error(_meant(error))
    if found.status >= 500:
        _log.warning("failed: %s", found.message)
    return fault.response(request, found).text or ""


def _meant(error: AImageError) -> AImageError:
    """The error, with the field that the pipeline refused."""
    if not isinstance(error, UsageError):
        return error
    word = error.message.partition(" ")[0]
    param = _PARAMS.get(word) or (word if word in _FIELDS else None)
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    return ApiError(400, message, code="invalid_value", param=param)
