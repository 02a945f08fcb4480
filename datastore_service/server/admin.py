"""The Admin service: fill, empty and inspect."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

import grpc
import numpy as np

from datastore_service.engine.segment import Segment
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Namespace
from datastore_service.server import wire
from datastore_service.server.calls import answering
from datastore_service.server.corpora import Corpora, naming
from datastore_service.server.drafting import Drafting
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.namespaces import HostedNamespace, Namespaces
from datastore_service.server.refusal import (
    RefusalError,
    disk_refused,
    exhausted,
    invalid,
    precondition,
    storage_refused,
)
from datastore_service.storage.corpus import groups, read_tokens
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.errors import StorageError
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1 import drafting_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminServicer

log = logging.getLogger(__name__)

ADMIN = pb.DESCRIPTOR.services_by_name["Admin"].full_name
WARMUP_SEGMENT_TOKENS = 1 << 22  # documents are indexed together in segments of about this size


class Admin(AdminServicer):
    """token: what `authorization: Bearer` must carry; empty asks for none."""

    def __init__(
        self,
        namespaces: Namespaces,
        drafting: Drafting,
        limits: ServiceLimits,
        metrics: ServiceMetrics,
        token: str,
        corpora: Corpora,
    ) -> None:
        self._namespaces, self._drafting, self._limits = namespaces, drafting, limits
        self._metrics, self._token, self._corpora = metrics, token, corpora
        self._started = time.monotonic()

    def Warmup(self, request_iterator: Iterator[pb.WarmupRequest], context: grpc.ServicerContext):  # noqa: N802
        with self._call("Warmup", context):
            return self._warmup(request_iterator)

    def WarmupFile(self, request: pb.WarmupFileRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("WarmupFile", context):
            yield from self._warmup_file(request)

    def Flush(self, request: pb.FlushRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("Flush", context):
            return self._flush(request)

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("Stats", context):
            return self._stats(request)

    def ListNamespaces(self, request: pb.ListNamespacesRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("ListNamespaces", context):
            return pb.ListNamespacesReply(
                namespaces=[wire.namespace_message(hosted.namespace) for hosted in self._namespaces]
            )

    def ListSessions(self, request: pb.ListSessionsRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("ListSessions", context):
            return _session_list(self._existing(request.namespace))

    def Compact(self, request: pb.CompactRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("Compact", context):
            return _compact(self._existing(request.namespace))

    def DropNamespace(self, request: pb.DropNamespaceRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("DropNamespace", context):
            return self._drop(self._existing(request.namespace))

    def Snapshot(self, request: pb.SnapshotRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("Snapshot", context):
            return self._snapshot(request)

    def Restore(self, request: pb.RestoreRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("Restore", context):
            return self._restore(request)

    def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: grpc.ServicerContext):  # noqa: N802
        with self._call("ListSnapshots", context):
            return self._snapshot_list(request)

    @contextmanager
    def _call(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        with answering(f"{ADMIN}/{method}", context, self._metrics):
            self._authorize(context)
            try:
                yield
            except StorageError as error:
                raise storage_refused(error) from error
            except OSError as error:
                raise disk_refused(error) from error

    def _authorize(self, context: grpc.ServicerContext) -> None:
        if not self._token:
            return
        given = dict(context.invocation_metadata()).get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise RefusalError(
                grpc.StatusCode.UNAUTHENTICATED, "authorization: missing or wrong bearer token"
            )

    def _warmup(self, requests: Iterator[pb.WarmupRequest]) -> pb.WarmupReply:
        hosted: HostedNamespace | None = None
        reply = pb.WarmupReply()
        waiting: list[np.ndarray] = []
        for request in requests:
            hosted = self._same_namespace(hosted, request)
            waiting += self._documents(hosted, request)
            if sum(map(len, waiting)) >= WARMUP_SEGMENT_TOKENS:
                _learn(hosted, waiting, reply)
                waiting = []
        if hosted is not None:
            _learn(hosted, waiting, reply)
        log.info("warmed up", extra={"documents": reply.documents, "tokens": reply.tokens})
        return reply

    def _warmup_file(self, request: pb.WarmupFileRequest) -> Iterator[pb.WarmupProgress]:
        namespace = wire.read_namespace(request.namespace, self._limits)
        path = self._corpora.find_file(request.file, "file")
        tokenizer = self._corpora.find_tokenizer(request.tokenizer, namespace) if request.tokenizer else None
        hosted = self._namespaces.open(namespace)
        added = pb.WarmupProgress()
        rows = read_tokens(path, request.field or "text", tokenizer, hosted.engine.vocab_size)
        documents = naming(request.file, rows)
        for group in groups(documents, WARMUP_SEGMENT_TOKENS):
            _learn(hosted, group, added)
            yield added
        log.info(
            "warmed up", extra={"documents": added.documents, "tokens": added.tokens, "file": request.file}
        )

    def _same_namespace(self, hosted: HostedNamespace | None, request: pb.WarmupRequest) -> HostedNamespace:
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

    def _flush(self, request: pb.FlushRequest) -> pb.FlushReply:
        hosted = self._existing(request.namespace)
        target = request.WhichOneof("target")
        if target == "tier":
            hosted.engine.flush(tier=_flushable(request.tier))
        elif target == "session":
            self._flush_session(hosted, wire.read_name(request.session, "session", self._limits))
        elif target == "all" and request.all:
            hosted.engine.flush()
        else:
            raise invalid("target: one of tier, session or all (true) is required")
        log.info("flushed", extra={"target": target, "model": hosted.namespace.model})
        return pb.FlushReply()

    def _flush_session(self, hosted: HostedNamespace, session: str) -> None:
        if not hosted.engine.has_session(session):
            raise RefusalError(grpc.StatusCode.NOT_FOUND, f"session: {session!r} is not open")
        hosted.engine.flush(session=session)
        hosted.leases.release(session)

    def _existing(self, message: drafting_pb2.Namespace) -> HostedNamespace:
        namespace = wire.read_namespace(message, self._limits)
        hosted = self._namespaces.find(namespace)
        if hosted is None:
            raise RefusalError(grpc.StatusCode.NOT_FOUND, f"namespace: {namespace} does not exist")
        return hosted

    def _drop(self, hosted: HostedNamespace) -> pb.DropNamespaceReply:
        self._namespaces.drop(hosted)
        return pb.DropNamespaceReply()

    def _snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotReply:
        hosted = self._existing(request.namespace)
        if _has_snapshot(self._data(), hosted.namespace, request.name):
            raise RefusalError(grpc.StatusCode.ALREADY_EXISTS, f"name: there is a snapshot {request.name!r}")
        try:
            segments = hosted.engine.snapshot(request.name)
        except ValueError:
            hosted.check_kept()
            raise
        log.info("snapshot made", extra={"model": hosted.namespace.model, "snapshot": request.name})
        return pb.SnapshotReply(segments=len(segments), tokens=_tokens_in(segments))

    def _restore(self, request: pb.RestoreRequest) -> pb.RestoreReply:
        namespace = wire.read_namespace(request.namespace, self._limits)
        if not _has_snapshot(self._data(), namespace, request.name):
            raise RefusalError(grpc.StatusCode.NOT_FOUND, f"name: there is no snapshot {request.name!r}")
        segments = self._namespaces.open(namespace).engine.restore(request.name)
        log.info("snapshot restored", extra={"model": namespace.model, "snapshot": request.name})
        return pb.RestoreReply(segments=len(segments), tokens=_tokens_in(segments))

    def _snapshot_list(self, request: pb.ListSnapshotsRequest) -> pb.ListSnapshotsReply:
        namespace = wire.read_namespace(request.namespace, self._limits)
        return pb.ListSnapshotsReply(
            snapshots=[
                pb.SnapshotInfo(name=s.name, tokens=s.tokens, bytes=s.nbytes, created_seconds=int(s.created))
                for s in self._data().snapshots(namespace)
            ]
        )

    def _data(self) -> DataDirectory:
        if self._namespaces.data is None:
            raise precondition("namespace: kept in memory alone; snapshots need a service with --data")
        return self._namespaces.data

    def _stats(self, request: pb.StatsRequest) -> pb.StatsReply:
        chosen = [self._existing(request.namespace)] if request.HasField("namespace") else self._namespaces
        return pb.StatsReply(
            namespaces=[_namespace_stats(hosted) for hosted in chosen],
            uptime_seconds=time.monotonic() - self._started,
            version=version("specstore"),
            streams=self._drafting.streams,
        )


def _learn(
    hosted: HostedNamespace, documents: list[np.ndarray], reply: pb.WarmupReply | pb.WarmupProgress
) -> None:
    try:
        hosted.engine.warmup(documents)
    except ValueError as error:  # the ids were checked: the tier is full
        raise exhausted(str(error)) from error
    hosted.check_kept()
    reply.documents += len(documents)
    reply.tokens += sum(map(len, documents))


def _session_list(hosted: HostedNamespace) -> pb.ListSessionsReply:
    return pb.ListSessionsReply(
        sessions=[
            pb.SessionInfo(
                session=session.name,
                tokens=session.tokens,
                prompt_tokens=session.prompt_length,
                bytes=session.nbytes,
                conversation=session.conversation,
                publish=session.publish,
            )
            for session in hosted.engine.sessions()
        ]
    )


def _compact(hosted: HostedNamespace) -> pb.CompactReply:
    hosted.engine.compact()
    live = hosted.engine.stats().tiers[Tier.LIVE]
    log.info("compacted", extra={"model": hosted.namespace.model, "segments": live.segments})
    return pb.CompactReply(segments=live.segments, tokens=live.tokens)


def _has_snapshot(data: DataDirectory, namespace: Namespace, name: str) -> bool:
    try:
        return data.has_snapshot(namespace, name)
    except ValueError as error:
        raise invalid(str(error)) from error


def _tokens_in(segments: Sequence[Segment]) -> int:
    return sum(map(len, segments))


def _namespace_stats(hosted: HostedNamespace) -> pb.NamespaceStats:
    namespace, stats = hosted.namespace, hosted.engine.stats()
    return pb.NamespaceStats(
        namespace=wire.namespace_message(namespace),
        vocab_size=hosted.engine.vocab_size,
        sessions=stats.sessions,
        conversations=stats.conversations,
        prior=hosted.prior,
        drafts=stats.drafts,
        merge_failures=stats.merge_failures,
        log_bytes=stats.log_bytes,
        log_unsynced_bytes=stats.log_unsynced_bytes,
        log_failures=stats.log_failures,
        stored=hosted.stored,
        tiers=[
            pb.TierStats(
                tier=int(tier),  # type: ignore[arg-type]
                tokens=t.tokens,
                bytes=t.nbytes,
                hits=t.hits,
                drafted=t.drafted,
                segments=t.segments,
                accepted=t.accepted,
                damaged=t.damaged,
            )
            for tier, t in stats.tiers.items()
        ],
    )


def _flushable(number: int) -> Tier:
    if number not in (Tier.LIVE, Tier.SESSION, Tier.REJECTED):
        raise invalid(f"tier: {number} cannot be flushed; live (2), session (3) and rejected (4) can")
    return Tier(number)
