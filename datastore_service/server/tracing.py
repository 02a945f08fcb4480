"""Exports spans to an OTLP collector if OpenTelemetry's own environment variables name one."""

from __future__ import annotations

import logging
import os
from importlib import import_module

from opentelemetry import trace

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


def export_spans() -> None:
    """Starts the OpenTelemetry SDK if the environment asks for it; it reads the other OTEL_* variables itself.

    If spans cannot be exported it logs a warning: that is no reason not to serve."""
    variables = os.environ
    default = "otlp" if any(variables.get(name) for name in ENDPOINTS) else "none"
    exporter = variables.get("OTEL_TRACES_EXPORTER") or default
    protocol = next((variables[name] for name in PROTOCOLS if variables.get(name)), "grpc")
    if exporter == "none" or variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    if exporter != "otlp":
        log.warning("no traces: OTEL_TRACES_EXPORTER is %r, not otlp or none", exporter)
    elif protocol not in _EXPORTERS:
        log.warning("no traces: the OTLP protocol is %r, not one of %s", protocol, ", ".join(_EXPORTERS))
    else:
        _export(_EXPORTERS[protocol])


def _export(module: str) -> None:
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = import_module(module).OTLPSpanExporter()
    except ImportError as error:
        log.warning("no traces: %s; `pip install 'specstore[otel]'` has what is missing", error)
        return
    resource = Resource.create({"service.name": "specstore"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
