"""Replies of the Admin service, made of what the engine and the data directory say."""

from __future__ import annotations

from collections.abc import Iterable

from datastore_service.server import wire
from datastore_service.server.namespaces import HostedNamespace
from datastore_service.server.tenant_use import TenantUse
from datastore_service.storage.snapshots import SnapshotInfo
from proto_gen.specstore.v1 import admin_pb2 as pb


def session_list(hosted: HostedNamespace) -> pb.ListSessionsReply:
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


def snapshot_list(snapshots: list[SnapshotInfo]) -> pb.ListSnapshotsReply:
    return pb.ListSnapshotsReply(
        snapshots=[
            pb.SnapshotInfo(
                name=s.name, tokens=s.tokens, bytes=s.nbytes, created_seconds=int(s.created), damage=s.damage
            )
            for s in snapshots
        ]
    )


def quota_list(uses: Iterable[TenantUse]) -> pb.ListQuotasReply:
    return pb.ListQuotasReply(tenants=[pb.TenantQuota(tenant=use.tenant, parts=_parts(use)) for use in uses])


def _parts(use: TenantUse) -> list[pb.QuotaPart]:
    bounds, used = use.quota.bounds(), use.used()
    return [
        pb.QuotaPart(name=part, limit=bounds.get(part), used=used.get(part), refused=refused)
        for part, refused in use.refused.items()
    ]


def namespace_stats(hosted: HostedNamespace) -> pb.NamespaceStats:
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
        epoch=stats.epoch,
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
