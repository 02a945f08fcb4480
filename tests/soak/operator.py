"""An operator: random admin calls for one tenant, every reply checked and every wipe written down."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from datastore_service.protocol.tree import Tier
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.soak.ledger import Interval
from tests.soak.tenant import CHANNEL_OPTIONS, Tenant

T = TypeVar("T")
PAUSES = (0.05, 1.0)  # seconds between two calls
CALL_SECONDS = 120.0  # far more than any stop of the service: a call that takes longer hangs
MOST_SNAPSHOTS = 8


class Operator:
    """Its calls are made one after the other, as the ledger wants it."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._rng = random.Random(f"{tenant.plan.seed} {tenant.number} operator")
        self._metadata = (("authorization", f"Bearer {tenant.plan.token}"),)
        self._snapshots: dict[str, Interval] = {}
        self._named = 0
        self.thread = threading.Thread(target=self._work, name="operator", daemon=True)

    def _work(self) -> None:
        gentle = [
            self._stats,
            self._list,
            self._warm_up,
            self._compact,
            self._flush_a_session,
            self._snapshot,
        ]
        rough = [self._flush_sessions, self._flush_live, self._flush_all, self._restore, self._drop]
        actions = gentle if self._tenant.keeps else [*gentle, *gentle, *rough]
        with grpc.insecure_channel(self._tenant.plan.endpoint, CHANNEL_OPTIONS) as channel:
            self._stub = AdminStub(channel)
            while not self._tenant.stopping.wait(self._rng.uniform(*PAUSES)):
                self._rng.choice(actions)()

    def _call(self, method: Callable[..., T], request: object, *expected: str) -> T | str | None:
        """The reply; one of the expected status codes; None if the service went away meanwhile."""
        stops = self._tenant.plan.stops.value
        try:
            reply = method(request, timeout=CALL_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code().name
            if code == "UNAVAILABLE" or (code == "CANCELLED" and self._tenant.may_be_cancelled(stops)):
                return None
            if code not in expected:
                self._tenant.find(f"operator: {type(request).__name__}: {code}: {error.details()}")
            return code
        self._tenant.count("admin calls")
        return reply

    # Calls that change nothing

    def _stats(self) -> None:
        reply = self._call(self._stub.Stats, pb.StatsRequest(namespace=self._tenant.namespace), "NOT_FOUND")
        if isinstance(reply, pb.StatsReply):
            (stats,) = reply.namespaces
            if stats.merge_failures or stats.log_failures:
                self._tenant.find(
                    f"operator: {stats.merge_failures} merges, {stats.log_failures} logs failed"
                )

    def _list(self) -> None:
        stored = self._tenant.keeps and len(self._tenant.ledger) > 0
        namespaces = self._call(self._stub.ListNamespaces, pb.ListNamespacesRequest())
        found = (
            not isinstance(namespaces, pb.ListNamespacesReply)
            or self._tenant.namespace in namespaces.namespaces
        )
        if stored and not found:
            self._tenant.find("operator: the namespace is not listed")
        request = pb.ListSnapshotsRequest(namespace=self._tenant.namespace)
        listed = self._call(self._stub.ListSnapshots, request)
        if isinstance(listed, pb.ListSnapshotsReply):
            missing = set(self._snapshots) - {snapshot.name for snapshot in listed.snapshots}
            if missing:
                self._tenant.find(f"operator: snapshots are lost: {sorted(missing)}")

    def _compact(self) -> None:
        self._call(self._stub.Compact, pb.CompactRequest(namespace=self._tenant.namespace), "NOT_FOUND")

    # Calls that add

    def _warm_up(self) -> None:
        documents, begun = [self._tenant.write() for _ in range(self._rng.randint(1, 20))], time.monotonic()
        requests = [
            pb.WarmupRequest(
                namespace=None if i else self._tenant.namespace, documents=[{"tokens": document.tokens.tolist()}]
            )
            for i, document in enumerate(documents)
        ]  # fmt: skip
        reply = self._call(lambda _, **options: self._stub.Warmup(iter(requests), **options), requests)
        if isinstance(reply, pb.WarmupReply):
            if (reply.documents, reply.tokens) != (len(documents), sum(len(d.tokens) for d in documents)):
                self._tenant.find(f"operator: warmed up {len(documents)} documents, reply {reply}")
            for document in documents:
                self._tenant.ledger.published(document.number, begun)

    def _snapshot(self) -> None:
        if len(self._snapshots) == MOST_SNAPSHOTS:
            return
        self._named += 1
        name, begun = f"s{self._named}", time.monotonic()
        request = pb.SnapshotRequest(namespace=self._tenant.namespace, name=name)
        reply = self._call(self._stub.Snapshot, request, "NOT_FOUND")
        if isinstance(reply, pb.SnapshotReply):
            self._snapshots[name] = begun, time.monotonic()

    # Calls that take away

    def _flush_a_session(self) -> None:
        request = pb.ListSessionsRequest(namespace=self._tenant.namespace)
        listed = self._call(self._stub.ListSessions, request, "NOT_FOUND")
        if not isinstance(listed, pb.ListSessionsReply) or not listed.sessions:
            return
        chosen = self._rng.choice(listed.sessions).session
        self._end_sessions(pb.FlushRequest(namespace=self._tenant.namespace, session=chosen))

    def _flush_sessions(self) -> None:
        self._end_sessions(pb.FlushRequest(namespace=self._tenant.namespace, tier=Tier.SESSION))

    def _flush_live(self) -> None:
        request = pb.FlushRequest(namespace=self._tenant.namespace, tier=Tier.LIVE)
        self._wipe(self._stub.Flush, request, "NOT_FOUND")

    def _flush_all(self) -> None:
        self._tenant.ledger.begin_end_of_sessions()
        request = pb.FlushRequest(namespace=self._tenant.namespace, all=True)
        self._wipe(self._stub.Flush, request, "NOT_FOUND")
        self._tenant.ledger.sessions_have_ended()

    def _restore(self) -> None:
        if not self._snapshots:
            return
        name = self._rng.choice(sorted(self._snapshots))
        request = pb.RestoreRequest(namespace=self._tenant.namespace, name=name)
        self._wipe(self._stub.Restore, request, snapshot=self._snapshots[name])

    def _drop(self) -> None:
        """Workers go on opening sessions, so it is refused now and then."""
        self._tenant.ledger.begin_end_of_sessions()
        flush = pb.FlushRequest(namespace=self._tenant.namespace, tier=Tier.SESSION)
        self._call(self._stub.Flush, flush, "NOT_FOUND")
        drop = pb.DropNamespaceRequest(namespace=self._tenant.namespace)
        self._wipe(self._stub.DropNamespace, drop, "NOT_FOUND", "FAILED_PRECONDITION")
        self._tenant.ledger.sessions_have_ended()

    def _end_sessions(self, request: pb.FlushRequest) -> None:
        self._tenant.ledger.begin_end_of_sessions()
        self._call(self._stub.Flush, request, "NOT_FOUND")
        self._tenant.ledger.sessions_have_ended()

    def _wipe(
        self, method: Callable, request: object, *refusals: str, snapshot: Interval | None = None
    ) -> None:
        wipe = self._tenant.ledger.begin_wipe(snapshot)
        reply = self._call(method, request, *refusals)
        refused = isinstance(reply, str)
        self._tenant.ledger.end_wipe(wipe, None if reply is None else not refused)
        self._tenant.count(
            f"{type(request).__name__.removesuffix('Request')} {'refused' if refused else 'done'}"
        )
