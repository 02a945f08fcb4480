"""Structured logs: one JSON object on each line."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from opentelemetry import trace
from opentelemetry.trace import format_span_id, format_trace_id

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

AUDIT = "datastore_service.server.audit.calls"
REFUSALS = f"{AUDIT}.refused"
# Loggers of what callers cause, as often as they like: refused calls and entries, errors in the servers' own threads.
OF_CALLERS = (REFUSALS, "datastore_service.server.drafting", "grpc", "waitress")
MOST_LINES, PERIOD_SECONDS = 20, 60.0


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object. Its fields are time (ISO 8601, UTC), level, logger, message, those of the call's `extra`,
    the ids of the current trace and span, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            fields |= {"trace_id": format_trace_id(span.trace_id), "span_id": format_span_id(span.span_id)}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class CallersLimit(logging.Filter):
    """What callers cause has MOST_LINES lines of each kind (a place in the code) in each period. The next period's first line has
    the number that were left out, in the field `left_out`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now, self._lock = now, threading.Lock()
        self._begun: dict[
            tuple[str, int], tuple[float, int]
        ] = {}  # kind -> when its period began, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(OF_CALLERS):
            return True
        kind, now = (record.pathname, record.lineno), self._now()
        with self._lock:
            begun, lines = self._begun.get(kind, (now, 0))
            if now - begun >= PERIOD_SECONDS:
                if lines > MOST_LINES:
                    record.left_out = lines - MOST_LINES
                begun, lines = now, 0
            self._begun[kind] = begun, lines + 1
        return lines < MOST_LINES


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(CallersLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
