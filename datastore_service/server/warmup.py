"""Adds documents to a namespace's live tier: those that a caller sends, or those of a file on the service's machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from datastore_service.engine.share import NoRoomError
from datastore_service.server import wire
from datastore_service.server.corpora import Corpora, hiding_path
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import HostedNamespace, Namespaces
from datastore_service.server.refusal import exhausted, invalid, precondition
from datastore_service.storage.corpus import groups, read_tokens
from proto_gen.specstore.v1 import admin_pb2 as pb

MAX_OPEN_CALLS = 8  # that send documents; each takes a thread for as long as its caller wants
SEGMENT_TOKENS = 1 << 22  # documents are indexed together in segments of about this size


class Warmup:
    """Raises RefusalError. What was added before an error stays."""

    def __init__(self, namespaces: Namespaces, limits: ServiceLimits, corpora: Corpora) -> None:
        self._namespaces, self._limits, self._corpora = namespaces, limits, corpora
        self._open_calls = threading.BoundedSemaphore(MAX_OPEN_CALLS)

    def from_messages(self, requests: Iterator[pb.WarmupRequest]) -> pb.WarmupReply:
        if not self._open_calls.acquire(blocking=False):
            raise exhausted(f"Warmup: {MAX_OPEN_CALLS} such calls are open, the limit")
        try:
            return self._from_messages(requests)
        finally:
            self._open_calls.release()

    def _from_messages(self, requests: Iterator[pb.WarmupRequest]) -> pb.WarmupReply:
        hosted: HostedNamespace | None = None
        added = pb.WarmupReply()
        waiting: list[np.ndarray] = []
        for request in requests:
            hosted = self._same_namespace(hosted, request)
            waiting += self._documents(hosted, request)
            if sum(map(len, waiting)) >= SEGMENT_TOKENS:
                _add(hosted, waiting, added)
                waiting = []
        if hosted is not None:
            _add(hosted, waiting, added)
        return added

    def from_file(self, request: pb.WarmupFileRequest) -> Iterator[pb.WarmupProgress]:
        """Yields what has been added so far, after each segment."""
        namespace = wire.read_namespace(request.namespace, self._limits)
        path = self._corpora.find_file(request.file, "file")
        tokenizer = self._corpora.find_tokenizer(request.tokenizer, namespace) if request.tokenizer else None
        hosted = self._namespaces.open(namespace)
        added = pb.WarmupProgress()
        rows = read_tokens(path, request.field or "text", tokenizer, hosted.engine.vocab_size)
        documents = hiding_path(request.file, rows)
        for group in groups(documents, SEGMENT_TOKENS):
            _add(hosted, group, added)
            yield added

    def _same_namespace(self, hosted: HostedNamespace | None, request: pb.WarmupRequest) -> HostedNamespace:
        """The namespace of a request: the first request names it, later ones may not name another."""
        if not request.HasField("namespace"):
            if hosted is None:
                raise precondition("namespace: required in the first message")
            return hosted
        namespace = wire.read_namespace(request.namespace, self._limits)
        if hosted is not None and hosted.namespace != namespace:
            raise precondition(f"namespace: changed within the call, from {hosted.namespace} to {namespace}")
        return self._namespaces.open(namespace)

    def _documents(self, hosted: HostedNamespace, request: pb.WarmupRequest) -> list[np.ndarray]:
        if len(request.documents) > self._limits.documents:
            raise invalid(
                f"documents: {len(request.documents)} in one message exceeds {self._limits.documents}"
            )
        return [
            wire.read_document(document.tokens, f"documents[{i}].tokens", hosted.engine.vocab_size)
            for i, document in enumerate(request.documents)
        ]


def _add(
    hosted: HostedNamespace, documents: list[np.ndarray], added: pb.WarmupReply | pb.WarmupProgress
) -> None:
    """Adds documents as one segment, and counts them in `added`."""
    try:
        hosted.engine.warmup(documents)
    except (ValueError, NoRoomError) as error:  # the ids were checked: the tier is full
        raise exhausted(str(error)) from error
    hosted.check_not_dropped()
    added.documents += len(documents)
    added.tokens += sum(map(len, documents))
