"""The audit: one line for each admin call and each refusal. docs/security.md lists its fields."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from datastore_service.server.admission import ADMIN, Caller, Context
from datastore_service.server.logs import AUDIT, REFUSALS, JsonFormatter
from datastore_service.server.refusal import RefusalError

log = logging.getLogger(__name__)
_calls, _refusals = logging.getLogger(AUDIT), logging.getLogger(REFUSALS)

MOST_CHARACTERS = 1024  # of a field; the JSON escapes what does not print
REQUEST_ID = "x-request-id"
_DELETE = {0x7F: "\\x7f"}  # the one control character that JSON does not escape


class AuditedCall:
    """What the audit tells of one call. method: "package.Service/Method"."""

    def __init__(self, method: str, context: Context) -> None:
        self._method, self._peer = method, unquote(context.peer())
        metadata = dict(context.invocation_metadata() or ())
        self.request_id = _bounded(str(metadata.get(REQUEST_ID) or uuid.uuid4().hex))
        self._of_admin = method.startswith(f"{ADMIN}/")
        self.caller: Caller | None = None  # once it is known
        self._asked: dict[str, object] = {}
        self._changed: dict[str, object] = {}
        self._refused = False

    def asked(self, message: Any) -> None:
        """Notes what a message of the caller asks for."""
        if self._of_admin:
            self._asked |= _scalars(message)

    def changed(self, reply: Any) -> None:
        """Notes what a reply says."""
        if self._of_admin:
            self._changed |= _scalars(reply)

    def ended(self, code: str) -> None:
        """Tells of a call of the Admin service that was not refused."""
        if self._of_admin and not self._refused:
            _calls.info("admin call", extra=self._fields(code))

    def refused(self, refusal: RefusalError) -> None:
        """Tells of a refused call. The refusal's cause names a file, which the caller does not see."""
        self._refused = True
        told = {"reason": _bounded(str(refusal))}
        if refusal.__cause__ is not None:
            told["cause"] = _bounded(str(refusal.__cause__))
        _refusals.warning("call refused", extra=self._fields(refusal.code.name) | told)

    def tenant_refused(self, reason: str, tenant: str) -> None:
        """Tells of a tenant for which a stream's caller lacks a right, while the stream goes on."""
        told = {"reason": _bounded(reason), "tenant": _bounded(tenant)}
        _refusals.warning("tenant refused", extra=self._fields("PERMISSION_DENIED") | told)

    def _fields(self, code: str) -> dict[str, object]:
        fields: dict[str, object] = {"method": self._method, "code": code}
        fields |= {"peer": _bounded(self._peer), "request_id": self.request_id}
        if self.caller is not None:
            fields |= {"identity": _bounded(self.caller.name), "proof": _bounded(self.caller.by)}
            if (named := self.caller.namespace) is not None:
                fields |= {part: _bounded(getattr(named, part)) for part in ("model", "tokenizer", "tenant")}
        told = {"request": self._asked, "reply": self._changed}
        return fields | {name: values for name, values in told.items() if values}


def audit_to(file: Path) -> None:
    """Writes the audit to a file of its own, and no longer to the service's log. A file that was moved away is made anew. Raises
    OSError if it cannot be written."""
    handler = _AuditFile(file)
    handler.setFormatter(JsonFormatter())
    _calls.handlers = [handler]
    _calls.setLevel(logging.INFO)
    _calls.propagate = False


class _AuditFile(WatchedFileHandler):
    """Says in the service's log when a line could not be written, and when one could again."""

    _failing = False

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        try:
            super().emit(record)
        except OSError:  # it looks for a file that was moved away, and makes it anew, before it minds errors
            self.handleError(record)
        if self._failing and not self._failed:
            log.warning("the audit is written again", extra={"file": self.baseFilename})
        self._failing = self._failed

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        self._failed = True
        if not self._failing:
            log.exception("the audit cannot be written: lines are lost", extra={"file": self.baseFilename})


def _scalars(message: Any) -> Mapping[str, object]:
    """The fields of a message that are one value, or names, as protobuf's JSON has them."""
    fields: dict[str, object] = {}
    for field, value in message.ListFields():
        if isinstance(value, str | int | float):
            fields[field.name] = _value(field, value)
        elif field.type == field.TYPE_STRING:
            fields[field.name] = [_bounded(name) for name in value]
    return fields


def _value(field: Any, value: Any) -> object:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return _bounded(value) if isinstance(value, str) else value


def _bounded(text: str) -> str:
    text = text.translate(_DELETE)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
