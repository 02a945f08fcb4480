"""Commands that call the Admin service of a running datastore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum, auto
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.message import Message  # type: ignore[import-untyped]
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from datastore_service.cli.calls import open_service
from datastore_service.cli.options import (
    DEFAULT_ENDPOINT,
    FINGERPRINT,
    AsJson,
    Endpoint,
    NamespaceOptions,
    ServiceOptions,
    Tenant,
    TlsOptions,
)
from datastore_service.cli.output import print_json, print_reply, progress, table_of
from datastore_service.cli.stats_tables import print_stats
from datastore_service.client.access import Access, Metadata
from datastore_service.protocol.names import bounded_name, hashed_name
from datastore_service.protocol.types import MAX_VOCAB
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from proto_gen.specstore.v1.drafting_pb2 import Namespace

CALL_SECONDS = 30.0
LONG_CALL_SECONDS = 3600.0
HEALTH_SECONDS = 3.0
DOCUMENTS_A_MESSAGE = 64
FLUSHABLE = ("live", "session", "rejected")

QuotaPart = partial(typer.Option, metavar="N", rich_help_panel="Quota", min=0, max=2**64 - 1)


class QuotaAction(StrEnum):
    """What `specstore quota` does."""

    SHOW = auto()
    SET = auto()


SnapshotName = Annotated[str, typer.Argument(help="the snapshot's name")]


def stats(service: ServiceOptions) -> None:
    """Shows what each tier holds, how often it hits, how many of its tokens were accepted, failed merges and damaged segments."""
    reply = _call(service, "Stats", pb.StatsRequest())
    if service.as_json:
        print_json(reply)
    else:
        print_stats(reply)


def namespaces(service: ServiceOptions) -> None:
    """Lists the namespaces: model, tenant and tokenizer of each."""
    reply = _call(service, "ListNamespaces", pb.ListNamespacesRequest())
    rows = [(n.model, n.tenant, n.tokenizer) for n in reply.namespaces]
    print_reply(reply, service.as_json, table_of(("model", "tenant", "tokenizer"), rows))


def sessions(namespace: NamespaceOptions, service: ServiceOptions) -> None:
    """Lists a namespace's open sessions, oldest first."""
    reply = _call(service, "ListSessions", pb.ListSessionsRequest(namespace=_message(namespace)))
    headings = ("session", "tokens", "prompt", "bytes", "conversation", "published")
    rows = [
        (s.session, f"{s.tokens:,}", f"{s.prompt_tokens:,}", f"{s.bytes:,}", s.conversation, s.publish)
        for s in reply.sessions
    ]
    print_reply(reply, service.as_json, table_of(headings, rows))


def compact(namespace: NamespaceOptions, service: ServiceOptions) -> None:
    """Merges a namespace's live tier into as few segments as possible. It is also merged as text comes in."""
    reply = _call(service, "Compact", pb.CompactRequest(namespace=_message(namespace)), LONG_CALL_SECONDS)
    print_reply(reply, service.as_json, f"live tier: {reply.tokens} tokens in {reply.segments} segments")


def drop_namespace(namespace: NamespaceOptions, service: ServiceOptions) -> None:
    """Ends a namespace without open sessions and forgets all of its text. A worker that connects later makes it again."""
    reply = _call(service, "DropNamespace", pb.DropNamespaceRequest(namespace=_message(namespace)))
    print_reply(reply, service.as_json, "dropped")


def snapshot(name: SnapshotName, namespace: NamespaceOptions, service: ServiceOptions) -> None:
    """Keeps a namespace's live tier under a name, in the service's data directory."""
    request = pb.SnapshotRequest(namespace=_message(namespace), name=name)
    reply = _call(service, "Snapshot", request, LONG_CALL_SECONDS)
    sentence = f"snapshot {name}: {reply.tokens} tokens in {reply.segments} segments"
    print_reply(reply, service.as_json, sentence)


