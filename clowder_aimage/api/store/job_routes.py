"""Jobs: an AImage quantized, or with adapters fused into its weights, as another AImage."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from clowder_aimage.api.picture.lora_field import PromptedLoras
from clowder_aimage.api.request_body import build_field_error, read_body
from clowder_aimage.api.service import Service
from clowder_aimage.api.store import job_operation
from clowder_aimage.api.store.job_operation import JobFacts, JobRequest
from clowder_aimage.engine.executor import run_io
from clowder_aimage.engine.job_queue import CONVERT, FUSE, Job
from clowder_aimage.errors import UsageError
from clowder_aimage.http.api_error import ApiError, convert_error
from clowder_aimage.http.route import Route, serve
from clowder_aimage.importer import Recipe
from clowder_aimage.importer.recipe import AUTO
from clowder_aimage.layout.snapshot import find_descriptor
from clowder_aimage.layout.stored_aimage import admit
from clowder_aimage.oci import Reference


def build_routes(service: Service) -> list[Route]:
    """Return the routes of jobs."""
    jobs = JobRoutes(service)
    return [
        serve(job_operation.LIST_JOBS, jobs.list_all),
        serve(job_operation.ADD_JOB, jobs.add),
        serve(job_operation.SHOW_JOB, jobs.show),
        serve(job_operation.CANCEL_JOB, jobs.cancel),
    ]


class JobRoutes:
    """The handlers for one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list_all(self, _: web.Request) -> web.StreamResponse:
        data = [_describe(job) for job in self._service.jobs.list_jobs()]
        return web.json_response({"object": "list", "data": data})

    async def add(self, request: web.Request) -> web.StreamResponse:
        """Queue a job, and respond with it (202)."""
        service, body = self._service, await read_body(request, JobRequest)
        model, target = service.resolve_reference(body.model), Reference.parse(body.target)
        options = _parse_recipe(body) if body.kind == CONVERT else await self._resolve_loras(body)
        descriptor = await run_io(find_descriptor, service.store, model)
        if descriptor is None:
            raise ApiError(404, f"model {model} not found", code="model_not_found", param="model")
        is_taken = await run_io(find_descriptor, service.store, target) is not None
        if is_taken or service.jobs.is_target(target):
            message = f"{target} exists already, or a job makes it; use another name, or delete it"
            raise ApiError(409, message, code="name_taken", param="target")
        await run_io(admit, service.store, descriptor, model)
        # The name may move
        options["model"] = str(model.with_digest(descriptor.digest))
        job = service.jobs.add(body.kind, model, target, options)
        headers = {"Location": f"/v1/jobs/{job.id}"}
        return web.json_response(_describe(job), status=202, headers=headers)

    async def show(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_describe(self._of(request)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """End a job, or forget one that is over."""
        job = self._of(request)
        await self._service.jobs.cancel(job)
        return web.json_response(_describe(job))

    def _of(self, request: web.Request) -> Job:
        number = request.match_info["id"]
        if (job := self._service.jobs.get(number)) is None:
            message = f"job {number[:40]!a} is not known; jobs end when the worker restarts"
            raise ApiError(404, message, code="job_not_found")
        return job

    async def _resolve_loras(self, body: JobRequest) -> dict[str, Any]:
        """Return the adapters of a job with the names of AImages. Raises ApiError."""
        if body.dtype or body.quantize or body.group_size or body.attach:
            raise build_field_error(
                "loras", "cannot be combined with a conversion: convert the fused AImage"
            )
        if not body.loras:
            raise ApiError(400, "missing loras", code="missing_required_parameter", param="loras")
        uses = PromptedLoras.of("", body.loras, has_words=False)
        names = await uses.resolve_references(self._service)
        loras = [
            asdict(use) | ({"model": str(names[index])} if index in names else {})
            for index, use in enumerate(uses.uses)
        ]
        return {"loras": loras}


def _parse_recipe(body: JobRequest) -> dict[str, Any]:
    """Return the conversion of a request. Raises ApiError."""
    if body.loras:
        raise build_field_error("loras", f"needs the kind {FUSE}")
    fields = {"dtype": body.dtype, "quantize": body.quantize, "group_size": body.group_size}
    param = "dtype" if body.quantize is None else "quantize"
    try:
        recipe = Recipe.parse(body.dtype, body.quantize, body.group_size)
    except UsageError as error:
        raise build_field_error(param, f"is not possible: {error.message}") from None
    if not recipe.changes:
        message = "missing quantize, or dtype"
        raise ApiError(400, message, code="missing_required_parameter", param="quantize")
    if body.attach and recipe.precision in (None, AUTO):
        raise build_field_error("attach", "needs a quantize, or a dtype other than auto")
    recipe.check_tools()
    return {"recipe": fields, "attach": body.attach}


def _describe(job: Job) -> JobFacts:
    error = None if job.error is None else convert_error(job.error)
    return {
        "id": job.id,
        "object": "job",
        "kind": job.kind,
        "model": str(job.model),
        "target": str(job.target),
        "status": job.status,
        "stage": job.stage or None,
        "completed": job.completed,
        "total": job.total,
        "created": _format_time(job.created),
        "started": _format_time(job.started),
        "ended": _format_time(job.ended),
        "result": job.result or None,
        "error": None if error is None else {"message": error.message, "code": error.code},
    }


def _format_time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
