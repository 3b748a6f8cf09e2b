"""The worker as a role of a server: its routes, background work and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cached_property

from clowder_aimage.api import health, page
from clowder_aimage.api.batch.run import BatchRunner
from clowder_aimage.api.batch.store import DirectoryBatchStore
from clowder_aimage.api.missing_model import find_missing
from clowder_aimage.api.ollama import routes as ollama_routes
from clowder_aimage.api.openapi import build_description_routes
from clowder_aimage.api.service import Service
from clowder_aimage.api.store import routes as store_routes
from clowder_aimage.api.store import storage
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.executor import run_io
from clowder_aimage.engine.model_fetch import preload
from clowder_aimage.errors import AImageError
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.caller_ledger import CallerBounds, CallerLedger
from clowder_aimage.http.index_writer import writing_index
from clowder_aimage.http.local_call import LocalCalls
from clowder_aimage.http.route import Exchange, Role, Route

# Requests of a batch at the same time
_BATCH = 4
# Seconds between two checks for idle models
EXPIRY = 1.0

_log = logging.getLogger("aimage.worker")


class WorkerRole(Role):
    """The interfaces over a service; a node has none that generate pictures."""

    def __init__(
        self,
        service: Service,
        *,
        makes_pictures: bool = True,
        advice: Callable[[AImageError], str | None] | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._service = service
        self._makes_pictures = makes_pictures
        self.calls = LocalCalls(self, advice)
        settings = service.settings
        self._store = DirectoryBatchStore(service.store.root, settings.reserve)
        self._ledger = CallerLedger(CallerBounds.of(settings))
        # Less than the queue, so that other requests have their turn
        at_once = max(1, min(_BATCH, settings.queue))
        self._batches = BatchRunner(
            self._store, self.calls, lambda: at_once, tokens=tokens, ledger=self._ledger
        )

    @property
    def is_draining(self) -> bool:
        return self._service.engine.is_draining

    @property
    def ledger(self) -> CallerLedger:
        return self._ledger

    def build_routes(self) -> list[Route]:
        return self._routes

    @cached_property
    def _routes(self) -> list[Route]:
        """The routes, made once: uploads and links are those of all requests."""
        service = self._service
        common = (
            health.build_routes(service, service.settings.reserve if self._makes_pictures else 0)
            + ollama_routes.build_routes(service)
            + storage.build_routes(service)
        )
        common += page.build_routes(is_shown=self._makes_pictures and service.settings.page)
        common += store_routes.build_routes(service)
        common += build_description_routes("worker" if self._makes_pictures else "node")
        if not self._makes_pictures:
            return common
        # Imported here, as only a worker needs these modules: nodes start faster
        from clowder_aimage.api.batch.routes import BatchRoutes
        from clowder_aimage.api.ollama import generate as ollama_generate
        from clowder_aimage.api.ollama import text as ollama_text
        from clowder_aimage.api.openai import image as openai
        from clowder_aimage.api.openai.text import TextRoutes
        from clowder_aimage.api.picture.upload import PictureUploads
        from clowder_aimage.api.store import adapter_list, job_routes

        uploads = PictureUploads(service)
        common += BatchRoutes(self._batches).build_routes()
        common += ollama_generate.build_routes(uploads) + ollama_text.build_routes(service)
        common += adapter_list.build_routes(service) + job_routes.build_routes(service)
        return [
            *openai.build_routes(service, uploads),
            *TextRoutes(service).build_routes(),
            *common,
        ]

    def count(self, exchange: Exchange) -> None:
        self._service.metrics.requests.labels(exchange.route, str(exchange.status)).inc()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        service = self._service
        fetching = preload(service.store, service.transfers, service.wanted)
        work = [self._expire(), fetching]
        if self._makes_pictures:
            await self._report_missing()
            work.append(self._batches.run())
        async with writing_index(service.store), run_in_background(*work):
            yield

    async def _report_missing(self) -> None:
        """Warn of models in the settings that no request will find."""
        for model in await run_io(find_missing, self._service):
            hint = f"; did you mean {model.similar}?" if model.similar else ""
            _log.warning(f"the {model.setting} {model.name} is not in the store{hint}")

    async def list_reasons(self) -> list[dict[str, str]]:
        return await self._service.list_reasons()

    async def signal_ready(self) -> None:
        self._service.events.record("ready")

    async def drain(self, grace: float, hurry: asyncio.Event) -> None:
        self._service.events.record("drain", grace=grace)
        _log.info("draining", extra={"grace": grace, "waiting": self._service.engine.waiting})
        await self._service.jobs.close()
        await drain(self._service.engine, grace, hurry)
        self._service.events.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY)
            try:
                await self._service.engine.expire()
                self._service.transfers.count_stalls()
            except Exception:
                _log.exception("cannot unload idle models")


async def drain(engine: Engine, grace: float, hurry: asyncio.Event) -> None:
    """Refuse new work; finish running work in ``grace`` seconds, or until ``hurry`` is set."""
    closing = asyncio.create_task(engine.close(grace))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({closing, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not closing.done():
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await engine.close(0)
        return
    closing.result()
