"""Traces (OpenTelemetry, "Tracing API"): nothing is imported or recorded before ``start``.

Spans have no prompt, user or token, and of an error only its type.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
# opentelemetry.trace and its provider, once traces are recorded
_trace: Any = None
_provider: Any = None


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment names a collector (OpenTelemetry, "OTLP Exporter")."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off = is_off or environment.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_off and any(environment.get(name) for name in _ENDPOINTS)


def start(processor: Any = None, version: str = "", seconds: float | None = None) -> None:
    """Record spans from now on, and send them to the collector by OTLP over HTTP.

    Args:
        processor: A span processor that replaces the sender.
        version: That of the service.
        seconds: The time for sending, unless the environment has one; default: the exporter's.

    Raises ModuleNotFoundError.
    """
    global _trace, _provider
    import logging

    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    if processor is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        is_given = any(os.environ.get(name) for name in _TIMEOUTS)
        processor = BatchSpanProcessor(OTLPSpanExporter(timeout=None if is_given else seconds))
    name = os.environ.get("OTEL_SERVICE_NAME", "aimage")
    resource = Resource.create({"service.name": name, "service.version": version})
    # Only the server's log reports an unreachable collector
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor)
    _trace, _provider = trace, provider


def stop() -> None:
    """Send the remaining spans, and record no more."""
    global _trace, _provider
    provider, _trace, _provider = _provider, None, None
    if provider is not None:
        provider.shutdown()


def start_span(
    name: str, *, headers: Mapping[str, str] | None = None, **attributes: object
) -> AbstractContextManager[Any]:
    """Return the context of a span, None while nothing is recorded.

    Args:
        name: Its name, with few different values.
        headers: Of a request that a server received: ``traceparent`` is the span's parent.
        attributes: Its attributes, as ``aimage.NAME``.
    """
    return contextlib.nullcontext() if _trace is None else _start_span(name, headers, attributes)


@contextlib.contextmanager
def _start_span(
    name: str, headers: Mapping[str, str] | None, attributes: Mapping[str, object]
) -> Iterator[Any]:
    from opentelemetry import propagate

    context = None
    if headers is not None:
        context = propagate.extract({key.lower(): value for key, value in headers.items()})
    with _provider.get_tracer("clowder_aimage").start_as_current_span(
        name,
        context,
        _trace.SpanKind.INTERNAL if headers is None else _trace.SpanKind.SERVER,
        {f"aimage.{key}": value for key, value in attributes.items()},
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except BaseException as error:
            current.set_status(_trace.StatusCode.ERROR, type(error).__name__)
            raise


def record(name: str, seconds: float) -> None:
    """Record a span that began ``seconds`` ago and ends now."""
    if _trace is not None:
        tracer = _provider.get_tracer("clowder_aimage")
        tracer.start_span(name, start_time=time.time_ns() - int(seconds * 1e9)).end()


def inject(headers: MutableMapping[str, str]) -> None:
    """Add the current span to the headers of a request that is sent (W3C Trace Context)."""
    if _trace is not None:
        from opentelemetry import propagate

        propagate.inject(headers)


def bind_context(call: Callable[[], _T]) -> Callable[[], _T]:
    """Return ``call`` for another thread, with the current span as the parent."""
    return call if _trace is None else partial(contextvars.copy_context().run, call)