def snapshots(namespace: NamespaceOptions, service: ServiceOptions) -> None:
    """Lists a namespace's snapshots, oldest first."""
    reply = _call(service, "ListSnapshots", pb.ListSnapshotsRequest(namespace=_message(namespace)))
    rows = [
        (s.name, f"{s.tokens:,}", f"{s.bytes:,}", _utc(s.created_seconds), s.damage) for s in reply.snapshots
    ]
    print_reply(
        reply, service.as_json, table_of(("snapshot", "tokens", "bytes", "made (UTC)", "damage"), rows)
    )


def restore(name: SnapshotName, namespace: NamespaceOptions, service: ServiceOptions) -> None:
    """Replaces a namespace's live tier by a snapshot of it."""
    request = pb.RestoreRequest(namespace=_message(namespace), name=name)
    reply = _call(service, "Restore", request, LONG_CALL_SECONDS)
    print_reply(reply, service.as_json, f"live tier: {reply.tokens} tokens in {reply.segments} segments")


def quota(
    action: Annotated[
        QuotaAction, typer.Argument(help="show; or set, which replaces all of it")
    ] = QuotaAction.SHOW,
    tenant: Annotated[
        str | None, typer.Option(help='show: this tenant alone; set: whose, "" for the tenant without a name')
    ] = None,
    live_bytes: Annotated[
        int | None, QuotaPart(help="most bytes of live text, 6 a token; further text is refused")
    ] = None,
    sessions: Annotated[int | None, QuotaPart(help="most open sessions")] = None,
    streams: Annotated[int | None, QuotaPart(help="most connected workers of that tenant")] = None,
    outputs_per_second: Annotated[
        int | None,
        QuotaPart(help="most outputs a second that enter the live tier; those of a second may come at once"),
    ] = None,
    messages_per_second: Annotated[
        int | None,
        QuotaPart(help="most messages a second of these workers; further ones are answered later", min=1),
    ] = None,
    *,
    service: ServiceOptions,
) -> None:
    """Shows what tenants may have in all their namespaces, what they have, and what was refused them; or sets what one may have."""
    given = {
        "live_bytes": live_bytes,
        "sessions": sessions,
        "streams": streams,
        "outputs_per_second": outputs_per_second,
        "messages_per_second": messages_per_second,
    }
    if action is QuotaAction.SHOW:
        _show_quotas(tenant, [part for part in given if given[part] is not None], service)
    elif tenant is None:
        raise ValueError('quota: set needs --tenant, which may be ""')
    else:
        reply = _call(service, "SetQuota", pb.SetQuotaRequest(tenant=tenant, **given))
        until = "kept" if reply.stored else "until the service ends, which has no data directory"
        bounds = ", ".join(f"{part} {limit:,}" for part, limit in given.items() if limit is not None)
        print_reply(reply, service.as_json, f"tenant {tenant!r}: {bounds or 'no quota'}; {until}")


def _show_quotas(tenant: str | None, given: list[str], service: ServiceOptions) -> None:
    if given:
        raise ValueError(f"quota: {_dashed(given[0])} is for `specstore quota set`")
    reply = _call(service, "ListQuotas", pb.ListQuotasRequest(tenant=tenant))
    rows = [
        (
            each.tenant,
            part.name,
            *(f"{getattr(part, n):,}" if part.HasField(n) else "" for n in ("used", "limit")),
            f"{part.refused:,}",
        )
        for each in reply.tenants
        for part in each.parts
    ]
    print_reply(reply, service.as_json, table_of(("tenant", "of", "used", "quota", "refused"), rows))


