"""Traces for OpenTelemetry, which follow a call through gateways and nodes. Needs the extra `farhand[otel]`.

They are on if OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set; the other variables of
OpenTelemetry apply as well. Without them nothing is loaded, and a span does nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

log = logging.getLogger(__name__)

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# A parent as the header `traceparent` has it.
_PARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# The span of the client that sent the present request.
incoming: ContextVar[str] = ContextVar("incoming", default="")


class Span:
    """Something that takes time. `traceparent` names it for others; empty if there are no traces."""

    def __init__(self, span: Any = None, traceparent: str = "") -> None:
        self._span = span
        self.traceparent = traceparent

    def end(self, failure: str = "") -> None:
        """End it; `failure`: why it failed."""
        if self._span is not None:
            if failure:
                trace = importlib.import_module("opentelemetry.trace")
                self._span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
            self._span.end()


_NO_SPAN: Final = Span()
# The tracer of this process.
_tracers: Final[list[Any]] = []


def wanted(environ: Mapping[str, str]) -> bool:
    """Return whether the environment asks for traces."""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not off and any(environ.get(name) for name in ENDPOINTS)


def set_up(service: str, instance: str, environ: Mapping[str, str]) -> None:
    """Send the spans of this process to the collector of the environment, if there is one."""
    if _tracers or not wanted(environ):
        return
    if importlib.util.find_spec("opentelemetry") is None:
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces need the extra: pip install 'farhand[otel]'")
        return
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    resource = importlib.import_module("opentelemetry.sdk.resources").Resource
    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = sdk.TracerProvider(resource=resource.create({**named, "service.instance.id": instance}))
    provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter()))
    _tracers.append(provider.get_tracer("farhand"))


def is_on() -> bool:
    """Return whether this process makes traces."""
    return bool(_tracers)


def begin(name: str, parent: str = "", **attributes: str) -> Span:
    """Begin a span; `parent` is the `traceparent` of the one it belongs to."""
    if not _tracers:
        return _NO_SPAN
    trace = importlib.import_module("opentelemetry.trace")
    context = None
    if _PARENT.fullmatch(parent):
        _, trace_id, span_id, flags = parent.split("-")
        above = trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)))
        context = trace.set_span_in_context(trace.NonRecordingSpan(above))
    span = _tracers[0].start_span(name, context=context, attributes=attributes)
    own = span.get_span_context()
    return Span(span, f"00-{own.trace_id:032x}-{own.span_id:016x}-{int(own.trace_flags):02x}")
