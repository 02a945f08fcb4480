"""The Admin service: fill, empty and inspect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from inspect import isgeneratorfunction
from typing import Any

import grpc
import numpy as np

from datastore_service.engine.segment import Segment
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Namespace
from datastore_service.server import wire
from datastore_service.server.admin_replies import namespace_stats, quota_list, session_list, snapshot_list
from datastore_service.server.calls import CALL
from datastore_service.server.corpora import Corpora
from datastore_service.server.drafting import Drafting
from datastore_service.server.forgetting import Forgetful, forget
from datastore_service.server.identities import Right
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import HostedNamespace, Namespaces
from datastore_service.server.refusal import (
    RefusalError,
    disk_refused,
    invalid,
    precondition,
    storage_refused,
)
from datastore_service.server.warmup import Warmup
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.errors import StorageError
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1 import drafting_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminServicer


def _admin_call(method: Callable[[Admin, Any], Any]) -> Callable[[Admin, Any, grpc.ServicerContext], Any]:
    """Makes a gRPC method of one that takes the request alone: what storage and disk raise becomes a refusal.

    A method that yields its replies becomes one that streams them."""

    @wraps(method)
    def reply(self: Admin, request: Any, context: grpc.ServicerContext) -> Any:
        with _refusing_storage_errors():
            return method(self, request)

    @wraps(method)
    def stream(self: Admin, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _refusing_storage_errors():
            yield from method(self, request)

    return stream if isgeneratorfunction(method) else reply


@contextmanager
def _refusing_storage_errors() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise storage_refused(error) from error
    except OSError as error:
        raise disk_refused(error) from error


class Admin(AdminServicer):
    """Answers the calls of the Admin service, whose callers were admitted. others: forget too, None where there are none."""

    def __init__(
        self,
        namespaces: Namespaces,
        drafting: Drafting,
        limits: ServiceLimits,
        corpora: Corpora,
        others: Forgetful | None = None,
    ) -> None:
        self._others = others
        self._namespaces, self._drafting, self._limits = namespaces, drafting, limits
        self._warmup = Warmup(namespaces, limits, corpora)
        self._started = time.monotonic()

    @_admin_call
    def Warmup(self, requests: Iterator[pb.WarmupRequest]) -> pb.WarmupReply:  # noqa: N802
        return self._warmup.from_messages(requests)

    @_admin_call
    def WarmupFile(self, request: pb.WarmupFileRequest) -> Iterator[pb.WarmupProgress]:  # noqa: N802
        yield from self._warmup.from_file(request)

    @_admin_call
    def Flush(self, request: pb.FlushRequest) -> pb.FlushReply:  # noqa: N802
        hosted = self._existing(request.namespace)
        target = request.WhichOneof("target")
        if target == "tier":
            hosted.engine.flush(tier=_flushable(request.tier))
        elif target == "session":
            _flush_session(hosted, wire.read_name(request.session, "session", self._limits))
        elif target == "workspace":
            _flush_workspace(hosted, wire.read_name(request.workspace, "workspace", self._limits))
        elif target == "all" and request.all:
            hosted.engine.flush()
        else:
            raise invalid("target: one of tier, session, workspace or all (true) is required")
        return pb.FlushReply()

    @_admin_call
    def Forget(self, request: pb.ForgetRequest) -> pb.ForgetReply:  # noqa: N802
        return forget(request, self._namespaces, self._limits, self._others)

    @_admin_call
    def Epoch(self, request: pb.EpochRequest) -> pb.EpochReply:  # noqa: N802
        engine = self._existing(request.namespace).engine
        removed: list[np.ndarray] = []
        if request.HasField("keep"):
            if not request.keep:
                raise invalid("keep: 0 is below 1; Flush empties the live tier")
            removed = engine.keep_epochs(request.keep)
        return pb.EpochReply(epoch=engine.epoch, documents=len(removed), tokens=sum(map(len, removed)))

    @_admin_call
    def Stats(self, request: pb.StatsRequest) -> pb.StatsReply:  # noqa: N802
        chosen = [self._existing(request.namespace)] if request.HasField("namespace") else self._readable()
        return pb.StatsReply(
            namespaces=[namespace_stats(hosted) for hosted in chosen],
            uptime_seconds=time.monotonic() - self._started,
            version=version("specstore"),
            streams=self._drafting.streams,
        )

    @_admin_call
    def ListNamespaces(self, request: pb.ListNamespacesRequest) -> pb.ListNamespacesReply:  # noqa: N802
        return pb.ListNamespacesReply(
            namespaces=[wire.namespace_message(hosted.namespace) for hosted in self._readable()]
        )

    @_admin_call
    def ListSessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:  # noqa: N802
        return session_list(self._existing(request.namespace))

    @_admin_call
    def Compact(self, request: pb.CompactRequest) -> pb.CompactReply:  # noqa: N802
        hosted = self._existing(request.namespace)
        hosted.engine.compact()
        live = hosted.engine.stats().tiers[Tier.LIVE]
        return pb.CompactReply(segments=live.segments, tokens=live.tokens)

    @_admin_call
    def DropNamespace(self, request: pb.DropNamespaceRequest) -> pb.DropNamespaceReply:  # noqa: N802
        self._namespaces.drop(self._existing(request.namespace))
        return pb.DropNamespaceReply()

    @_admin_call
    def Snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotReply:  # noqa: N802
        hosted = self._existing(request.namespace)
        if self._has_snapshot(hosted.namespace, request.name):
            raise RefusalError(grpc.StatusCode.ALREADY_EXISTS, f"name: there is a snapshot {request.name!r}")
        try:
            segments = hosted.engine.snapshot(request.name)
        except ValueError:
            hosted.check_not_dropped()
            raise
        return pb.SnapshotReply(segments=len(segments), tokens=_tokens_in(segments))

    @_admin_call
    def Restore(self, request: pb.RestoreRequest) -> pb.RestoreReply:  # noqa: N802
        namespace = wire.read_namespace(request.namespace, self._limits)
        if not self._has_snapshot(namespace, request.name):
            raise RefusalError(grpc.StatusCode.NOT_FOUND, f"name: there is no snapshot {request.name!r}")
        segments = self._namespaces.open(namespace).engine.restore(request.name)
        return pb.RestoreReply(segments=len(segments), tokens=_tokens_in(segments))

    @_admin_call
    def ListSnapshots(self, request: pb.ListSnapshotsRequest) -> pb.ListSnapshotsReply:  # noqa: N802
        namespace = wire.read_namespace(request.namespace, self._limits)
        return snapshot_list(self._data().snapshots(namespace))

    @_admin_call
    def SetQuota(self, request: pb.SetQuotaRequest) -> pb.SetQuotaReply:  # noqa: N802
        tenant = wire.read_tenant(request, self._limits)
        return pb.SetQuotaReply(stored=self._namespaces.quotas.set(tenant, wire.read_quota(request)))

    @_admin_call
    def ListQuotas(self, request: pb.ListQuotasRequest) -> pb.ListQuotasReply:  # noqa: N802
        quotas, identity = self._namespaces.quotas, CALL.get().caller.identity
        if request.HasField("tenant"):
            return quota_list([quotas.of(wire.read_tenant(request, self._limits))])
        return quota_list(use for use in quotas if identity.may(Right.READ, use.tenant))

    def _readable(self) -> Iterator[HostedNamespace]:
        """The namespaces of the tenants whose statistics the caller may read."""
        identity = CALL.get().caller.identity
        return (each for each in self._namespaces if identity.may(Right.READ, each.namespace.tenant))

    def _existing(self, message: drafting_pb2.Namespace) -> HostedNamespace:
        return self._namespaces.existing(wire.read_namespace(message, self._limits))

    def _data(self) -> DataDirectory:
        if self._namespaces.data is None:
            raise precondition("namespace: kept in memory alone; snapshots need a service with --data")
        return self._namespaces.data

    def _has_snapshot(self, namespace: Namespace, name: str) -> bool:
        try:
            return self._data().has_snapshot(namespace, name)
        except ValueError as error:
            raise invalid(str(error)) from error


def _flush_session(hosted: HostedNamespace, session: str) -> None:
    if not hosted.engine.has_session(session):
        raise RefusalError(grpc.StatusCode.NOT_FOUND, f"session: {session!r} is not open")
    hosted.engine.flush(session=session)
    hosted.leases.release(session)


def _flush_workspace(hosted: HostedNamespace, workspace: str) -> None:
    if not hosted.engine.has_workspace(workspace):
        raise RefusalError(grpc.StatusCode.NOT_FOUND, f"workspace: {workspace!r} has no text")
    hosted.engine.flush_workspace(workspace)


def _flushable(number: int) -> Tier:
    if number not in (Tier.LIVE, Tier.SESSION, Tier.REJECTED):
        raise invalid("tier: live, session and rejected can be flushed, no other")
    return Tier(number)


def _tokens_in(segments: Sequence[Segment]) -> int:
    return sum(map(len, segments))