def flush(
    namespace: NamespaceOptions,
    tier: Annotated[str, typer.Option(help="live (with all workspaces), session or rejected")] = "",
    session: Annotated[str, typer.Option(help="one session's name")] = "",
    workspace: Annotated[str, typer.Option(help="one workspace's name")] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="every tier but the prior, and workspaces")
    ] = False,
    *,
    service: ServiceOptions,
) -> None:
    """Makes the service forget a tier, a session, a workspace, or all of a namespace: one of --tier, --session, --workspace and --all."""
    if bool(tier) + bool(session) + bool(workspace) + everything != 1:
        raise ValueError("flush: one of --tier, --session, --workspace and --all is required")
    request = pb.FlushRequest(namespace=_message(namespace))
    if tier:
        request.tier = _tier_number(tier)
    elif session:
        request.session = session
    elif workspace:
        request.workspace = workspace
    else:
        request.all = True
    reply = _call(service, "Flush", request)
    print_reply(reply, service.as_json, f"flushed {tier or session or workspace or 'all'}")


def epoch(
    namespace: NamespaceOptions,
    keep: Annotated[
        int | None, typer.Option(help="remove text that is older than so many epochs", min=1, max=2**64 - 1)
    ] = None,
    *,
    service: ServiceOptions,
) -> None:
    """Shows how often a namespace's model has changed its weights, as its workers say; with --keep, removes what older weights have written."""
    reply = _call(
        service, "Epoch", pb.EpochRequest(namespace=_message(namespace), keep=keep), LONG_CALL_SECONDS
    )
    removed = "" if keep is None else f": removed {reply.documents} documents, {reply.tokens} tokens"
    print_reply(reply, service.as_json, f"epoch {reply.epoch}{removed}")


def forget(
    subject: Annotated[
        list[str],
        typer.Option(metavar="KIND:NAME", help="user:NAME or conversation:NAME; may be repeated"),
    ],
    tenant: Tenant = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="search all of the tenant's files afterwards")
    ] = False,
    *,
    service: ServiceOptions,
) -> None:
    """Removes what users or conversations of a tenant have written: from conversations, live tiers, logs and snapshots. Empties the tenant's
    workspaces and groups."""
    request = pb.ForgetRequest(namespace=Namespace(tenant=tenant), verify=verify)
    names = {"user": request.users, "conversation": request.conversations}
    for kind, _, name in (given.partition(":") for given in subject):
        if kind not in names or not name:
            raise ValueError(f"subject: {f'{kind}:{name}'!r} is not user:NAME or conversation:NAME")
        names[kind].extend([bounded_name(name), hashed_name(tenant, name)])
    reply = _call(service, "Forget", request, LONG_CALL_SECONDS)
    print_reply(reply, service.as_json, _forgotten(reply))
    if reply.verification.documents:
        raise typer.Exit(1)


def _forgotten(reply: pb.ForgetReply) -> str:
    said = f"removed {reply.documents} documents, {reply.tokens} tokens, from {reply.namespaces} namespaces"
    if not reply.HasField("verification"):
        return said
    v = reply.verification
    left = (
        f"{v.documents} documents of the subjects are left" if v.documents else "none of the subjects is left"
    )
    same = f"; {v.found} of them are there, since others have published the same" if v.found else ""
    return (
        f"{said}; searched {v.files} files, {v.bytes} bytes: {left}; looked for {v.texts} of the texts{same}"
    )


def warmup(
    namespace: NamespaceOptions,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="JSONL or Parquet (see --field), plain text, or .npy token ids"),
    ] = None,
    server_file: Annotated[
        str, typer.Option(help="instead of SOURCES: a file in DATA/corpora of the service, which reads it")
    ] = "",
    server_tokenizer: Annotated[
        str, typer.Option(help="its tokenizer.json there, or a folder with one; not needed for token ids")
    ] = "",
    field: Annotated[str, typer.Option(help="field of a JSONL line, column of a Parquet file")] = "text",
    *,
    service: ServiceOptions,
) -> None:
    """Adds documents to the live tier of a running service: files of this machine, or with --server-file one that the service reads."""
    if bool(sources) == bool(server_file):
        raise ValueError(f"warmup: SOURCES or --server-file{', not both' if sources else ' is required'}")
    if sources:
        reply = add_documents(service, namespace, sources, field)
    else:
        request = pb.WarmupFileRequest(
            namespace=_message(namespace), file=server_file, field=field, tokenizer=server_tokenizer
        )
        with _admin(service) as (stub, metadata):
            reply = _last(stub.WarmupFile(request, timeout=LONG_CALL_SECONDS, metadata=metadata))
    print_reply(reply, service.as_json, f"added {reply.documents} documents, {reply.tokens} tokens")


