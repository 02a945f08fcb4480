"""What OpenTelemetry's own environment variables ask for: whether a signal is exported, by which protocol, and in whose name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

log = logging.getLogger(__name__)

_PROTOCOLS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}


def start_export(signal: str, exporter: str, start: Callable[[Any, Resource], None]) -> None:
    """Starts the export of a signal if the environment asks for it; the SDK reads the other OTEL_* variables itself.

    If the signal cannot be exported it logs a warning: that is no reason not to serve.
    signal: `traces` or `metrics`. exporter: module and class in the package of a protocol. start: is given an exporter and the
    resource that the signal is of."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or _chosen(signal) == "none":
        return
    try:
        start(_class(signal, exporter)(), _resource())
    except ImportError as error:
        log.warning("no %s: %s; `pip install 'specstore[otel]'` has what is missing", signal, error)
    except Exception as error:  # whatever the SDK finds wrong with its variables
        log.warning("no %s: %s", signal, error)


def _chosen(signal: str) -> str:
    default = "otlp" if _of_signal(signal, "ENDPOINT") else "none"
    return os.environ.get(f"OTEL_{signal.upper()}_EXPORTER") or default


def _of_signal(signal: str, name: str) -> str:
    """A variable of all signals, unless the signal has its own; "" for neither."""
    own, common = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", f"OTEL_EXPORTER_OTLP_{name}"
    return os.environ.get(own) or os.environ.get(common, "")


def _class(signal: str, exporter: str) -> Any:
    if (chosen := _chosen(signal)) != "otlp":
        raise ValueError(f"OTEL_{signal.upper()}_EXPORTER is {chosen!r}, not otlp or none")
    protocol = _of_signal(signal, "PROTOCOL") or "grpc"
    if protocol not in _PROTOCOLS:
        raise ValueError(f"the OTLP protocol is {protocol!r}, not one of {', '.join(_PROTOCOLS)}")
    module, name = exporter.split(":")
    return getattr(import_module(f"{_PROTOCOLS[protocol]}.{module}"), name)


def _resource() -> Resource:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    return Resource.create({"service.name": "specstore"}).merge(OTELResourceDetector().detect())
