"""Exports spans to an OTLP collector if OpenTelemetry's own environment variables name one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace

from datastore_service.server.otlp import start_export

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter


def export_spans() -> None:
    """Starts the OpenTelemetry SDK if the environment asks for it."""
    start_export("traces", "trace_exporter:OTLPSpanExporter", _start)


def _start(exporter: SpanExporter, resource: Resource) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