def health(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False, *, tls: TlsOptions) -> None:
    """Exits with status 0 if the service is serving, 1 if not."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with open_service(endpoint, Access(tls.files)) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS
        )
    print_reply(reply, as_json, health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)


def _message(options: NamespaceOptions) -> Namespace:
    from datastore_service.client.wire import namespace_message

    return namespace_message(options.namespace())


@contextmanager
def _admin(service: ServiceOptions) -> Iterator[tuple[AdminStub, Metadata]]:
    """A stub of the Admin service and the metadata for its calls."""
    access = Access(service.tls.files, service.shown.token())
    with open_service(service.endpoint, access, service.shown.source) as channel:
        yield AdminStub(channel), access.metadata


def _call(service: ServiceOptions, method: str, request: Message, seconds: float = CALL_SECONDS) -> Any:
    """The reply to one request."""
    with _admin(service) as (stub, metadata):
        return getattr(stub, method)(request, timeout=seconds, metadata=metadata)


def add_documents(
    service: ServiceOptions, namespace: NamespaceOptions, sources: list[Path], field: str
) -> pb.WarmupReply:
    """Adds the documents of files to the live tier. field: as of `storage.corpus.read_documents`.

    Raises StorageError for a file or a tokenizer that cannot be used, DatastoreError."""
    message = _message(namespace)
    documents = _documents(sources, namespace.tokenizer, field)
    with _admin(service) as (stub, metadata), progress(BarColumn(), MofNCompleteColumn()) as bar:
        requests = _requests(message, documents, bar)
        return stub.Warmup(requests, timeout=LONG_CALL_SECONDS, metadata=metadata)


def _tier_number(name: str) -> pb.Tier:
    if name not in FLUSHABLE:
        raise ValueError(f"tier: {name!r} is not {', '.join(FLUSHABLE[:-1])} or {FLUSHABLE[-1]}")
    return pb.Tier.Value(f"TIER_{name.upper()}")


def _documents(sources: list[Path], tokenizer: str, field: str) -> list[pb.Document]:
    """Reads all files, so that a bad one is found before anything is sent. tokenizer: a folder, or a fingerprint if all
    files hold ids."""
    from datastore_service.storage.corpus import read_tokens
    from datastore_service.storage.tokenizer import load_tokenizer

    is_folder = not FINGERPRINT.fullmatch(tokenizer)
    encoder = load_tokenizer(tokenizer) if is_folder else None
    return [
        pb.Document(tokens=tokens.tolist())
        for source in sources
        for tokens in read_tokens(source, field, encoder, MAX_VOCAB)
    ]


def _requests(
    namespace: Namespace, documents: list[pb.Document], bar: Progress
) -> Iterator[pb.WarmupRequest]:
    task = bar.add_task("sending documents", total=len(documents))
    yield pb.WarmupRequest(namespace=namespace)
    for first in range(0, len(documents), DOCUMENTS_A_MESSAGE):
        some = documents[first : first + DOCUMENTS_A_MESSAGE]
        yield pb.WarmupRequest(documents=some)
        bar.advance(task, len(some))
    bar.update(task, description="sent; the service indexes")


def _last(replies: Iterable[pb.WarmupProgress]) -> pb.WarmupProgress:
    """Shows each reply as it comes; returns the last."""
    last = pb.WarmupProgress()
    with progress() as bar:
        task = bar.add_task("the service reads")
        for last in replies:
            bar.update(task, description=f"added {last.documents:,} documents, {last.tokens:,} tokens")
    return last


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
